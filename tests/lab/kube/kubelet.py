"""The kubelets of a cluster: each pod becomes a host of the lab, each container a process there.

A container that is alone in its pod takes along what it started, as the end of a container's first
process does.  Containers are ready as soon as they run: probes are not looked at.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

from kube import volumes
from kube.failures import ApiError
from kube.housekeeping import disrupt, is_ready, names, state
from kube.jobs import has_finished
from kube.selectors import has_match_labels
from kube.store import ObjectStore, timestamp
from kube.volumes import MountError

BACKOFF = 0.1
"""Seconds before a container is started again, doubled each time up to twenty times that."""
_RETRY = 0.1
_NO_PROGRAM = "executable file not found in $PATH: unknown"
_KEPT = ("PATH", "LANG", "MSRUN_TESTS_SESSION", "PYTHONPATH", "VIRTUAL_ENV")


class Kubelets:
    """All kubelets of a cluster, and what tests may do to their pods.

    Attributes:
        broken_images: Images that can never be pulled.
        entrypoints: Words that an image runs when a container gives no command.
        env: Variables that every image sets.
        workdirs: Image -> the directory in which its containers start, else /tmp.
        node_files: What is below it, every node has below / for volumes of kind hostPath.
    """

    def __init__(self, store: ObjectStore, lab, folder: Path, emit) -> None:
        self.store, self.lab, self.folder, self.emit = store, lab, folder, emit
        self.broken_images: set[str] = set()
        self.entrypoints: dict[str, list[str]] = {}
        self.env: dict[str, str] = {}
        self.workdirs: dict[str, str] = {}
        self.lock = threading.RLock()
        self._runners: dict[str, PodRunner] = {}
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self.node_files = folder / "node"

    def sync(self) -> None:
        """Start the pods that nodes were given, and end those that are to go."""
        nodes = {node["metadata"]["name"]: node for node in self.store.list("nodes")}
        pods = {pod["metadata"]["uid"]: pod for pod in self.store.list("pods")}
        for uid, pod in pods.items():
            node = nodes.get(pod["spec"].get("nodeName"))
            if node is None or not is_ready(node):
                continue
            runner = self._runners.get(uid)
            if runner is None and not has_finished(pod):
                runner = self._runners[uid] = PodRunner(self, pod)
                runner.start()
            if runner is not None and pod["metadata"].get("deletionTimestamp"):
                runner.stop(pod["metadata"].get("deletionGracePeriodSeconds", 0))
            # One that ended in the moment in which it was deleted has nobody else to remove it.
            is_over = runner is None or not runner.is_alive()
            if is_over and pod["metadata"].get("deletionTimestamp"):
                with contextlib.suppress(ApiError):
                    where = pod["metadata"]["namespace"], pod["metadata"]["name"]
                    self.store.delete("pods", *where, grace=0)
        for uid, runner in list(self._runners.items()):
            if uid not in pods:
                runner.stop(0)
                if not runner.is_alive():
                    del self._runners[uid]

    def write_names(self) -> None:
        """Tell every pod the names of all others."""
        known = names(self.store)
        with self.lock:
            for runner in list(self._runners.values()):
                if runner.host is not None and runner.host.pid:
                    _write_hosts(runner.host, known.get(runner.namespace, {}))

    def runner(self, name: str, namespace: str = "default") -> PodRunner:
        pod = self.store.find("pods", namespace, name)
        return self._runners[pod["metadata"]["uid"]]

    def close(self) -> None:
        for runner in list(self._runners.values()):
            runner.power_off()
        for runner in list(self._runners.values()):
            runner.join()

    # What the API server asks.

    def log_of(self, pod: dict, container: str | None, *, previous: bool = False) -> Path:
        runner = self._runners.get(pod["metadata"]["uid"])
        container = container or pod["spec"]["containers"][0]["name"]
        found = runner.logs.get(container, []) if runner else []
        if len(found) <= previous:
            word = "previous terminated container not found" if previous else "waiting to start"
            name = pod["metadata"]["name"]
            text = f'container "{container}" in pod "{name}" is {word}: ContainerCreating'
            raise ApiError(400, "BadRequest", text)
        return found[-2 if previous else -1]

    def has_ended(self, pod: dict) -> bool:
        runner = self._runners.get(pod["metadata"]["uid"])
        return runner is None or not runner.is_alive()

    def run_in(self, pod: dict, container: str | None, words: list[str]) -> subprocess.Popen[bytes]:
        runner = self._runners.get(pod["metadata"]["uid"])
        if runner is None or not runner.is_up:
            text = f"pod {pod['metadata']['name']} does not run"
            raise ApiError(500, "InternalError", text)
        spec = next(c for c in pod["spec"]["containers"] if container in (None, c["name"]))
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return runner.popen(spec, words, **pipes)

    def evict(self, namespace: str, name: str) -> None:
        pod = self.store.get(self.store.resource("pods"), namespace, name)
        for budget in self.store.list("poddisruptionbudgets", namespace):
            is_meant = has_match_labels(pod, budget["spec"].get("selector", {}))
            if is_meant and budget["spec"].get("maxUnavailable") == 0:
                text = "Cannot evict pod as it would violate the pod's disruption budget."
                raise ApiError(429, "TooManyRequests", text)
        disrupt(self.store, pod, "EvictionByEvictionAPI", "Eviction API: evicting")

    # Faults.

    def power_off(self, node: str) -> None:
        """End the pods of a node as a power cut does; nobody reports it."""
        for runner in list(self._runners.values()):
            if runner.pod["spec"].get("nodeName") == node:
                runner.power_off()


class PodRunner(threading.Thread):
    """One pod on its node, from its volumes to its end.

    Attributes:
        host: The host of the lab that is this pod; None before and after.
        logs: The files of each container, one a start.
    """

    def __init__(self, kubelets: Kubelets, pod: dict) -> None:
        super().__init__(daemon=True)
        self.kubelets, self.pod = kubelets, pod
        self.namespace = pod["metadata"]["namespace"]
        self.host = None
        self.logs: dict[str, list[Path]] = {}
        self.is_up = False
        self._stopping = threading.Event()
        self._is_silent = False
        self._grace = 0.0
        self._cause = self._why = ""
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        self._statuses: dict[str, dict] = {}
        self._write = threading.Lock()

    # What others ask of it.

    def stop(self, grace: float) -> None:
        """Have the pod end: SIGTERM, and SIGKILL after `grace` seconds."""
        if not self._stopping.is_set():
            self._grace = grace
            self._stopping.set()
            threading.Thread(target=self._terminate, daemon=True).start()
        elif grace == 0 and self._grace:
            self._grace = 0
            self._kill()

    def kill(self, cause: str = "") -> None:
        """SIGKILL everything in the pod; `cause` is the reason that its status will give."""
        self._cause = cause
        self._kill()

    def power_off(self) -> None:
        self._is_silent = True
        self._stopping.set()
        with self.kubelets.lock:
            if self.host is not None and self.host.pid:
                self.host.power_off()

    def popen(self, container: dict, words: list[str], **options) -> subprocess.Popen[bytes]:
        env = {key: os.environ[key] for key in _KEPT if key in os.environ}
        env |= {"HOSTNAME": self.host.name, **self.kubelets.env}
        env |= volumes.environment(self.kubelets.store, self._current(), container)
        words = [volumes.expand(word, env) for word in words]
        own = self.kubelets.workdirs.get(container["image"], "/tmp")
        enter = self.host.enter(container.get("workingDir") or own)
        enter += volumes.user_words(self.pod, container)
        return subprocess.Popen([*enter, *words], env=env, **options)

    # Its life.

    def run(self) -> None:
        try:
            if self._prepare():
                self._run_containers()
        finally:
            self.is_up = False
            with self.kubelets.lock:
                if self.host is not None:
                    if self.host.pid:
                        self.host.power_off()
                    self.kubelets.lab.remove(self.host)
        if not self._is_silent:
            self._conclude()

    def _prepare(self) -> bool:
        """Pull, mount and boot, as long as that takes; False when the pod is to end instead."""
        spec = self.pod["spec"]
        self._report(phase="Pending", startTime=timestamp())
        while not self._stopping.is_set():
            broken = [
                c["image"] for c in spec["containers"] if c["image"] in self.kubelets.broken_images
            ]
            if not broken:
                break
            text = f'Back-off pulling image "{broken[0]}": not found'
            self._wait_for(spec["containers"], "ImagePullBackOff", text, "Failed")
        while (problem := volumes.user_problem(self.pod)) and not self._stopping.is_set():
            self._wait_for(spec["containers"], "CreateContainerConfigError", problem, "Failed")
        made = self._retried(
            lambda: volumes.make(self.kubelets.store, self.pod, self.kubelets.folder)
        )
        if made is None:
            return False
        with self.kubelets.lock:
            if self._stopping.is_set():
                return False
            name = spec.get("hostname") or self.pod["metadata"]["name"]
            self.host = self.kubelets.lab.add(name)
        try:
            for container in [*spec.get("initContainers", ()), *spec["containers"]]:
                volumes.mount(self.host, made, container)
            for container in spec["containers"]:
                volumes.protect(self.host, self.pod, container)
        except MountError as error:
            self.kubelets.emit(self.pod, "Warning", "FailedMount", str(error))
            self._report(phase="Failed", reason="FailedMount", message=str(error))
            return False
        self._report(podIP=self.host.ipv4, podIPs=[{"ip": self.host.ipv4}], hostIP="10.77.0.254")
        self.kubelets.write_names()
        return not self._stopping.is_set()

    def _retried(self, make):
        """Return what `make` gives once it can, None when the pod is to end before."""
        said = ""
        while not self._stopping.is_set():
            try:
                return make()
            except MountError as error:
                if str(error) != said:
                    said = str(error)
                    self.kubelets.emit(self.pod, "Warning", "FailedMount", said)
                self._wait_for(self.pod["spec"]["containers"], "ContainerCreating", said)
        return None

    def _wait_for(self, containers: list[dict], reason: str, text: str, event: str = "") -> None:
        waiting = {"waiting": {"reason": reason, "message": text}}
        held = [self._status(c, waiting, 0) for c in containers]
        before = self._current().get("status", {}).get("containerStatuses")
        if before != held:
            self._report(containerStatuses=held)
            if event:
                self.kubelets.emit(self.pod, "Warning", event, text)
        self._stopping.wait(_RETRY)

    def _run_containers(self) -> None:
        spec = self.pod["spec"]
        self.is_up = True
        for container in spec.get("initContainers", ()):
            policy = "Never" if spec["restartPolicy"] == "Never" else "OnFailure"
            if self._live(container, policy, alone=True):
                self._report(phase="Failed")
                return
        policies = (spec["containers"], spec["restartPolicy"])
        threads = [
            threading.Thread(
                target=self._live,
                args=(container, policies[1]),
                kwargs={"alone": len(spec["containers"]) == 1},
                daemon=True,
            )
            for container in spec["containers"]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _live(self, container: dict, policy: str, *, alone: bool) -> int:
        """Run a container until it is not started again; returns its last exit code."""
        restarts, name = 0, container["name"]
        while True:
            began = timestamp()
            code = self._run_once(container, restarts, began)
            if alone and not self._is_silent:
                self._kill()
            reason = self._cause or ("Completed" if code == 0 else "Error")
            self._cause, why = "", self._why
            self._why = ""
            ended = {
                "exitCode": code,
                "reason": reason,
                "startedAt": began,
                "finishedAt": timestamp(),
            }
            if why:
                ended["message"] = why
            elif code and container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
                ended["message"] = self.logs[name][-1].read_bytes()[-2048:].decode(errors="replace")
            again = policy == "Always" or (policy == "OnFailure" and code != 0)
            if self._stopping.is_set() or not again:
                self._set_status(container, {"terminated": ended}, restarts)
                return code
            text = f"back-off restarting failed container={name}"
            waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": text}}
            self._set_status(container, waiting, restarts, {"terminated": ended})
            self.kubelets.emit(self.pod, "Warning", "BackOff", text)
            self._stopping.wait(BACKOFF * min(2**restarts, 20))
            restarts += 1

    def _run_once(self, container: dict, restarts: int, began: str) -> int:
        name = container["name"]
        image = self.kubelets.entrypoints.get(container["image"], [])
        words = [*(container.get("command") or image), *container.get("args", ())]
        logs = self.logs.setdefault(name, [])
        uid = self.pod["metadata"]["uid"]
        path = self.kubelets.folder / "logs" / f"{uid}.{name}.{len(logs)}.log"
        with path.open("ab") as log:
            logs.append(path)
            if self._stopping.is_set():
                return 143
            if words and "/" not in words[0] and shutil.which(words[0]) is None:
                self._cause = "StartError"
                self._why = f'failed to create containerd task: exec: "{words[0]}": {_NO_PROGRAM}'
                return 128
            try:
                streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                program = self.popen(container, words, **streams)
            except MountError as error:
                log.write(f"{error}\n".encode())
                return 128
        self._programs[name] = program
        if self._stopping.is_set():
            program.terminate()
        self._set_status(container, {"running": {"startedAt": began}}, restarts)
        code = program.wait()
        return code if code >= 0 else 128 - code

    def _terminate(self) -> None:
        programs = dict(self._programs)
        for container in self.pod["spec"]["containers"]:
            hook = container.get("lifecycle", {}).get("preStop", {}).get("exec")
            if hook and self.is_up and container["name"] in programs:
                with contextlib.suppress(MountError, OSError, subprocess.TimeoutExpired):
                    self.popen(container, hook["command"]).wait(self._grace)
        for program in programs.values():
            with contextlib.suppress(OSError):
                program.send_signal(signal.SIGTERM)
        end = time.monotonic() + self._grace
        while self.is_up and time.monotonic() < end:
            self.join(0.05)
            end = min(end, time.monotonic() + self._grace)
        if self.is_up:
            self._kill()

    def _kill(self) -> None:
        with self.kubelets.lock:
            if self.host is not None and self.host.pid and self.is_up:
                self.host.kill_all()
                for program in list(self._programs.values()):
                    program.kill()  # one that is still on its way to the host, too

    # What it tells.

    def _status(self, container: dict, held: dict, restarts: int, last: dict | None = None) -> dict:
        return {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "ready": "running" in held,
            "started": "running" in held,
            "restartCount": restarts,
            "state": held,
            "lastState": last or {},
        }

    def _set_status(self, container: dict, held: dict, restarts: int, last=None) -> None:
        with self._write:
            name = container["name"]
            last = last or self._statuses.get(name, {}).get("lastState")
            self._statuses[name] = self._status(container, held, restarts, last)
            order = [c["name"] for c in self.pod["spec"]["containers"]]
            mine = [self._statuses[n] for n in order if n in self._statuses]
            first = [s for n, s in self._statuses.items() if n not in order]
            is_ready_now = len(mine) == len(order) and all(s["ready"] for s in mine)
            ready = [state(k, str(is_ready_now)) for k in ("Ready", "ContainersReady")]
            always = [state("PodScheduled"), state("Initialized")]
            kept = [
                c
                for c in self._current().get("status", {}).get("conditions", ())
                if c["type"] == "DisruptionTarget"
            ]
            fields = {"containerStatuses": mine, "conditions": [*always, *ready, *kept]}
            if first:
                fields["initContainerStatuses"] = first
            over = len(mine) == len(order) and all("terminated" in s["state"] for s in mine)
            if mine and not over:
                fields["phase"] = "Running"
            self._report(**fields)

    def _conclude(self) -> None:
        """Say how the pod ended, and let it go where it was deleted."""
        codes = [s["state"].get("terminated", {}).get("exitCode") for s in self._statuses.values()]
        is_good = bool(codes) and not any(code != 0 for code in codes)
        if self._current().get("status", {}).get("phase") != "Failed":
            self._report(phase="Succeeded" if is_good else "Failed")
        if self._stopping.is_set():
            with contextlib.suppress(ApiError):
                metadata = self.pod["metadata"]
                where = metadata["namespace"], metadata["name"]
                self.kubelets.store.delete("pods", *where, grace=0, uid=metadata["uid"])

    def _current(self) -> dict:
        found = self.kubelets.store.find("pods", self.namespace, self.pod["metadata"]["name"])
        is_mine = found and found["metadata"]["uid"] == self.pod["metadata"]["uid"]
        return found if is_mine else self.pod

    def _report(self, **fields: object) -> None:
        if self._is_silent or (self._current() is self.pod and self._stopping.is_set()):
            return
        with contextlib.suppress(ApiError):
            self.kubelets.store.set_status(
                "pods", self.namespace, self.pod["metadata"]["name"], fields
            )


def _write_hosts(host, known: dict[str, list[str]]) -> None:
    """Write /etc/hosts in place, where the host has it mounted."""
    lines = ["127.0.0.1 localhost", "::1 localhost", f"{host.ipv4} {host.name}"]
    lines += [f"{address} {name}" for name, found in sorted(known.items()) for address in found]
    path = host.lab.folder / "etc" / host.name
    text = "\n".join([*lines, ""])
    if path.read_text() != text:
        with path.open("r+") as file:
            file.write(text)
            file.truncate()
