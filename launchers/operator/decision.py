"""What a reconciler returns, and the parts of a status that MSJob and MsrunJob share."""

from __future__ import annotations

import calendar
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]

CREATED, RUNNING, RESTARTING = "Created", "Running", "Restarting"
SUCCEEDED, FAILED = "Succeeded", "Failed"
# What an agent leaves as its last words, or else prints.
_CAUSE = re.compile(r"^(?:exit code \d+|(?:msrun: )?error): (.+)$", re.MULTILINE)
_RANK = re.compile(r"\brank (\d+)\b")
_CAUSE_CHARACTERS_MAX = 400
# Warnings that say why a pod is not there, or does not run.
_WAITS = frozenset({"FailedCreate", "FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"})
_NOT_STARTED = frozenset({"StartError", "ContainerCannotRun"})
# Seconds after which to ask again why pods wait: nothing tells when a warning is recorded.
WAIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Create:
    """Make an object, unless one of its name is there."""

    obj: Object


@dataclass(frozen=True, slots=True)
class Patch:
    """Merge fields into an object of the version that was seen."""

    obj: Object


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete an object, if it still is the one that was seen."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """Record an event on the job."""

    is_warning: bool
    reason: str
    message: str


Action = Create | Patch | Delete | RecordEvent


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about one job now.

    Attributes:
        status: The job's whole status, to write before anything is done.
        actions: In this order.
        again_in: Seconds after which to decide again though nothing changed; None is never.
    """

    status: Object
    actions: tuple[Action, ...] = ()
    again_in: float | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How a pod ended.

    Attributes:
        code: Exit code; 137 where the pod was lost without one.
        cause: In words.
        is_disruption: The cluster took the pod, for reasons of its own.
    """

    code: int
    cause: str
    is_disruption: bool = False


def deletion(obj: Object) -> Delete:
    """Return the action that deletes an object."""
    metadata = obj["metadata"]
    where = (metadata["namespace"], metadata["name"], metadata["uid"])
    return Delete(obj["apiVersion"], obj["kind"], *where)


def owner_reference(job: Object) -> Object:
    """Return what makes `job` the owner of an object."""
    metadata = job["metadata"]
    named = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": metadata["name"]}
    return {**named, "uid": metadata["uid"], "controller": True, "blockOwnerDeletion": True}


def key_name(job: Object) -> str:
    """Return the name of the Secret with a job's key.

    No other job has it, also not an earlier one of the same name, whose Secret may still be there
    when this one's is made: it would go with that job, and nobody may read whose it is.
    """
    return f"{job['metadata']['name']}-key-{job['metadata']['uid'][:8]}"


def is_left_behind(obj: Object, job: Object) -> bool:
    """Whether an object is going, or is of an earlier job of this name and so about to go."""
    references = obj["metadata"].get("ownerReferences") or ()
    named = (job["kind"], job["metadata"]["name"])
    return is_going(obj) or any((each["kind"], each["name"]) == named for each in references)


def is_owned(obj: Object, job: Object) -> bool:
    """Whether `job` is the controller of an object."""
    references = obj["metadata"].get("ownerReferences") or ()
    return any(each["uid"] == job["metadata"]["uid"] for each in references)


def timestamp(now: float) -> str:
    """Return a time as Kubernetes writes it; whole seconds."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str) -> float:
    """Return the time that `timestamp` wrote."""
    return float(calendar.timegm(datetime.fromisoformat(text).utctimetuple()))


def has(status: Mapping[str, Any], kind: str) -> bool:
    """Whether a condition holds."""
    held = status.get("conditions") or ()
    return any(each["type"] == kind and each["status"] == "True" for each in held)


def with_condition(status: Object, kind: str, reason: str, message: str, now: float) -> Object:
    """Return `status` with a condition that holds from now on, unless it did already.

    Running and Restarting replace each other; after the end, neither holds.
    """
    if has(status, kind):
        return status
    ends = {RUNNING: RESTARTING, RESTARTING: RUNNING}
    conditions = []
    for each in status.get("conditions") or ():
        is_over = each["type"] == ends.get(kind) or (
            kind in (SUCCEEDED, FAILED) and each["type"] in (RUNNING, RESTARTING)
        )
        if each["type"] == kind:
            continue
        if is_over and each["status"] == "True":
            each = {**each, "status": "False", "lastTransitionTime": timestamp(now)}  # noqa: PLW2901
        conditions.append(each)
    new = {
        "type": kind,
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": timestamp(now),
    }
    return {**status, "conditions": [*conditions, new]}


def phase(pod: Object) -> str:
    """Return a pod's phase."""
    return str((pod.get("status") or {}).get("phase") or "Pending")


def is_going(obj: Object) -> bool:
    """Whether an object is being deleted."""
    return bool(obj["metadata"].get("deletionTimestamp"))


