"""What the objects of a job say: why its pods wait, and how it ended.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from launchers.kubernetes.manifests import CONTAINER, INDEX_LABEL
from msrun.errors import ExitCode, signal_exit_code
from msrun.units import counted

Document = dict[str, Any]

_STOPPED = signal_exit_code(15)
_KILLED = signal_exit_code(9)
# Of an agent that was ended from outside or lost the scheduler: another pod has the verdict.
_NO_VERDICT = (ExitCode.NODE_LOST, _KILLED, _STOPPED)
_OUT_OF_MEMORY = "OOMKilled"
# Of a container whose program is not in its image, by containerd and by others.
_NOT_STARTED = frozenset({"StartError", "ContainerCannotRun"})
# A reason of a Job's failure -> the code, where no pod says more.
_CODES = {"DeadlineExceeded": _STOPPED}
_QUIET = frozenset({"ContainerCreating", "PodInitializing"})
_WARNINGS = frozenset(
    {"FailedCreate", "FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"}
)
_NAMED_MAX = 3
_TOLD = re.compile(rf"exit code {_KILLED}: ")  # as `msrun.processes.ending` leaves it


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended.

    Args:
        code: Its exit code.
        reason: Why it is not 0, in one sentence; empty where the log of the job says it.
    """

    code: int
    reason: str = ""


def pod_index(pod: Document) -> int:
    """Return the index of a pod in its Job, -1 where it has none."""
    labels = pod["metadata"].get("labels") or {}
    text = str(labels.get(INDEX_LABEL, ""))
    return int(text) if text.isdecimal() else -1


def is_running(pod: Document) -> bool:
    """Whether the container of a pod runs or has ended, so that it has a log."""
    state = _state(pod)
    return "running" in state or "terminated" in state


def waiting_reasons(
    job: Document, pods: Sequence[Document], events: Sequence[Document]
) -> list[str]:
    """Return why pods do not run yet, one line for each reason."""
    if (job.get("spec") or {}).get("suspend"):
        return ["the job is suspended: a queue, or kubectl, has to start it"]
    waiting: dict[str, list[str]] = {}
    for pod in pods:
        if reason := _why_waiting(pod):
            waiting.setdefault(reason, []).append(pod["metadata"]["name"])
    lines = [f"{_pods(names)} {_wait(names)}: {reason}" for reason, names in waiting.items()]
    is_formed = len(pods) >= int((job.get("spec") or {}).get("parallelism") or 0)
    alive = {pod["metadata"]["name"] for pod in pods if not is_running(pod)}
    if not is_formed:
        alive.add(job["metadata"]["name"])
    return list(dict.fromkeys([*lines, *_warnings(events, alive)]))


def _warnings(events: Sequence[Document], names: set[str]) -> Iterator[str]:
    for event in events:
        about = (event.get("involvedObject") or {}).get("name")
        if about in names and event.get("reason") in _WARNINGS:
            yield f"{about}: {event['reason']}: {_line(event.get('message'))}"


def _pods(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"pod {names[0]}"
    shown = ", ".join(names[:_NAMED_MAX])
    return f"{counted(len(names), 'pod')} ({shown}{', ...' if len(names) > _NAMED_MAX else ''})"


def _wait(names: Sequence[str]) -> str:
    return "waits" if len(names) == 1 else "wait"


def _why_waiting(pod: Document) -> str:
    status = pod.get("status") or {}
    if status.get("phase") not in (None, "Pending"):
        return ""
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason', 'not scheduled')}: {_line(condition.get('message'))}"
    waiting = _state(pod).get("waiting") or {}
    reason = waiting.get("reason", "")
    return "" if not reason or reason in _QUIET else f"{reason}: {_line(waiting.get('message'))}"


def _state(pod: Document) -> Mapping[str, Any]:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    own = next((each for each in statuses if each.get("name") == CONTAINER), None)
    return (own or {}).get("state") or {}


def _line(text: object) -> str:
    return " ".join(str(text or "no reason given").split())


def condition(job: Document, kind: str) -> Document | None:
    """Return a condition of the job that is true, None without."""
    found = (job.get("status") or {}).get("conditions") or ()
    return next((c for c in found if c.get("type") == kind and c.get("status") == "True"), None)


def has_ended(job: Document) -> bool:
    """Whether a job is over, however it ended."""
    return any(condition(job, kind) for kind in ("Complete", "Completed", "Failed"))


def read_end(job: Document, pods: Sequence[Document]) -> End | None:
    """Return how a job ended, None while it goes on."""
    if condition(job, "Complete") or condition(job, "Completed"):
        return End(code=ExitCode.OK)
    failed = condition(job, "Failed")
    if failed is None:
        return None
    reason = str(failed.get("reason", ""))
    if reason in _CODES:
        return End(code=_CODES[reason], reason=f"Kubernetes ended the job: {_about(failed)}")
    return _end_of(pods, _about(failed))


def _end_of(pods: Sequence[Document], about: str) -> End:
    """Return what the pods say of how the job failed."""
    ends = sorted(_ends(pods))
    if not ends:
        reason = f"the job failed, and no pod is left that says how: {about}"
        return End(code=ExitCode.NODE_LOST, reason=reason)
    order, _, code, name, why = ends[0]
    if why in _NOT_STARTED:
        said = next(_state(pod)["terminated"].get("message") for pod in pods if _name(pod) == name)
        reason = f"pod {name} could not start its container: {_line(said)}"
        return End(code=code, reason=f"{reason} (the image needs Python with msrun)")
    if order == 0:
        return End(code=code)
    if why == _OUT_OF_MEMORY:
        reason = f"the container of pod {name} was killed: out of memory"
        return End(code=code, reason=f"{reason} (its limit is in --resources)")
    reason = f"pod {name} was lost (exit code {code}): {about}"
    return End(code=ExitCode.NODE_LOST, reason=reason)


def _about(failed: Document) -> str:
    return f"{failed.get('reason', 'Failed')}: {_line(failed.get('message'))}"


def _ends(pods: Sequence[Document]) -> Iterator[tuple[int, str, int, str, str]]:
    """Yield how containers failed: those with a verdict first, then out of memory, then others."""
    for pod in pods:
        end = _state(pod).get("terminated")
        if not end or not end.get("exitCode"):
            continue
        code, why = int(end["exitCode"]), str(end.get("reason", ""))
        # What told it was the agent, so it was not killed itself: a worker was.
        has_told = code == _KILLED and _TOLD.match(str(end.get("message", "")))
        is_verdict = code not in _NO_VERDICT or has_told
        order = 0 if is_verdict else 1 if why == _OUT_OF_MEMORY else 2
        # Of agents that ended alike, the first to end knew it first.
        yield order, str(end.get("finishedAt", "")), code, _name(pod), why


def _name(pod: Document) -> str:
    return str(pod["metadata"]["name"])
