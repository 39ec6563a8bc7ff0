"""The objects of one job in Kubernetes, as plain data: a Job, a headless Service, a ConfigMap.

One pod is one node.  The Job is *Indexed*, so each pod has a stable number, which is its node rank,
and the controller replaces a lost pod by one of the same number.  The Service gives the pods names,
of which the others need that of index 0, the scheduler's.

Which ends of a pod are retried (`podFailurePolicy`):

- An eviction, a preemption or a drained cluster node (`DisruptionTarget`): the pod is replaced, and
  that counts for nothing.
- 120, 137 or 143, the codes of an agent that was killed or that lost the scheduler: replaced, at
  most --max-restarts times for each index.  Agents that lost the scheduler all end, so the job
  begins again with generation 0, from its last checkpoint.
- Any other code is the verdict of the job, on which all agents agree: the Job fails at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from launchers.kubernetes.options import (
    JobGang,
    Kind,
    KubernetesOptions,
    Spread,
    Toleration,
    Volume,
)
from msrun import environ
from msrun.errors import ExitCode, UsageError, signal_exit_code
from msrun.units import quoted

Manifest = dict[str, Any]

CONTAINER = "msrun"
SECRET_DIRECTORY = "/run/secrets/msrun"  # noqa: S105 - its name
SECRET_KEY = "key"  # noqa: S105 - its name
SHIP_DIRECTORY = "/mnt/msrun"
JOB_LABEL = "app.kubernetes.io/instance"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
_LABELS = {"app.kubernetes.io/name": "msrun", "app.kubernetes.io/managed-by": "msrun"}
_MESSAGE_FILE = "/dev/termination-log"
# Of every job of msrun, also of those that its operator makes.
ALL_LABELS = f"app.kubernetes.io/name={_LABELS['app.kubernetes.io/name']}"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_JOBSET_NODES = "nodes"
_SCHEDULERS = {
    JobGang.VOLCANO: "volcano",
    JobGang.PLUGINS: "scheduler-plugins-scheduler",
}
# A pod is called <job>-<index>, in a JobSet <job>-nodes-0-<index>, in at most 63 characters.
_NAME_MAX = 40
_EXPANDED = re.compile(r"\$(?=[$(]|[^\x00-\x7f])")
_OTHER = re.compile(r"[^a-z0-9]+")
# Seconds that an agent takes after --grace to sweep its node, tell the others and write its logs.
_SWEEP_SECONDS = 20
# Ends of an agent that are no verdict of the job.
_RETRIED = (ExitCode.NODE_LOST, signal_exit_code(9), signal_exit_code(15))
_SHIP_BYTES_MAX = 900 << 10  # a ConfigMap holds 1 MiB


class PodProgram(msgspec.Struct, frozen=True, kw_only=True):
    """What runs in every pod, and how often.

    Args:
        job_id: The job.
        command: Words that start the agent, the image's own entry point replaced.
        args: Options and program, as a user gives them to msrun.
        nnodes: Number of pods.
        nnodes_min: Fewest that the job runs on.
        port: Port of the scheduler.
        max_restarts: How often a pod is replaced.
        grace: Seconds between SIGTERM and SIGKILL of a worker.
        files: Name -> text of each file that travels in a ConfigMap.
    """

    job_id: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    nnodes: int
    nnodes_min: int
    port: int
    max_restarts: int = 0
    grace: float = 10.0
    files: dict[str, str] = msgspec.field(default_factory=dict)


def object_name(job_id: str) -> str:
    """Return the name of the job's objects: lower-case letters, digits and dashes.

    It begins with a letter, as that of a Service has to; a script may be called `01_train.py`.

    Raises:
        UsageError: Nothing is left of it, or it is too long for the names of pods.
    """
    name = _OTHER.sub("-", job_id.lower()).strip("-")
    if name[:1].isdigit():
        name = f"job-{name}"
    if not name or len(name) > _NAME_MAX:
        raise UsageError(
            f"--job-id {quoted(job_id)} cannot be the name of a Job in Kubernetes",
            hint=f"choose a letter, then up to {_NAME_MAX - 1} letters, digits or dashes",
        )
    return name


def secret_name(name: str) -> str:
    """Return the name of the Secret with the key of job `name`."""
    return f"{name}-key"


def render_manifests(program: PodProgram, options: KubernetesOptions) -> list[Manifest]:
    """Return the objects, the job last; the Secret is made when the job is submitted."""
    name = object_name(program.job_id)
    _check_files(program.files)
    manifests: list[Manifest] = []
    if options.kind is Kind.JOB and program.nnodes > 1:
        manifests.append(_service(name, program, options))
    if program.files:
        manifests.append(_config_map(name, program, options))
    if options.gang and program.nnodes > 1:
        manifests.append(_pod_group(name, program, options))
    job = _job_spec(name, program, options)
    make = _jobset if options.kind is Kind.JOBSET else _job
    manifests.append(make(name, job, options))
    return manifests


def secret_manifest(name: str, namespace: str, key: str) -> Manifest:
    """Return the Secret with the job's key, base64 of it in `key`."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(secret_name(name), name, namespace),
        "type": "Opaque",
        "immutable": True,
        "data": {SECRET_KEY: key},
    }


