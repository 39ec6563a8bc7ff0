"""MsrunJob: our own kind.  A Job of Kubernetes runs the nodes; the operator makes it and reads it.

So what Kubernetes can do it does: it replaces lost pods, ends the job at its deadline, and goes on
while no operator runs.  The operator adds the names and the key that the nodes need, and one
status: phase, nodes, restarts, and the cause when the job failed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from launchers.operator import decision
from launchers.operator.decision import Action, Create, Decision, Ending, Object, RecordEvent, has
from launchers.operator.msrunjob_objects import CONTAINER, RETRIED, node_range, objects
from msrun.errors import UsageError

API_VERSION = "msrun.io/v1"
# Between two looks for the Job of an earlier MsrunJob, which is about to go.
_GONE_SECONDS = 1.0
# What the schema of the definition fills in, for objects that were made before it did.
DEFAULTS: Object = {
    "nodes": 1,
    "maxRestarts": 0,
    "nodeRestarts": 3,
    "gracePeriodSeconds": 10,
    "python": "python",
}


def decide(
    job: Object,
    batch_job: Object | None,
    pods: Sequence[Object],
    now: float,
    events: Sequence[Object] = (),
) -> Decision:
    """Return what to do about an MsrunJob.

    Args:
        job: The object as it is.
        batch_job: The Job of that name, None when there is none.
        pods: Its pods.
        now: Seconds since 1970.
        events: Warnings of its namespace, where pods wait.
    """
    status: Object = dict(job.get("status") or {})
    if decision.is_going(job):
        return Decision(status)
    job = {**job, "spec": {**DEFAULTS, **job["spec"]}}
    name = job["metadata"]["name"]
    actions: list[Action] = []
    if not has(status, decision.CREATED):
        text = f"MsrunJob {name} is created."
        status = decision.with_condition(status, decision.CREATED, "MsrunJobCreated", text, now)
        status |= {"startTime": decision.timestamp(now), "phase": "Pending", "restarts": 0}
        actions.append(RecordEvent(is_warning=False, reason="MsrunJobCreated", message=text))
    if has(status, decision.SUCCEEDED) or has(status, decision.FAILED):
        return decision.merged(actions, _expire(job, status, now))
    if batch_job is None or not decision.is_owned(batch_job, job):
        return decision.merged(actions, _begin(job, batch_job, status, now))
    pods = [pod for pod in pods if decision.is_owned(pod, batch_job)]
    status |= {"jobMade": True, **_progress(job, batch_job, pods, status)}
    status["message"] = decision.why_pods_wait(pods, events, batch_job)
    if told := _is_too_many(job, batch_job, status):
        actions.append(told)
        status["nodesAsked"] = int(job["spec"]["nodes"])
    made_of = _fixed_part(job)
    if status.setdefault("madeOf", made_of) != made_of:
        status["madeOf"] = made_of
        text = "fields of the spec changed that the running Job keeps; a new MsrunJob has them"
        actions.append(RecordEvent(is_warning=True, reason="SpecNotApplied", message=text))
    return decision.merged(actions, _follow(job, batch_job, status, pods, now))


def _begin(job: Object, foreign: Object | None, status: Object, now: float) -> Decision:
    """Return what to do while the job has no Job; `foreign` has its name, but is another's."""
    name = job["metadata"]["name"]
    if foreign is None and status.get("jobMade"):
        return _end(job, status, Ending(143, f"Job {name} was deleted"), now)
    if foreign is None:
        try:
            made = objects(job)
        except UsageError as error:
            text = f"spec.podTemplate: {error.message}"
            return decision.refused(status, "MsrunJob", text, now)
        return Decision(status, tuple(map(Create, made)))
    if decision.is_left_behind(foreign, job):
        status = {**status, "message": f"waits until the earlier Job {name} is gone"}
        return Decision(status, again_in=_GONE_SECONDS)
    return _end(job, status, Ending(2, f"a Job {name} is there already, and another owns it"), now)


def _size(job: Object, batch_job: Object) -> tuple[int, int]:
    """Return how many nodes the Job is to have, and the fewest that it goes on with."""
    nodes = int(job["spec"]["nodes"])
    fewest, most = node_range(batch_job) or (nodes, nodes)
    return min(nodes, most), fewest


def _is_too_many(job: Object, batch_job: Object, status: Object) -> RecordEvent | None:
    """Return what to say about a number of nodes that the job cannot have, once for each."""
    asked, (given, _) = int(job["spec"]["nodes"]), _size(job, batch_job)
    if asked == given or status.get("nodesAsked") == asked:
        return None
    text = f"spec.nodes {asked} has no effect beyond {given}, with which the job was made"
    return RecordEvent(is_warning=True, reason="SpecNotApplied", message=text)


def _fixed_part(job: Object) -> str:
    """Return a digest of what a Job keeps of a spec for as long as it exists."""
    free = ("nodes", "suspend", "ttlSecondsAfterFinished")
    kept = {name: value for name, value in job["spec"].items() if name not in free}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def _progress(
    job: Object, batch_job: Object, pods: Sequence[Object], status: Mapping[str, object]
) -> Object:
    """Return the fields of the status that count."""
    running = sum(decision.phase(pod) == "Running" and not decision.is_going(pod) for pod in pods)
    failed = int((batch_job.get("status") or {}).get("failed") or 0)
    return {
        "nodes": f"{running}/{_size(job, batch_job)[0]}",
        "restarts": max(failed, int(str(status.get("restarts") or 0))),
    }


