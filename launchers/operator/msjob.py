"""MSJob: what MS-Operator's objects ask for, decided from its spec and the pods that exist.

The pods of a job are created together, as one *generation*.  The scheduler's come first, the
others when it has an address.  When a pod must start again, all do, as the next generation: the
ranks of a training wait for each other, so one alone could not go on.  `enableDynamicWorker` says
that workers can, and then only that worker is made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launchers.operator import decision, msjob_objects
from launchers.operator.decision import (
    Action,
    Create,
    Decision,
    Ending,
    Object,
    RecordEvent,
    has,
    phase,
)
from launchers.operator.gang import Gang, GangScheduler, pod_group, queue_of
from launchers.operator.msjob_objects import CONTAINER, GENERATION, INDEX, ROLE, Role

API_VERSION = "mindspore.gitee.com/v1"
ROLES = ("Scheduler", "PS", "Worker")
POLICIES = ("Never", "OnFailure", "Always", "ExitCode")
# Codes after which policy ExitCode starts again, as in the library that MS-Operator uses.
RETRYABLE = frozenset((130, 137, 138, 143))
_BACK_OFF_SECONDS_MAX = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MSJobSpec:
    """A job's spec with all defaults.

    Attributes:
        roles: By name, in the order in which they start.
        waits_for_all: Success is when all workers succeeded; otherwise worker 0.
        is_dynamic: The end of a worker is not that of the job.
        cleaned: Which pods go at the end: Running, All or None.
        ttl: Seconds that the ended job is kept; None is for ever.
        deadline: Seconds that it may take; None is without limit.
        back_off_limit: How often it may start again; None is without limit.
        scheduling: Its `schedulingPolicy`; None does not ask that pods are placed all at once.
    """

    roles: dict[str, Role]
    waits_for_all: bool = False
    is_dynamic: bool = False
    cleaned: str = "Running"
    ttl: float | None = None
    deadline: float | None = None
    back_off_limit: int | None = None
    scheduling: Object | None = None

    @property
    def size(self) -> int:
        """How many pods there are."""
        return sum(role.replicas for role in self.roles.values())

    def count(self, role: str) -> int:
        """Return how many pods a role has."""
        return self.roles[role].replicas if role in self.roles else 0


class BadSpecError(ValueError):
    """The spec of a job contradicts itself; the message is for its user."""


def read_spec(job: Object) -> MSJobSpec:
    """Return the spec of an MSJob.

    Raises:
        BadSpecError: It cannot be run as it is.
    """
    spec = job.get("spec") or {}
    roles: dict[str, Role] = {}
    by_lower = {name.lower(): name for name in ROLES}
    for key, given in (spec.get("msReplicaSpecs") or {}).items():
        name = by_lower.get(key.lower())
        where = f"spec.msReplicaSpecs.{key}"
        if name is None:
            raise BadSpecError(f"{where}: no such role (choose {', '.join(ROLES)})")
        if name in roles:
            raise BadSpecError(f"{where}: {name} is given twice")
        roles[name] = _read_role(name, given or {}, where)
    if "Worker" not in roles:
        raise BadSpecError("spec.msReplicaSpecs: there is no Worker")
    if "Scheduler" in roles and roles["Scheduler"].replicas > 1:
        found = roles["Scheduler"].replicas
        raise BadSpecError(f"spec.msReplicaSpecs.Scheduler.replicas: {found} (at most 1)")
    if "Scheduler" not in roles and "PS" in roles and roles["PS"].replicas:
        where = "spec.msReplicaSpecs.PS"
        raise BadSpecError(f"{where}: servers need a Scheduler, through which workers find them")
    success = spec.get("successPolicy") or ""
    if success not in ("", "AllWorkers"):
        raise BadSpecError(f'spec.successPolicy: {success} (choose "" or AllWorkers)')
    policy = spec.get("runPolicy") or {}
    cleaned = policy.get("cleanPodPolicy") or "Running"
    if cleaned not in ("Running", "All", "None"):
        where = "spec.runPolicy.cleanPodPolicy"
        raise BadSpecError(f"{where}: {cleaned} (choose All, Running or None)")
    return MSJobSpec(
        roles={name: roles[name] for name in ROLES if name in roles},
        waits_for_all=success == "AllWorkers",
        is_dynamic=bool(spec.get("enableDynamicWorker")),
        cleaned=cleaned,
        ttl=policy.get("ttlSecondsAfterFinished"),
        deadline=policy.get("activeDeadlineSeconds"),
        back_off_limit=policy.get("backoffLimit"),
        scheduling=_read_scheduling(policy, sum(role.replicas for role in roles.values())),
    )


def _read_scheduling(policy: Object, size: int) -> Object | None:
    given = policy.get("schedulingPolicy")
    if given is None:
        return None
    where = "spec.runPolicy.schedulingPolicy"
    if not isinstance(given, dict):
        raise BadSpecError(f"{where}: {given!r} (it has fields, such as minAvailable)")
    fewest = given.get("minAvailable")
    if fewest is not None and not (isinstance(fewest, int) and 1 <= fewest <= size):
        raise BadSpecError(f"{where}.minAvailable: {fewest} (choose 1 to {size}, the pods it has)")
    return given


def _read_role(name: str, given: Object, where: str) -> Role:
    template = given.get("template") or {}
    inner = template.get("spec") if isinstance(template, dict) else None
    containers = inner.get("containers") if isinstance(inner, dict) else None
    if not isinstance(containers, list) or not all(isinstance(each, dict) for each in containers):
        raise BadSpecError(f"{where}.template.spec.containers: there is no list of containers")
    if not any(each.get("name") == CONTAINER for each in containers):
        raise BadSpecError(f"{where}.template: no container is named {CONTAINER}")
    for each in containers:
        if not each.get("image"):
            raise BadSpecError(f"{where}.template: container {each.get('name')} has no image")
    policy = given.get("restartPolicy") or "Never"
    if policy not in POLICIES:
        raise BadSpecError(f"{where}.restartPolicy: {policy} (choose {', '.join(POLICIES)})")
    replicas = 1 if given.get("replicas") is None else int(given["replicas"])
    if name == "Worker" and replicas < 1:
        raise BadSpecError(f"{where}.replicas: {replicas} (at least 1)")
    return Role(name, replicas, policy, template)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """One look at a job."""

    job: Object
    spec: MSJobSpec
    pods: Sequence[Object]
    now: float
    events: Sequence[Object]
    gang_scheduler: GangScheduler | None

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])

    def gang(self, generation: int) -> Gang | None:
        """Return how the pods of a generation are placed together, None where one by one."""
        spec, name = self.spec, self.name
        policy = spec.scheduling or {}
        scheduler = GangScheduler.KUEUE if queue_of(self.job) else self.gang_scheduler
        if scheduler is None or spec.size == 1:
            return None
        if scheduler is GangScheduler.KUEUE:
            name = f"{name}-{generation}"  # a group that has ended takes no further pods
        fewest = int(policy.get("minAvailable") or spec.size)
        return Gang(scheduler=scheduler, name=name, size=spec.size, fewest=fewest, policy=policy)


_NO_GANG = (
    "spec.runPolicy.schedulingPolicy has no effect: this operator runs without "
    "--gang-scheduler-name, so pods are placed one by one"
)


def decide(
    job: Object,
    pods: Sequence[Object],
    now: float,
    *,
    events: Sequence[Object] = (),
    gang_scheduler: GangScheduler | None = None,
) -> Decision:
    """Return what to do about an MSJob.

    Args:
        job: The object as it is.
        pods: All pods with the labels of this job.
        now: Seconds since 1970.
        events: Warnings of its namespace, where pods wait.
        gang_scheduler: Who places the pods of every job together; None is nobody.
    """
    status: Object = dict(job.get("status") or {})
    if decision.is_going(job):
        return Decision(status)
    pods = [pod for pod in pods if decision.is_owned(pod, job)]
    name = job["metadata"]["name"]
    try:
        spec = read_spec(job)
    except BadSpecError as error:
        return decision.refused(status, "MSJob", str(error), now)
    actions: list[Action] = []
    if not has(status, decision.CREATED):
        text = f"MSJob {name} is created."
        status = decision.with_condition(status, decision.CREATED, "MSJobCreated", text, now)
        status |= {"startTime": decision.timestamp(now), "generation": 0}
        actions.append(RecordEvent(is_warning=False, reason="MSJobCreated", message=text))
        if spec.scheduling is not None and not (gang_scheduler or queue_of(job)):
            actions.append(RecordEvent(is_warning=True, reason="NoGang", message=_NO_GANG))
    look = _Look(
        job=job, spec=spec, pods=pods, now=now, events=events, gang_scheduler=gang_scheduler
    )
    if not _is_over(status):
        return decision.merged(actions, _advance(look, status))
    return _finish(look, status)


def _is_over(status: Object) -> bool:
    return has(status, decision.SUCCEEDED) or has(status, decision.FAILED)


def _advance(look: _Look, status: Object) -> Decision:  # noqa: PLR0911 - a table of ends
    """Return the next step of a job that is not over."""
    spec, now = look.spec, look.now
    mine = [pod for pod in look.pods if _generation(pod) == status["generation"]]
    status = {**status, "replicaStatuses": _counts(spec, mine)}
    left = None
    if spec.deadline is not None:
        left = decision.seconds(status["startTime"]) + spec.deadline - now
        if left <= 0:
            text = f"MSJob {look.name} was active longer than its {spec.deadline:g} s"
            return _end(look, status, Ending(124, text), reason="JobFailed")
    if _has_succeeded(spec, mine):
        text = f"MSJob {look.name} successfully completed."
        status = decision.with_condition(status, decision.SUCCEEDED, "MSJobSucceeded", text, now)
        status |= {"completionTime": decision.timestamp(now), "phase": decision.SUCCEEDED}
        status |= {"verdict": {"code": 0}, "message": ""}
        told = RecordEvent(is_warning=False, reason="MSJobSucceeded", message=text)
        return decision.merged([told], _finish(look, status))
    retries = _container_restarts(spec, mine)
    if spec.back_off_limit is not None and retries > 0 and retries >= spec.back_off_limit:
        text = f"containers were started again {retries} times (backoffLimit {spec.back_off_limit})"
        return _end(look, status, Ending(1, text), reason="JobFailed")
    failed = _failed(spec, mine, status)
    if failed is not None:
        role, ending = failed
        if not _may_restart(role, ending):
            return _end(look, status, ending)
        restarts = int(status.get("restarts", 0))
        if spec.back_off_limit is not None and restarts >= spec.back_off_limit:
            text = f"{ending.cause}; backoffLimit {spec.back_off_limit} is spent"
            ending = Ending(ending.code, text)
            return _end(look, status, ending, reason="JobFailed")
        return _restart(look, status, ending, left)
    return _run(look, status, left)


def _end(look: _Look, status: Object, ending: Ending, *, reason: str = "MSJobFailed") -> Decision:
    text = f"MSJob {look.name} has failed: {ending.cause}"
    status = decision.with_condition(status, decision.FAILED, reason, text, look.now)
    status = decision.with_verdict(status, ending)
    status |= {"completionTime": decision.timestamp(look.now), "phase": decision.FAILED}
    status["message"] = ""
    told = RecordEvent(is_warning=True, reason=reason, message=text)
    return decision.merged([told], _finish(look, status))


def _restart(look: _Look, status: Object, ending: Ending, left: float | None) -> Decision:
    """Return the decision to begin again; what is left of this generation goes next time."""
    text, now = f"MSJob {look.name} is restarting: {ending.cause}", look.now
    status = decision.with_condition(status, decision.RESTARTING, "MSJobRestarting", text, now)
    status |= {
        "generation": int(status["generation"]) + 1,
        "restarts": int(status.get("restarts", 0)) + 1,
        "lastRestartTime": decision.timestamp(now),
        "phase": decision.RESTARTING,
        "lastCause": ending.cause,
        "podsCreated": False,
        "message": "",
        "replicaStatuses": _counts(look.spec, ()),
    }
    told = RecordEvent(is_warning=True, reason="MSJobRestarting", message=text)
    return Decision(status, (told,), decision.soonest(0, left))


def _run(look: _Look, status: Object, left: float | None) -> Decision:
    """Return what brings the pods to what they should be."""
    spec, pods, now = look.spec, look.pods, look.now
    generation = int(status["generation"])
    old = [pod for pod in pods if _generation(pod) != generation]
    if old:
        gone = tuple(decision.deletion(pod) for pod in old if not decision.is_going(pod))
        return Decision(status, gone, left)
    wait = _wait(status, now)
    if wait > 0:
        return Decision(status, (), decision.soonest(wait, left))
    mine = {(pod["metadata"]["labels"][ROLE], _index(pod)): pod for pod in pods}
    actions = list(map(Create, _missing(look, mine, generation)))
    if not any(action.obj["kind"] == "Pod" for action in actions) and len(mine) == spec.size:
        status = {**status, "podsCreated": True}
    told = list[Action]()
    is_running = any(phase(pod) == "Running" for (role, _), pod in mine.items() if role == "worker")
    if is_running and not has(status, decision.RUNNING):
        text = f"MSJob {look.name} is running."
        status = decision.with_condition(status, decision.RUNNING, "MSJobRunning", text, now)
        status["phase"] = decision.RUNNING
        told.append(RecordEvent(is_warning=False, reason="MSJobRunning", message=text))
    if any(phase(pod) == "Pending" for pod in pods):
        left = decision.soonest(left, decision.WAIT_SECONDS)
    lacks = not status.get("podsCreated")
    waits = decision.why_pods_wait(pods, look.events, look.job if lacks else None)
    return Decision({"phase": "Pending", **status, "message": waits}, (*actions, *told), left)


def _missing(
    look: _Look, mine: Mapping[tuple[str, int], Object], generation: int
) -> Iterator[Object]:
    """Yield what is to be created: what pods share, then the pods that are not there.

    The scheduler's pod comes first, unless none is placed before all are there.
    """
    job, roles = look.job, look.spec.roles
    gang = look.gang(generation)
    if not mine:
        yield from msjob_objects.shared_objects(job, roles)
        group = pod_group(gang, job, msjob_objects.labels(job)) if gang else None
        if group:
            yield group
    scheduler = mine.get(("scheduler", 0))
    is_reachable = scheduler is not None and bool((scheduler.get("status") or {}).get("podIP"))
    for role in roles.values():
        if role.name != "Scheduler" and "Scheduler" in roles and not (is_reachable or gang):
            continue
        for index in range(role.replicas):
            if (role.name.lower(), index) not in mine:
                yield msjob_objects.pod(job, role, index, roles, generation, gang)


def _wait(status: Object, now: float) -> float:
    """Return the seconds to wait before this generation: none for the first restart, then more."""
    restarts = int(status.get("restarts", 0))
    if restarts < 2:  # noqa: PLR2004 - the first restart is at once
        return 0
    delay = min(2.0 ** (restarts - 1), _BACK_OFF_SECONDS_MAX)
    return decision.seconds(status["lastRestartTime"]) + delay - now


def _finish(look: _Look, status: Object) -> Decision:
    """Return what is still to do about a job that is over."""
    job, spec, pods, now = look.job, look.spec, look.pods, look.now
    actions: list[Action] = []
    if spec.cleaned != "None":
        for pod in pods:
            is_meant = spec.cleaned == "All" or phase(pod) in ("Pending", "Running")
            if is_meant and not decision.is_going(pod):
                actions += [decision.deletion(pod), *msjob_objects.service_deletion(job, pod)]
    counts: dict[str, Any] = dict(status.get("replicaStatuses") or {})
    if has(status, decision.SUCCEEDED):
        for role, count in counts.items():
            succeeded = count.get("succeeded", 0) + count.get("active", 0)
            counts[role] = {**count, "active": 0, "succeeded": succeeded}
    else:
        counts = {role: {**count, "active": 0} for role, count in counts.items()}
    status = {**status, "replicaStatuses": counts}
    left = None
    if spec.ttl is not None:
        left = decision.seconds(status["completionTime"]) + spec.ttl - now
        if left <= 0:
            return Decision(status, (*actions, decision.deletion(job)))
    return Decision(status, tuple(actions), left)


def _failed(spec: MSJobSpec, pods: Sequence[Object], status: Object) -> tuple[Role, Ending] | None:
    """Return the first failure that counts, with the role of its pod."""
    counting = [
        pod for pod in pods if not (spec.is_dynamic and _role_of(pod, spec).name == "Worker")
    ]
    found = decision.first_failure(counting, CONTAINER) or decision.first_taken(counting)
    if found is not None:
        return _role_of(found[0], spec), found[1]
    if not status.get("podsCreated"):
        return None
    there = {(pod["metadata"]["labels"][ROLE], _index(pod)) for pod in pods}
    for role in spec.roles.values():
        if spec.is_dynamic and role.name == "Worker":
            continue
        for index in range(role.replicas):
            if (role.name.lower(), index) not in there:
                name = f"{role.name.lower()}-{index}"
                return role, Ending(137, f"pod {name} was deleted", is_disruption=True)
    return None


def _may_restart(role: Role, ending: Ending) -> bool:
    is_retryable = role.policy == "ExitCode" and ending.code in RETRYABLE
    return ending.is_disruption or is_retryable


def _has_succeeded(spec: MSJobSpec, pods: Sequence[Object]) -> bool:
    workers = [pod for pod in pods if _role_of(pod, spec).name == "Worker"]
    done = {_index(pod) for pod in workers if phase(pod) == "Succeeded"}
    return len(done) == spec.count("Worker") if spec.waits_for_all else 0 in done


def _container_restarts(spec: MSJobSpec, pods: Sequence[Object]) -> int:
    total = 0
    for pod in pods:
        if phase(pod) == "Running" and _role_of(pod, spec).policy in ("OnFailure", "Always"):
            statuses = (pod.get("status") or {}).get("containerStatuses") or ()
            total += sum(int(each.get("restartCount", 0)) for each in statuses)
    return total


def _counts(spec: MSJobSpec, pods: Sequence[Object]) -> Object:
    counts = {name: {"active": 0, "succeeded": 0, "failed": 0} for name in spec.roles}
    words = {"Running": "active", "Succeeded": "succeeded", "Failed": "failed"}
    for pod in pods:
        word = words.get(phase(pod))
        if word:
            counts[_role_of(pod, spec).name][word] += 1
    return counts


def _role_of(pod: Object, spec: MSJobSpec) -> Role:
    label = pod["metadata"]["labels"][ROLE]
    return next(role for role in spec.roles.values() if role.name.lower() == label)


def _index(pod: Object) -> int:
    return int(pod["metadata"]["labels"][INDEX])


def _generation(pod: Object) -> int:
    return int(pod["metadata"]["labels"].get(GENERATION, 0))