def pod_host(name: str, index: int, kind: Kind) -> str:
    """Return the name of a pod among the pods of the job."""
    stem = f"{name}-{_JOBSET_NODES}-0" if kind is Kind.JOBSET else name
    return f"{stem}-{index}.{name}"


def _check_files(files: Mapping[str, str]) -> None:
    size = sum(len(text.encode()) for text in files.values())
    if size > _SHIP_BYTES_MAX:
        raise UsageError(
            f"--ship: the files have {size} bytes (at most {_SHIP_BYTES_MAX} in a ConfigMap)",
            hint="build them into the image, or mount a volume with them",
        )


def _labels(name: str) -> dict[str, str]:
    return {**_LABELS, JOB_LABEL: name}


def _metadata(name: str, job: str, namespace: str) -> Manifest:
    place = {"namespace": namespace} if namespace else {}
    return {"name": name, **place, "labels": _labels(job)}


def _service(name: str, program: PodProgram, options: KubernetesOptions) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(name, name, options.namespace),
        "spec": {
            "clusterIP": "None",
            "selector": {JOB_LABEL: name},
            # Pods need each other's names before any of them can be ready.
            "publishNotReadyAddresses": True,
            "ports": [{"name": "scheduler", "port": program.port, "protocol": "TCP"}],
        },
    }


def _config_map(name: str, program: PodProgram, options: KubernetesOptions) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(name, name, options.namespace),
        "immutable": True,
        "data": dict(program.files),
    }


def _pod_group(name: str, program: PodProgram, options: KubernetesOptions) -> Manifest:
    """Return what has the cluster place as many pods at once as the job needs."""
    is_volcano = options.gang is JobGang.VOLCANO
    group = "scheduling.volcano.sh/v1beta1" if is_volcano else "scheduling.x-k8s.io/v1alpha1"
    return {
        "apiVersion": group,
        "kind": "PodGroup",
        "metadata": _metadata(name, name, options.namespace),
        "spec": {"minMember": program.nnodes_min},
    }


def _pod_metadata(name: str, program: PodProgram, options: KubernetesOptions) -> Manifest:
    labels = _labels(name)
    if not options.gang or program.nnodes == 1:
        return {"labels": labels}
    if options.gang is JobGang.VOLCANO:
        return {"labels": labels, "annotations": {"scheduling.k8s.io/group-name": name}}
    return {"labels": {**labels, "scheduling.x-k8s.io/pod-group": name}}


def _job(name: str, spec: Manifest, options: KubernetesOptions) -> Manifest:
    metadata = _metadata(name, name, options.namespace)
    if not math.isinf(options.ttl):
        spec = {"ttlSecondsAfterFinished": math.ceil(options.ttl), **spec}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _queued(metadata, options),
        "spec": {**_suspended(options), **spec},
    }