def _follow(
    job: Object, batch_job: Object, status: Object, pods: Sequence[Object], now: float
) -> Decision:
    held = batch_job.get("status") or {}
    name = job["metadata"]["name"]
    failure = decision.first_failure([p for p in pods if _is_verdict(p)], CONTAINER)
    if failure and "verdict" not in status:
        # Now, while the pod is there: the Job's controller may remove it before the Job has ended.
        status = decision.with_verdict(status, failure[1])
    if has(held, "Complete"):
        text = f"MsrunJob {name} successfully completed."
        status = decision.with_condition(status, decision.SUCCEEDED, "MsrunJobSucceeded", text, now)
        status |= {"phase": decision.SUCCEEDED, "completionTime": decision.timestamp(now)}
        status |= {"verdict": {"code": 0}, "message": ""}
        told = RecordEvent(is_warning=False, reason="MsrunJobSucceeded", message=text)
        return decision.merged([told], _expire(job, status, now))
    if has(held, "Failed"):
        return _end(job, status, _ending(batch_job, pods, status), now)
    actions: list[Action] = list(_reset(job, batch_job))
    if has(held, "Suspended"):
        status = {**status, "phase": "Suspended", "message": ""}
    elif status["nodes"].startswith("0/"):
        was_running = status.get("phase") in (decision.RUNNING, decision.RESTARTING)
        status = {**status, "phase": decision.RESTARTING if was_running else "Pending"}
    else:
        if not has(status, decision.RUNNING):
            text = f"MsrunJob {name} is running."
            status = decision.with_condition(status, decision.RUNNING, "MsrunJobRunning", text, now)
            actions.append(RecordEvent(is_warning=False, reason="MsrunJobRunning", message=text))
        status = {**status, "phase": decision.RUNNING}
    wait = decision.WAIT_SECONDS if _is_waiting(status, pods) else None
    return Decision(status, tuple(actions), again_in=wait)


def _is_waiting(status: Object, pods: Sequence[Object]) -> bool:
    """Whether pods are to run that do not."""
    running, _, wanted = str(status["nodes"]).partition("/")
    return status["phase"] != "Suspended" and (
        int(running) < int(wanted) or any(decision.phase(pod) == "Pending" for pod in pods)
    )


def _reset(job: Object, batch_job: Object) -> list[Action]:
    """Return what carries a change of the spec to the Job: its size, and whether it waits.

    A new Job of the same name would end the old one, so nothing else of a spec may change; the
    schema of the definition refuses it.
    """
    spec, held = job["spec"], batch_job["spec"]
    wanted: Object = {}
    nodes, fewest = _size(job, batch_job)
    if nodes != held.get("completions"):
        # The last may not be above the first.
        wanted |= {"completions": nodes, "parallelism": nodes, "maxFailedIndexes": nodes - fewest}
    if not spec.get("queue") and bool(spec.get("suspend")) != bool(held.get("suspend")):
        wanted["suspend"] = bool(spec.get("suspend"))
    if not wanted:
        return []
    metadata = {key: batch_job["metadata"][key] for key in ("name", "namespace", "resourceVersion")}
    kind = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata}
    return [decision.Patch({**kind, "spec": wanted})]


def _is_verdict(pod: Object) -> bool:
    ending = decision.ending_of(pod, CONTAINER)
    is_retried = ending.is_disruption or ending.code in RETRIED
    return decision.phase(pod) == "Failed" and not is_retried


def _ending(batch_job: Object, pods: Sequence[Object], status: Object) -> Ending:
    """Return why a Job failed: what its first pod said, else what Kubernetes says."""
    verdict = status.get("verdict")
    if verdict:
        return Ending(int(verdict["code"]), str(verdict["cause"]))
    held = next(each for each in batch_job["status"]["conditions"] if each["type"] == "Failed")
    text = f"{held.get('reason')}: {held.get('message')}"
    if held.get("reason") == "DeadlineExceeded":
        return Ending(124, text)
    found = decision.first_failure(pods, CONTAINER)
    return Ending(found[1].code, f"{text}; {found[1].cause}") if found else Ending(1, text)


def _end(job: Object, status: Object, ending: Ending, now: float) -> Decision:
    text = f"MsrunJob {job['metadata']['name']} has failed: {ending.cause}"
    status = decision.with_condition(status, decision.FAILED, "MsrunJobFailed", text, now)
    status = decision.with_verdict(status, ending)
    status |= {"phase": decision.FAILED, "completionTime": decision.timestamp(now), "message": ""}
    told = RecordEvent(is_warning=True, reason="MsrunJobFailed", message=text)
    return decision.merged([told], _expire(job, status, now))


def _expire(job: Object, status: Object, now: float) -> Decision:
    """Return what is still to do about a job that is over: to remove it when its time has come."""
    seconds = job["spec"].get("ttlSecondsAfterFinished")
    if seconds is None:
        return Decision(status)
    left = decision.seconds(status["completionTime"]) + float(seconds) - now
    if left <= 0:
        return Decision(status, (decision.deletion(job),))
    return Decision(status, (), left)
