"""Gang scheduling: the pods of a job get their places all at once, or none.

Two jobs that each got half of their pods would wait for each other for ever.  Three schedulers of
the field prevent that, each in words of its own: Volcano and the scheduler-plugins (coscheduling)
read an object PodGroup, and Kueue reads labels of the pods.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from launchers.operator.decision import Object, owner_reference

_KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
# Schedulers that pods have by default, and that place them one by one.
_USUAL = (None, "", "default-scheduler")


class GangScheduler(enum.StrEnum):
    """Who places the pods of a gang, by the names of Kubeflow's training operator."""

    VOLCANO = "volcano"
    PLUGINS = "scheduler-plugins"
    KUEUE = "kueue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """Pods that are placed together.

    Attributes:
        scheduler: Who places them.
        name: Name of the group.
        size: How many pods there are.
        fewest: How many have to be placed at once.
        policy: A job's `schedulingPolicy`, or as much of it as there is.
    """

    scheduler: GangScheduler
    name: str
    size: int
    fewest: int
    policy: Mapping[str, object]


def queue_of(job: Object) -> str:
    """Return the queue of Kueue that a job asks for by its label, empty without."""
    return str((job["metadata"].get("labels") or {}).get(_KUEUE_QUEUE, ""))


def pod_group(gang: Gang, job: Object, labels: Mapping[str, str]) -> Object | None:
    """Return the object that the scheduler reads, None where it reads labels of pods."""
    if gang.scheduler is GangScheduler.KUEUE:
        return None
    policy = gang.policy
    metadata = {
        "name": gang.name,
        "namespace": job["metadata"]["namespace"],
        "labels": dict(labels),
        "ownerReferences": [owner_reference(job)],
    }
    spec: Object = {"minMember": gang.fewest}
    if policy.get("minResources"):
        spec["minResources"] = policy["minResources"]
    version = "scheduling.x-k8s.io/v1alpha1"
    if gang.scheduler is GangScheduler.VOLCANO:
        version = "scheduling.volcano.sh/v1beta1"
        if policy.get("queue"):
            spec["queue"] = policy["queue"]
        if policy.get("priorityClass"):
            spec["priorityClassName"] = policy["priorityClass"]
    return {"apiVersion": version, "kind": "PodGroup", "metadata": metadata, "spec": spec}


def join(gang: Gang, metadata: Object, spec: Object, *, role: str, queue: str = "") -> None:
    """Put the pod with `metadata` and `spec` into a gang.

    Args:
        gang: The gang.
        metadata: Of a pod or of its template.
        spec: Of the same.
        role: What the pod is among the others, such as `worker`.
        queue: Local queue of Kueue.
    """
    labels = metadata.setdefault("labels", {})
    annotations = metadata.setdefault("annotations", {})
    match gang.scheduler:
        case GangScheduler.VOLCANO:
            annotations["scheduling.k8s.io/group-name"] = gang.name
            annotations["volcano.sh/task-spec"] = role
            scheduler = "volcano"
        case GangScheduler.PLUGINS:
            labels["scheduling.x-k8s.io/pod-group"] = gang.name
            scheduler = "scheduler-plugins-scheduler"
            if gang.policy.get("priorityClass"):
                spec.setdefault("priorityClassName", gang.policy["priorityClass"])
        case GangScheduler.KUEUE:
            labels |= {_KUEUE_QUEUE: queue, "kueue.x-k8s.io/pod-group-name": gang.name}
            annotations["kueue.x-k8s.io/pod-group-total-count"] = str(gang.size)
            return
    if spec.get("schedulerName") in _USUAL:
        spec["schedulerName"] = scheduler