def _jobset(name: str, spec: Manifest, options: KubernetesOptions) -> Manifest:
    """Return the job as a JobSet, which makes the headless Service itself."""
    lifetime = (
        {} if math.isinf(options.ttl) else {"ttlSecondsAfterFinished": math.ceil(options.ttl)}
    )
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _queued(_metadata(name, name, options.namespace), options),
        "spec": {
            **_suspended(options),
            **lifetime,
            "network": {
                "enableDNSHostnames": True,
                "subdomain": name,
                "publishNotReadyAddresses": True,
            },
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                {
                    "name": _JOBSET_NODES,
                    "replicas": 1,
                    "template": {"metadata": {"labels": _labels(name)}, "spec": spec},
                }
            ],
        },
    }


def _queued(metadata: Manifest, options: KubernetesOptions) -> Manifest:
    if not options.queue:
        return metadata
    return {**metadata, "labels": {**metadata["labels"], QUEUE_LABEL: options.queue}}


def _suspended(options: KubernetesOptions) -> Manifest:
    # Kueue starts the job when its quota has room; until then there are no pods.
    return {"suspend": True} if options.suspend or options.queue else {}


def _job_spec(name: str, program: PodProgram, options: KubernetesOptions) -> Manifest:
    deadline = (
        {} if math.isinf(options.time) else {"activeDeadlineSeconds": math.ceil(options.time)}
    )
    is_elastic = program.nnodes_min < program.nnodes
    # The nodes that never came are not waited for; all others end with the same code.
    success = {"successPolicy": {"rules": [{"succeededIndexes": "0"}]}} if is_elastic else {}
    return {
        "completionMode": "Indexed",
        "completions": program.nnodes,
        "parallelism": program.nnodes,
        "backoffLimitPerIndex": program.max_restarts,
        # Beyond this, an index without a retry left ends the whole job, not only itself.
        "maxFailedIndexes": program.nnodes - program.nnodes_min,
        **deadline,
        **success,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": CONTAINER,
                        "operator": "NotIn",
                        "values": sorted(int(code) for code in _RETRIED),
                    },
                },
            ]
        },
        "template": {
            "metadata": _pod_metadata(name, program, options),
            "spec": dict(_pod_spec(name, program, options)),
        },
    }


def _pod_spec(
    name: str, program: PodProgram, options: KubernetesOptions
) -> Iterator[tuple[str, object]]:
    yield "restartPolicy", "Never"  # The Job replaces pods; what ran in one is gone with it.
    if options.kind is Kind.JOB:
        yield "subdomain", name
    yield "terminationGracePeriodSeconds", math.ceil(program.grace) + _SWEEP_SECONDS
    yield "enableServiceLinks", False
    if options.service_account:
        yield "serviceAccountName", options.service_account
    else:
        yield "automountServiceAccountToken", False  # Nothing in the pods talks to Kubernetes.
    if options.gang and program.nnodes > 1:
        yield "schedulerName", _SCHEDULERS[options.gang]
    if options.priority_class:
        yield "priorityClassName", options.priority_class
    if options.image_pull_secrets:
        yield "imagePullSecrets", [{"name": each} for each in options.image_pull_secrets]
    if options.node_selector:
        yield "nodeSelector", dict(options.node_selector)
    if options.tolerations:
        yield "tolerations", [_toleration(each) for each in options.tolerations]
    if options.topology_spread:
        yield "topologySpreadConstraints", [_spread(each, name) for each in options.topology_spread]
    yield "containers", [dict(_container(name, program, options))]
    volumes = [volume for volume, _ in _volumes(name, program, options)]
    if volumes:
        yield "volumes", volumes


def _container(
    name: str, program: PodProgram, options: KubernetesOptions
) -> Iterator[tuple[str, object]]:
    yield "name", CONTAINER
    yield "image", options.image
    yield "command", [_literal(word) for word in program.command]
    yield "args", [_literal(word) for word in program.args]
    if options.workdir:
        yield "workingDir", options.workdir
    yield "env", list(_env(name, program, options))
    if program.nnodes > 1:
        yield "ports", [{"name": "scheduler", "containerPort": program.port}]
    if options.resources:
        # A device counts only where both are equal; for the rest it is the highest class.
        yield "resources", {"limits": dict(options.resources), "requests": dict(options.resources)}
    mounts = [mount for _, mount in _volumes(name, program, options)]
    if mounts:
        yield "volumeMounts", mounts
    # Where `kubectl describe` shows why a pod failed, and the front reads its verdict.
    yield "terminationMessagePath", _MESSAGE_FILE
    yield "terminationMessagePolicy", "FallbackToLogsOnError"


