"""The Job controller: `batch/v1` Jobs, indexed or not, become pods.

`sync` looks at one Job and its pods and takes the next steps, as often as it likes.  A finished
pod keeps the finalizer of the controller until it is counted in the Job's status, so none is
counted twice or missed, also when somebody deletes it.
"""

from __future__ import annotations

import calendar
import contextlib
import copy
import time

from kube.failures import ApiError
from kube.selectors import dig
from kube.store import ObjectStore, timestamp

TRACKING = "batch.kubernetes.io/job-tracking"
INDEX = "batch.kubernetes.io/job-completion-index"
BACKOFF = 0.1
"""Seconds before a failed pod is replaced; doubles with each, up to ten times that."""


class JobController:
    """Runs the Jobs of a store; call `sync_all` whenever something may have changed."""

    def __init__(self, store: ObjectStore, emit) -> None:
        self._store = store
        self._emit = emit
        self._not_before: dict[str, float] = {}

    def sync_all(self) -> None:
        jobs = self._store.list("jobs")
        for job in jobs:
            with contextlib.suppress(ApiError):
                self.sync(job)
        known = {job["metadata"]["uid"] for job in jobs}
        for pod in self._store.list("pods"):  # whose Job is gone
            if TRACKING in pod["metadata"].get("finalizers", ()) and _owner(pod) not in known:
                self._release(pod)

    def sync(self, job: dict) -> None:  # noqa: C901, PLR0912 - a table of states
        metadata, spec = job["metadata"], job["spec"]
        namespace, name = metadata["namespace"], metadata["name"]
        pods = [p for p in self._store.list("pods", namespace) if _owner(p) == metadata["uid"]]
        if metadata.get("deletionTimestamp"):
            for pod in pods:
                self._release(pod)
            return
        if condition(job, "Complete") or condition(job, "Failed"):
            for pod in pods:
                if has_finished(pod):
                    self._release(pod)
            self._remove_after_ttl(job)
            return
        status = copy.deepcopy(job.get("status", {}))
        status.setdefault("conditions", [])
        verdict = self._count(job, pods, status)
        live = [
            p for p in pods if not has_finished(p) and not p["metadata"].get("deletionTimestamp")
        ]
        if status.get("startTime") is None and not spec["suspend"]:
            status["startTime"] = timestamp()
        verdict = verdict or _over(job, status)
        if verdict:
            kind, reason, message = verdict
            _set(
                status,
                "SuccessCriteriaMet" if kind == "Complete" else "FailureTarget",
                reason,
                message,
            )
            self._delete(live)
            if all(map(has_finished, pods)):
                _set(status, kind, reason, message)
                if kind == "Complete":
                    status["completionTime"] = timestamp()
                self._emit(
                    job, "Normal" if kind == "Complete" else "Warning", reason or kind, message
                )
            live = []
        elif spec["suspend"]:
            self._delete(live)
            _set(status, "Suspended", "JobSuspended", "Job suspended")
            status["startTime"], live = None, []
        else:
            if any(
                c["type"] == "Suspended" and c["status"] == "True" for c in status["conditions"]
            ):
                _set(status, "Suspended", "JobResumed", "Job resumed", truth="False")
            live = self._scale(job, pods, live, status)
        ending = [p for p in pods if p["metadata"].get("deletionTimestamp") and not has_finished(p)]
        status |= {"active": len(live), "terminating": len(ending)}
        status["ready"] = sum(
            dig(p, 'status.conditions[?(@.type=="Ready")].status') == "True" for p in live
        )
        self._store.set_status("jobs", namespace, name, status)
        for pod in pods:
            if has_finished(pod):
                self._release(pod)

    def _count(self, job: dict, pods: list[dict], status: dict) -> tuple | None:
        """Put finished pods that are not yet counted into `status`; returns a verdict."""
        spec, verdict = job["spec"], None
        is_indexed = spec["completionMode"] == "Indexed"
        done = set(_indexes(status.get("completedIndexes", "")))
        lost = set(_indexes(status.get("failedIndexes", "")))
        for pod in pods:
            if not has_finished(pod) or TRACKING not in pod["metadata"].get("finalizers", ()):
                continue
            index = index_of(pod)
            if pod["status"]["phase"] == "Succeeded":
                status["succeeded"] = status.get("succeeded", 0) + 1
                done.add(index)
                continue
            action = _action(spec.get("podFailurePolicy"), pod)
            if action == "FailJob":
                said = f"Container {_failed_container(pod)} for pod {_path(pod)} failed"
                text = f"{said} with exit code {_code(pod)} matching FailJob rule"
                verdict = ("Failed", "PodFailurePolicy", text)
            if action != "Ignore":
                status["failed"] = status.get("failed", 0) + 1
                self._back_off(job)
            failures = _failures(pod) if action != "Ignore" else 0
            if action == "FailIndex" or failures > spec.get("backoffLimitPerIndex", failures):
                lost.add(index)
        if is_indexed:
            done, lost = (
                {index for index in found if index is not None and index < spec["completions"]}
                for found in (done, lost)
            )
            status |= {"completedIndexes": _ranges(done), "succeeded": len(done)}
            if lost or "failedIndexes" in status:
                status["failedIndexes"] = _ranges(lost)
        return verdict

    def _back_off(self, job: dict) -> None:
        failed = job.get("status", {}).get("failed", 0)
        wait = BACKOFF * min(2**failed, 10)
        self._not_before[job["metadata"]["uid"]] = time.monotonic() + wait

    def _scale(self, job: dict, pods: list[dict], live: list[dict], status: dict) -> list[dict]:
        """Create or delete pods until as many run as should."""
        spec = job["spec"]
        done, lost = (
            _indexes(status.get("completedIndexes", "")),
            _indexes(status.get("failedIndexes", "")),
        )
        if spec["completionMode"] == "Indexed":
            surplus = [p for p in live if index_of(p) >= spec["completions"]]
            kept = sorted((p for p in live if p not in surplus), key=index_of)
            surplus += kept[spec["parallelism"] :]
            kept = kept[: spec["parallelism"]]
            waits = spec["podReplacementPolicy"] == "Failed"
            held = {index_of(p) for p in pods if not has_finished(p)} if waits else set()
            held |= {index_of(p) for p in kept}
            free = [i for i in range(spec["completions"]) if i not in {*done, *lost, *held}]
            wanted: list[int | None] = [*free[: spec["parallelism"] - len(kept)]]
        else:
            left = spec["completions"] - status.get("succeeded", 0)
            count = min(spec["parallelism"], left)
            kept, surplus = live[:count], live[count:]
            wanted = [None] * (count - len(kept))
        self._delete(surplus)
        if time.monotonic() < self._not_before.get(job["metadata"]["uid"], 0):
            return kept
        for index in wanted:
            try:
                kept.append(self._create(job, pods, index))
            except ApiError as error:
                self._emit(job, "Warning", "FailedCreate", f"Error creating: {error}")
                self._not_before[job["metadata"]["uid"]] = time.monotonic() + BACKOFF * 10
                break
        return kept

    def _create(self, job: dict, pods: list[dict], index: int | None) -> dict:
        pod = copy.deepcopy(job["spec"]["template"])
        metadata, name = pod.setdefault("metadata", {}), job["metadata"]["name"]
        metadata["generateName"] = f"{name}-" if index is None else f"{name}-{index}-"
        metadata["finalizers"] = [TRACKING]
        metadata["ownerReferences"] = [owner_reference(job)]
        if index is not None:
            metadata.setdefault("labels", {})[INDEX] = str(index)
            annotations = metadata.setdefault("annotations", {})
            annotations[INDEX] = str(index)
            mine = (_failures(p) for p in pods if index_of(p) == index and has_failed(p))
            if "backoffLimitPerIndex" in job["spec"]:
                word = "batch.kubernetes.io/job-index-failure-count"
                annotations[word] = str(max(mine, default=0))
            pod["spec"].setdefault("hostname", f"{name}-{index}")
            source = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
            for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
                env = container.setdefault("env", [])
                if not any(entry["name"] == "JOB_COMPLETION_INDEX" for entry in env):
                    env.append({"name": "JOB_COMPLETION_INDEX", "valueFrom": source})
        made = self._store.create("pods", job["metadata"]["namespace"], pod)
        self._emit(job, "Normal", "SuccessfulCreate", f"Created pod: {made['metadata']['name']}")
        return made

    def _delete(self, pods: list[dict]) -> None:
        for pod in pods:
            with contextlib.suppress(ApiError):
                self._store.delete("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])

    def _release(self, pod: dict) -> None:
        finalizers = pod["metadata"].get("finalizers", [])
        if TRACKING in finalizers:

            def edit(obj):
                obj["metadata"].pop("resourceVersion")
                obj["metadata"]["finalizers"] = [f for f in finalizers if f != TRACKING]

            with contextlib.suppress(ApiError):
                self._store.change(
                    "pods", pod["metadata"]["namespace"], pod["metadata"]["name"], edit
                )

    def _remove_after_ttl(self, job: dict) -> None:
        seconds = job["spec"].get("ttlSecondsAfterFinished")
        if seconds is None:
            return
        ended = next(c for c in job["status"]["conditions"] if c["type"] in ("Complete", "Failed"))
        if time.time() >= seconds_of(ended["lastTransitionTime"]) + seconds:
            where = job["metadata"]["namespace"], job["metadata"]["name"]
            self._store.delete("jobs", *where, propagation="Foreground")


def _failures(pod: dict) -> int:
    word = "batch.kubernetes.io/job-index-failure-count"
    return int(pod["metadata"].get("annotations", {}).get(word, 0)) + 1


def _over(job: dict, status: dict) -> tuple | None:  # noqa: PLR0911 - a table of ends
    """Return the condition, reason and message with which a Job is over, None while it is not."""
    spec = job["spec"]
    earlier = {c["type"]: c for c in status["conditions"] if c["status"] == "True"}
    for target, kind in (("FailureTarget", "Failed"), ("SuccessCriteriaMet", "Complete")):
        if target in earlier:
            return kind, earlier[target].get("reason", ""), earlier[target].get("message", "")
    done, lost = (
        _indexes(status.get("completedIndexes", "")),
        _indexes(status.get("failedIndexes", "")),
    )
    seconds = spec.get("activeDeadlineSeconds")
    began = status.get("startTime")
    if seconds is not None and began and time.time() >= seconds_of(began) + seconds:
        return "Failed", "DeadlineExceeded", "Job was active longer than specified deadline"
    if status.get("failed", 0) > spec["backoffLimit"]:
        return "Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    if len(lost) > spec.get("maxFailedIndexes", len(lost)):
        return (
            "Failed",
            "MaxFailedIndexesExceeded",
            "Job has exceeded the specified maximal number of failed indexes",
        )
    for rule in spec.get("successPolicy", {}).get("rules", ()):
        named = set(_indexes(rule["succeededIndexes"])) if "succeededIndexes" in rule else None
        met = set(done) if named is None else named & set(done)
        if len(met) >= rule.get("succeededCount", len(named or ())):
            return "Complete", "SuccessPolicy", "Matched rules at index 0"
    if status.get("succeeded", 0) >= spec["completions"]:
        return "Complete", "CompletionsReached", "Reached expected number of succeeded pods"
    if lost and len(done) + len(lost) >= spec["completions"]:
        return "Failed", "FailedIndexes", "Job has failed indexes"
    return None


def _action(policy: dict | None, pod: dict) -> str:
    """Return what a podFailurePolicy says of a failed pod."""
    for rule in (policy or {}).get("rules", ()):
        codes = rule.get("onExitCodes")
        if codes:
            for container in pod["status"].get("containerStatuses", ()):
                code = container["state"].get("terminated", {}).get("exitCode", 0)
                is_meant = codes.get("containerName") in (None, container["name"])
                if is_meant and code and (code in codes["values"]) == (codes["operator"] == "In"):
                    return rule["action"]
        for pattern in rule.get("onPodConditions", ()):
            for held in pod["status"].get("conditions", ()):
                same = held["type"] == pattern["type"]
                if same and held["status"] == pattern.get("status", "True"):
                    return rule["action"]
    return "Count"


def _set(status: dict, kind: str, reason: str, message: str, truth: str = "True") -> None:
    others = [c for c in status["conditions"] if c["type"] != kind]
    old = next((c for c in status["conditions"] if c["type"] == kind), None)
    if old and old["status"] == truth:
        return
    new = {"type": kind, "status": truth, "reason": reason, "message": message}
    status["conditions"] = [*others, {**new, "lastTransitionTime": timestamp()}]


def condition(obj: dict, kind: str) -> bool:
    held = obj.get("status", {}).get("conditions", ())
    return any(c["type"] == kind and c["status"] == "True" for c in held)


def has_finished(pod: dict) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def has_failed(pod: dict) -> bool:
    return pod.get("status", {}).get("phase") == "Failed"


def index_of(pod: dict) -> int | None:
    index = pod["metadata"].get("annotations", {}).get(INDEX)
    return None if index is None else int(index)


def owner_reference(obj: dict) -> dict:
    named = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "name": obj["metadata"]["name"]}
    return {**named, "uid": obj["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True}


def seconds_of(text: str) -> float:
    return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))


def _owner(pod: dict) -> str | None:
    return next(
        (r["uid"] for r in pod["metadata"].get("ownerReferences", ()) if r.get("controller")), None
    )


def _code(pod: dict) -> int:
    codes = (
        c["state"].get("terminated", {}).get("exitCode", 0)
        for c in pod["status"].get("containerStatuses", ())
    )
    return next(filter(None, codes), 0)


def _failed_container(pod: dict) -> str:
    held = pod["status"].get("containerStatuses", ())
    return next((c["name"] for c in held if c["state"].get("terminated", {}).get("exitCode")), "")


def _path(pod: dict) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def _indexes(text: str) -> list[int]:
    """Return the numbers of `0,2-4`."""
    found: list[int] = []
    for part in filter(None, str(text).split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _ranges(indexes: set) -> str:
    parts: list[list[int]] = []
    for index in sorted(indexes):
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
