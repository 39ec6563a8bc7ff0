"""The objects of an MsrunJob: a Secret, a headless Service and an Indexed Job, one pod a node."""

from __future__ import annotations

import copy
import math

from launchers.operator.decision import Object, key_name, owner_reference
from launchers.operator.gang import Gang, GangScheduler, join, pod_group
from msrun import environ
from msrun.errors import ExitCode, UsageError, signal_exit_code
from msrun.overlay import merge
from msrun.units import quoted

CONTAINER = "msrun"
PORT = 29500
JOB = "msrun.io/job"
NEEDS_KEY = "msrun.io/needs-key"
_KEY_FOLDER = "/run/msrun-key"
_MESSAGE_FILE = "/dev/termination-log"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
# Seconds that an agent takes after the grace of its workers to tell the others and write its logs.
_SWEEP_SECONDS = 20
# Ends of an agent that are no verdict of the job: it lost the others, or was killed.
RETRIED = (int(ExitCode.NODE_LOST), signal_exit_code(9), signal_exit_code(15))
# Fields of the spec that a pod has under the same name.
_POD_FIELDS = (
    "imagePullSecrets",
    "nodeSelector",
    "priorityClassName",
    "schedulerName",
    "serviceAccountName",
    "tolerations",
    "topologySpreadConstraints",
)


def labels(job: Object) -> dict[str, str]:
    """Return the labels of everything of a job."""
    name = job["metadata"]["name"]
    return {
        "app.kubernetes.io/name": "msrun",
        "app.kubernetes.io/managed-by": "msrun-operator",
        # By which the verbs of msrun find pods of every job.
        "app.kubernetes.io/instance": name,
        JOB: name,
    }


def objects(job: Object) -> list[Object]:
    """Return what an MsrunJob is made of, in the order in which to create it."""
    nodes, gang = int(job["spec"]["nodes"]), _gang(job)
    group = pod_group(gang, job, labels(job)) if gang else None
    shared = [_secret(job), _service(job)] if nodes > 1 else []
    return [*shared, *([group] if group else []), _job(job, gang)]


def _gang(job: Object) -> Gang | None:
    spec = job["spec"]
    nodes = int(spec["nodes"])
    if nodes == 1 or not spec.get("gangScheduler"):
        return None
    fewest, name = int(spec.get("minNodes", nodes)), job["metadata"]["name"]
    scheduler = GangScheduler(spec["gangScheduler"])
    return Gang(scheduler=scheduler, name=name, size=nodes, fewest=fewest, policy={})


def _metadata(job: Object, name: str) -> Object:
    return {
        "name": name,
        "namespace": job["metadata"]["namespace"],
        "labels": labels(job),
        "ownerReferences": [owner_reference(job)],
    }


def _secret(job: Object) -> Object:
    metadata = _metadata(job, key_name(job))
    metadata["annotations"] = {NEEDS_KEY: "key"}
    kind = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}
    return {**kind, "type": "Opaque", "immutable": True}


def _service(job: Object) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, job["metadata"]["name"]),
        "spec": {
            "clusterIP": "None",
            "selector": {JOB: job["metadata"]["name"]},
            # Pods need each other's names before any of them can be ready.
            "publishNotReadyAddresses": True,
            "ports": [{"name": "scheduler", "port": PORT, "protocol": "TCP"}],
        },
    }


def _template(job: Object) -> Object:
    """Return the template of the pods, with that of the user merged over ours.

    Raises:
        UsageError: The user's is none of a pod.
    """
    ours: Object = {"metadata": {"labels": labels(job)}, "spec": _pod(job)}
    template = merge(ours, job["spec"].get("podTemplate") or {})
    metadata = template.get("metadata", {})
    words = {"metadata": metadata, "spec": template.get("spec")}
    if isinstance(metadata, dict):
        words |= {f"metadata.{key}": metadata.get(key, {}) for key in ("labels", "annotations")}
    for path, value in words.items():
        if not isinstance(value, dict):
            raise UsageError(f"{path} is {quoted(str(value))}, and pods have a mapping there")
    # By these the job's pods are found, whatever the user's template says.
    metadata["labels"] = {**words["metadata.labels"], **labels(job)}
    return {**template, "metadata": metadata}