def _literal(word: str) -> str:
    """Return a word that Kubernetes passes on as `word`.

    It takes `$(NAME)` for a variable and `$$` for `$`, and breaks a `$` before what is not ASCII.
    """
    return _EXPANDED.sub("$$", word)


def _env(name: str, program: PodProgram, options: KubernetesOptions) -> Iterator[dict[str, object]]:
    is_range = program.nnodes_min < program.nnodes
    nodes = f"{program.nnodes_min}:{program.nnodes}" if is_range else str(program.nnodes)
    yield {"name": environ.Pod.JOB.value, "value": program.job_id}
    yield {"name": environ.Pod.NODES.value, "value": nodes}
    yield {"name": environ.Pod.MESSAGE.value, "value": _MESSAGE_FILE}
    if program.nnodes == 1:
        return
    scheduler = f"{pod_host(name, 0, options.kind)}:{program.port}"
    yield {"name": environ.Pod.SCHEDULER.value, "value": scheduler}
    yield {"name": environ.Pod.SECRET_FILE.value, "value": f"{SECRET_DIRECTORY}/{SECRET_KEY}"}
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    yield {"name": environ.Pod.ADDRESS.value, "valueFrom": address}


def _volumes(
    name: str, program: PodProgram, options: KubernetesOptions
) -> Iterator[tuple[Manifest, Manifest]]:
    """Yield each volume with its mount."""
    if program.nnodes > 1:
        secret = {
            "secretName": secret_name(name),
            "defaultMode": 0o400,
            "items": [{"key": SECRET_KEY, "path": SECRET_KEY}],
        }
        yield _volume("msrun-key", {"secret": secret}, SECRET_DIRECTORY, is_read_only=True)
    if options.shm is not None:
        limit = {"sizeLimit": options.shm} if options.shm else {}
        memory = {"emptyDir": {"medium": "Memory", **limit}}
        yield _volume("shm", memory, "/dev/shm")  # noqa: S108 - of the pod
    if program.files:
        source = {"configMap": {"name": name}}
        yield _volume("msrun-files", source, SHIP_DIRECTORY, is_read_only=True)
    for number, volume in enumerate(options.volumes):
        yield _volume(
            f"volume-{number}", _source(volume), volume.path, is_read_only=volume.is_read_only
        )


def _volume(
    name: str, source: Manifest, path: str, *, is_read_only: bool = False
) -> tuple[Manifest, Manifest]:
    mode = {"readOnly": True} if is_read_only else {}
    return {"name": name, **source}, {"name": name, "mountPath": path, **mode}


def _source(volume: Volume) -> Manifest:
    match volume.source:
        case "pvc":
            return {"persistentVolumeClaim": {"claimName": volume.name}}
        case "host":
            return {"hostPath": {"path": volume.name}}
        case "secret":
            return {"secret": {"secretName": volume.name}}
        case "configmap":
            return {"configMap": {"name": volume.name}}
    return {"emptyDir": {"sizeLimit": volume.name} if volume.name else {}}


def _toleration(toleration: Toleration) -> Manifest:
    effect = {"effect": toleration.effect} if toleration.effect else {}
    if toleration.value is None:
        return {"key": toleration.key, "operator": "Exists", **effect}
    return {"key": toleration.key, "operator": "Equal", "value": toleration.value, **effect}


def _spread(spread: Spread, name: str) -> Manifest:
    return {
        "maxSkew": 1,
        "topologyKey": spread.key,
        "whenUnsatisfiable": "DoNotSchedule" if spread.is_required else "ScheduleAnyway",
        "labelSelector": {"matchLabels": {JOB_LABEL: name}},
    }