def ending_of(pod: Object, container: str) -> Ending:
    """Return how a failed pod ended, by the words of its container named `container`."""
    status = pod.get("status") or {}
    held = status.get("conditions") or ()
    disruption = next((c for c in held if c["type"] == "DisruptionTarget"), None)
    found = [
        each
        for each in status.get("containerStatuses") or ()
        if (each.get("state") or {}).get("terminated", {}).get("exitCode")
    ]
    found.sort(key=lambda each: each["name"] != container)
    name = pod["metadata"]["name"]
    if not found:
        reason = (disruption or status).get("reason") or "it was lost"
        return Ending(137, f"pod {name}: {reason}", is_disruption=True)
    ended = found[0]["state"]["terminated"]
    code = int(ended["exitCode"])
    said = _CAUSE.findall(ended.get("message") or "")
    if said:
        return Ending(code, said[0][:_CAUSE_CHARACTERS_MAX], disruption is not None)
    reason = ended.get("reason") or ""
    words = {"OOMKilled": "out of memory", "Error": ""}.get(reason, reason)
    if reason in _NOT_STARTED:  # the container's program is not in its image
        words = _line(ended)
    if disruption:
        words = str(disruption.get("reason"))
    text = f"pod {name} ended with code {code}" + (f": {words}" if words else "")
    return Ending(code, text, disruption is not None)


def first_failure(pods: Iterable[Object], container: str) -> tuple[Object, Ending] | None:
    """Return the failed pod that ended first, which is the cause, and how it ended."""
    failed = [(pod, ending_of(pod, container)) for pod in pods if phase(pod) == "Failed"]
    if not failed:
        return None
    return min(failed, key=lambda pair: (_ended_at(pair[0]), pair[0]["metadata"]["name"]))


def first_taken(pods: Iterable[Object]) -> tuple[Object, Ending] | None:
    """Return a pod that the cluster is about to end, and why; when it has ended, it is gone."""
    for pod in sorted(filter(is_going, pods), key=lambda each: str(each["metadata"]["name"])):
        for held in (pod.get("status") or {}).get("conditions") or ():
            if held["type"] == "DisruptionTarget" and held["status"] == "True":
                cause = f"pod {pod['metadata']['name']}: {held.get('reason')}"
                return pod, Ending(143, cause, is_disruption=True)
    return None


def _ended_at(pod: Object) -> str:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    times = [each.get("state", {}).get("terminated", {}).get("finishedAt") for each in statuses]
    return min(filter(None, times), default="9")


def why_pods_wait(pods: Sequence[Object], events: Sequence[Object], job: Object | None) -> str:
    """Return why the first pod that waits does so, empty when nothing says.

    Args:
        pods: The pods of a job.
        events: Warnings of the namespace.
        job: What makes the pods, where another than the operator does.
    """
    for pod in sorted(pods, key=lambda each: str(each["metadata"]["name"])):
        if phase(pod) != "Pending" or is_going(pod):
            continue
        status = pod.get("status") or {}
        for held in status.get("conditions") or ():
            if held["type"] == "PodScheduled" and held["status"] == "False":
                return _line(held)
        for each in status.get("containerStatuses") or ():
            waiting = (each.get("state") or {}).get("waiting") or {}
            if waiting.get("message"):
                return _line(waiting)
        if said := _warning(events, pod):
            return said
    return _warning(events, job) if job else ""


def _warning(events: Sequence[Object], obj: Object) -> str:
    """Return the latest warning about an object."""
    uid = obj["metadata"]["uid"]
    mine = [each for each in events if (each.get("involvedObject") or {}).get("uid") == uid]
    mine = [each for each in mine if each.get("reason") in _WAITS]
    last = max(mine, key=lambda each: str(each.get("lastTimestamp") or ""), default=None)
    return _line(last) if last else ""


def _line(said: Mapping[str, Any]) -> str:
    words = " ".join(str(said.get("message") or "no reason given").split())
    return f"{said.get('reason')}: {words}"[:_CAUSE_CHARACTERS_MAX]


def rank_in(cause: str) -> int | None:
    """Return the rank that a cause names."""
    found = _RANK.search(cause)
    return int(found[1]) if found else None


def with_verdict(status: Object, ending: Ending) -> Object:
    """Return `status` with the one cause of the end."""
    rank = rank_in(ending.cause)
    named = {} if rank is None else {"rank": rank}
    return {**status, "verdict": {"code": ending.code, "cause": ending.cause, **named}}


def refused(status: Object, kind: str, text: str, now: float) -> Decision:
    """Return how a job of `kind` ends that the cluster will never take as it is."""
    if has(status, FAILED):
        return Decision(status)
    status = with_condition(status, FAILED, f"{kind}Invalid", text, now)
    status = with_verdict(status, Ending(2, text))
    status |= {"phase": FAILED, "completionTime": timestamp(now), "message": ""}
    told = RecordEvent(is_warning=True, reason=f"{kind}Invalid", message=text)
    return Decision(status, (told,))


def soonest(*delays: float | None) -> float | None:
    """Return the smallest of some delays, none of them negative."""
    given = [max(0.0, delay) for delay in delays if delay is not None]
    return min(given, default=None)


def merged(actions: Sequence[Action], decision: Decision) -> Decision:
    """Return a decision with further actions in front."""
    return dataclasses.replace(decision, actions=(*actions, *decision.actions))