def _job(job: Object, gang: Gang | None) -> Object:
    spec = job["spec"]
    nodes = int(spec["nodes"])
    fewest = int(spec.get("minNodes", nodes))
    metadata = _metadata(job, job["metadata"]["name"])
    if spec.get("queue"):
        metadata["labels"][_QUEUE_LABEL] = spec["queue"]
    template = _template(job)
    if gang:
        join(gang, template["metadata"], template["spec"], role="node")
    made: Object = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        # Kueue starts a queued job when its quota has room.
        "suspend": bool(spec.get("suspend") or spec.get("queue")),
        "backoffLimitPerIndex": int(spec["nodeRestarts"]),
        "maxFailedIndexes": nodes - fewest,
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
                        "values": sorted(RETRIED),
                    },
                },
            ]
        },
        "template": template,
    }
    if fewest < nodes:
        # Nodes that never came are not waited for; the others all end with the same code.
        made["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    if "activeDeadlineSeconds" in spec:
        made["activeDeadlineSeconds"] = int(spec["activeDeadlineSeconds"])
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": made}


def _pod(job: Object) -> Object:
    spec = job["spec"]
    several = int(spec["nodes"]) > 1
    volumes = copy.deepcopy(spec.get("volumes") or [])
    mounts = copy.deepcopy(spec.get("volumeMounts") or [])
    if several:
        secret = {"secretName": key_name(job), "defaultMode": 0o400}
        volumes.append({"name": "msrun-key", "secret": secret})
        mounts.append({"name": "msrun-key", "mountPath": _KEY_FOLDER, "readOnly": True})
    if "sharedMemory" in spec:
        memory = {"medium": "Memory", "sizeLimit": spec["sharedMemory"]}
        volumes.append({"name": "msrun-shm", "emptyDir": memory})
        mounts.append({"name": "msrun-shm", "mountPath": "/dev/shm"})  # noqa: S108 - of the pod
    container: Object = {
        "name": CONTAINER,
        "image": spec["image"],
        "command": [str(spec["python"]), "-P", "-m", "msrun"],
        "args": [_literal(word) for word in words(job)],
        # Ours last, so that they win over the user's of the same name.
        "env": [*(spec.get("env") or []), *_env(job)],
        "volumeMounts": mounts,
        # The last words of a pod that failed become the cause in the job's status.
        "terminationMessagePath": _MESSAGE_FILE,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    for name in ("resources", "envFrom", "imagePullPolicy", "workingDir"):
        if spec.get(name):
            container[name] = copy.deepcopy(spec[name])
    pod: Object = {name: copy.deepcopy(spec[name]) for name in _POD_FIELDS if spec.get(name)}
    if "serviceAccountName" not in pod:
        pod["automountServiceAccountToken"] = False  # nothing in the pods talks to Kubernetes
    return {
        **pod,
        "restartPolicy": "Never",
        "subdomain": job["metadata"]["name"],
        "terminationGracePeriodSeconds": math.ceil(spec["gracePeriodSeconds"]) + _SWEEP_SECONDS,
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": volumes,
    }


def words(job: Object) -> list[str]:
    """Return what the agent of each pod is told: options, then the program and its arguments.

    Where it belongs stands in its environment, as in every pod of msrun.
    """
    spec = job["spec"]
    told = ["run", f"--grace={spec['gracePeriodSeconds']}s"]
    told.append(f"--max-restarts={spec['maxRestarts']}")
    if "workersPerNode" in spec:
        told.append(f"--workers-per-node={spec['workersPerNode']}")
    if "servers" in spec:
        told.append(f"--server-num={spec['servers']}")
    for option, value in sorted((spec.get("options") or {}).items()):
        told.append(f"--{option}={value}")
    if spec.get("module"):
        told.append("-m")
    return [*told, *map(str, spec["program"])]


def node_range(batch_job: Object) -> tuple[int, int] | None:
    """Return the fewest and most nodes for which a Job was made, None where it does not say."""
    for container in batch_job["spec"]["template"]["spec"]["containers"]:
        for entry in container.get("env") or ():
            if container["name"] == CONTAINER and entry["name"] == environ.Pod.NODES:
                fewest, _, most = str(entry["value"]).partition(":")
                return int(fewest), int(most or fewest)
    return None


def _literal(word: str) -> str:
    """Return a word that Kubernetes passes on as `word`: it would expand `$(NAME)`."""
    return word.replace("$", "$$")


def _env(job: Object) -> list[Object]:
    spec, name = job["spec"], job["metadata"]["name"]
    nodes, fewest = int(spec["nodes"]), int(spec.get("minNodes", spec["nodes"]))
    variables = {
        environ.Pod.JOB: name,
        environ.Pod.NODES: str(nodes) if fewest == nodes else f"{fewest}:{nodes}",
        environ.Pod.MESSAGE: _MESSAGE_FILE,
    }
    if nodes > 1:
        variables[environ.Pod.SCHEDULER] = f"{name}-0.{name}:{PORT}"
        variables[environ.Pod.SECRET_FILE] = f"{_KEY_FOLDER}/key"
    made: list[Object] = [{"name": key.value, "value": text} for key, text in variables.items()]
    if nodes > 1:
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        made.append({"name": environ.Pod.ADDRESS.value, "valueFrom": address})
    return made
