"""The objects of an MSJob: services, the Secret with the job's key, pods."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launchers.operator.decision import Delete, Object, key_name, owner_reference
from launchers.operator.gang import Gang, join, queue_of

CONTAINER = "mindspore"
PORT_NAME = "msjob-port"
PORT = 2222
ROLE = "training.kubeflow.org/replica-type"
INDEX = "training.kubeflow.org/replica-index"
JOB = "training.kubeflow.org/job-name"
GENERATION = "msrun.io/generation"
KEY_PATH = "/run/msrun/key"
NEEDS_KEY = "msrun.io/needs-key"
_MS_ROLES = {"Scheduler": "MS_SCHED", "PS": "MS_PSERVER", "Worker": "MS_WORKER"}


@dataclass(frozen=True, slots=True)
class Role:
    """Pods of one kind.

    Attributes:
        name: Scheduler, PS or Worker.
        replicas: How many.
        policy: When a pod starts again: Never, OnFailure, Always or ExitCode.
        template: The pod's template.
    """

    name: str
    replicas: int
    policy: str
    template: Object


def labels(job: Object) -> dict[str, str]:
    """Return the labels of everything of a job."""
    return {
        "training.kubeflow.org/operator-name": "msjob-controller",
        "group-name": "mindspore.gitee.com",
        JOB: job["metadata"]["name"],
        "job-name": job["metadata"]["name"],
    }


def _of(role: Role, index: int) -> dict[str, str]:
    kind = role.name.lower()
    plain = {"replica-type": kind, "replica-index": str(index)}
    return {**plain, ROLE: kind, INDEX: str(index)}


def pod_name(job: Object, role: str, index: int) -> str:
    """Return the name of a pod, the same in every generation."""
    return f"{job['metadata']['name']}-{role.lower()}-{index}"


def shared_objects(job: Object, roles: Mapping[str, Role]) -> Iterator[Object]:
    """Yield what pods need before they start: names, and a key where several speak."""
    if sum(role.replicas for role in roles.values()) == 1:
        return
    metadata = {
        "namespace": job["metadata"]["namespace"],
        "ownerReferences": [owner_reference(job)],
        "labels": labels(job),
    }
    # Whoever creates it puts the key in; an annotation asks for that.
    yield {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**metadata, "name": key_name(job), "annotations": {NEEDS_KEY: "key"}},
        "type": "Opaque",
        "immutable": True,
    }
    # The pod that the others call: the scheduler, or without one the worker of rank 0.
    first = roles.get("Scheduler") or roles["Worker"]
    ports = [*_ports(_main_container(first.template)), {"name": PORT_NAME, "port": PORT}]
    unique = {each["name"]: each for each in reversed(ports)}
    yield {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**metadata, "name": pod_name(job, first.name, 0)},
        "spec": {
            # A name, not an address of its own: connections go to the pod without a proxy.
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB: job["metadata"]["name"], ROLE: first.name.lower(), INDEX: "0"},
            "ports": list(reversed(unique.values())),
        },
    }


def service_deletion(job: Object, pod: Object) -> Iterator[Delete]:
    """Yield the deletion of the service that has a pod's name."""
    name = pod["metadata"]["name"]
    if name in (pod_name(job, "Scheduler", 0), pod_name(job, "Worker", 0)):
        yield Delete("v1", "Service", job["metadata"]["namespace"], name, "")


def pod(  # noqa: PLR0917 - what a pod depends on
    job: Object,
    role: Role,
    index: int,
    roles: Mapping[str, Role],
    generation: int,
    gang: Gang | None = None,
) -> Object:
    """Return the pod of one replica."""
    template = copy.deepcopy(role.template)
    metadata = template.get("metadata") or {}
    metadata["labels"] = {
        **(metadata.get("labels") or {}),
        **labels(job),
        **_of(role, index),
        GENERATION: str(generation),
    }
    metadata |= {
        "name": pod_name(job, role.name, index),
        "namespace": job["metadata"]["namespace"],
        "ownerReferences": [owner_reference(job)],
    }
    spec = template["spec"]
    if gang:
        join(gang, metadata, spec, role=role.name.lower(), queue=queue_of(job))
    # ExitCode means that the operator starts it again, not the kubelet.
    spec["restartPolicy"] = "Never" if role.policy == "ExitCode" else role.policy
    container = _main_container(template)
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    if not any(each["name"] == PORT_NAME for each in _ports(container)):
        ports = container.get("ports") or []
        container["ports"] = [*ports, {"name": PORT_NAME, "containerPort": PORT}]
    if sum(each.replicas for each in roles.values()) > 1:
        container["env"] = [*(container.get("env") or []), *_env(job, role, index, roles)]
        mount = {"name": "msrun-key", "mountPath": "/run/msrun", "readOnly": True}
        container["volumeMounts"] = [*(container.get("volumeMounts") or []), mount]
        secret = {"secretName": key_name(job), "defaultMode": 0o400}
        volumes = spec.get("volumes") or []
        spec["volumes"] = [*volumes, {"name": "msrun-key", "secret": secret}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _env(job: Object, role: Role, index: int, roles: Mapping[str, Role]) -> list[Object]:
    count = {name: each.replicas for name, each in roles.items()}
    first = roles.get("Scheduler") or roles["Worker"]
    named = {each["name"]: each["port"] for each in _ports(_main_container(first.template))}
    port = named.get(PORT_NAME, PORT)
    host = pod_name(job, first.name, 0)
    variables = {"MSRUN_SECRET_FILE": KEY_PATH}
    if "Scheduler" in roles:
        variables |= {
            "MS_SCHED_HOST": host,
            "MS_SCHED_PORT": str(port),
            "MS_WORKER_NUM": str(count.get("Worker", 0)),
            "MS_SERVER_NUM": str(count.get("PS", 0)),
            "MS_ROLE": _MS_ROLES[role.name],
            # A number is the rank, so worker 10 comes after worker 2.
            "MS_NODE_ID": str(index),
        }
    elif role.name == "Worker":
        variables |= {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "RANK": str(index),
            "WORLD_SIZE": str(count["Worker"]),
        }
    # Last, so that they win over the user's of the same name.
    return [{"name": name, "value": value} for name, value in variables.items()]


def _main_container(template: Object) -> Object:
    containers: list[Object] = template["spec"]["containers"]
    return next(each for each in containers if each["name"] == CONTAINER)


def _ports(container: Object) -> list[Object]:
    named = [each for each in container.get("ports") or () if each.get("name")]
    return [{"name": each["name"], "port": each["containerPort"]} for each in named]
