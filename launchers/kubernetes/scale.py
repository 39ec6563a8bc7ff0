"""`msrun scale --nodes`: an elastic job gets more pods or fewer, of the same Job.

Kubernetes lets an Indexed Job change its completions if its parallelism is the same.  It then makes
pods of the new indexes, which join, or ends those of the highest, whose nodes leave.  The agents
were told the range of --nnodes when the pods were made, so no other number works.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from launchers.kubernetes.api import ApiError, Cluster
from launchers.kubernetes.manifests import CONTAINER, JOB_LABEL, QUEUE_LABEL
from launchers.kubernetes.observe import pod_index
from msrun import environ
from msrun.cli.output import answer, say
from msrun.cli.verbs.control import (
    JSON,
    NODES,
    SCALE,
    SCHEMA,
    SERVERS,
    parse,
    parse_nodes,
    parse_servers,
)
from msrun.errors import UnreachableError, UsageError
from msrun.transport.loop import pause
from msrun.units import counted

Document = dict[str, Any]

_SECONDS = 1.0
# Of pods that were told to end, until they have to be gone.
_LOOKS = 120


def is_about_servers(words: Sequence[str]) -> bool:
    """Whether `msrun scale` is to change the parameter servers, which the job does by itself.

    Args:
        words: What follows the verb, without the name of the job.

    Raises:
        UsageError: The number is none, or the words ask for two changes.
    """
    given = parse("scale", SCALE, words, NODES, SERVERS, JSON)
    _check_alone(given)
    return parse_servers(given) is not None


def scale(cluster: Cluster, job: Document, name: str, words: Sequence[str]) -> int:
    """Change the number of nodes of a job, and return 0 when those that leave are gone.

    Args:
        cluster: Where it runs.
        job: Its Job.
        name: Its name.
        words: What follows the verb, without the name.

    Raises:
        UsageError: The job cannot have that many nodes, or cannot be scaled.
    """
    given = parse("scale", SCALE, words, NODES, SERVERS, JSON)
    nodes = parse_nodes(given)
    fewest, most = _range(job, name)
    if not fewest <= nodes <= most:
        raise UsageError(
            f"--nodes {nodes} is not among the numbers of nodes of job {name} "
            f"(--nnodes {fewest}:{most})"
        )
    before = int(job["spec"]["completions"])
    if nodes != before:
        _change(cluster, job, nodes, fewest)
    if nodes < before:
        _await_leaving(cluster, name, nodes)
    change = f"{abs(nodes - before)} {'fewer' if nodes < before else 'more'}"
    has = f"{counted(nodes, 'node')}{' already' if nodes == before else f', {change}'}"
    sentence = f"job {name} in namespace {cluster.namespace} has {has}"
    if given["json"]:
        answer(json.dumps({"schema": SCHEMA, "done": sentence}))
    else:
        say(f"msrun: {sentence}")
    return 0


def _check_alone(given: Mapping[str, Any]) -> None:
    if given["words"]:
        raise UsageError(f"{given['words'][0]!r} is one word too many: one JOB at a time")


def _range(job: Document, name: str) -> tuple[int, int]:
    """Return the fewest and most nodes that a job was made for."""
    metadata = job["metadata"]
    if any(owner["kind"] == "JobSet" for owner in metadata.get("ownerReferences") or ()):
        raise UsageError(
            f"job {name} is a JobSet, whose size is fixed", hint="--k8s-kind job can be scaled"
        )
    queue = metadata["labels"].get(QUEUE_LABEL)
    if queue:
        raise UsageError(
            f"job {name} is in the queue {queue} of Kueue, which stops a job that changes its size"
        )
    containers = job["spec"]["template"]["spec"]["containers"]
    env = next((c.get("env") or () for c in containers if c["name"] == CONTAINER), ())
    values = {entry["name"]: entry.get("value", "") for entry in env}
    fewest, colon, most = values.get(environ.Pod.NODES, "").partition(":")
    if not colon:
        nodes = counted(int(job["spec"]["completions"]), "node")
        raise UsageError(
            f"job {name} has a fixed size of {nodes}", hint="an elastic one: --nnodes MIN:MAX"
        )
    return int(fewest), int(most)


def _change(cluster: Cluster, job: Document, nodes: int, fewest: int) -> None:
    """Change the Job, or the MsrunJob whose operator keeps the Job as it says."""
    name = job["metadata"]["name"]
    owners = job["metadata"].get("ownerReferences") or ()
    owner = next((each["name"] for each in owners if each["kind"] == "MsrunJob"), None)
    spec = {"completions": nodes, "parallelism": nodes, "maxFailedIndexes": nodes - fewest}
    try:
        if owner:
            cluster.patch("MsrunJob", owner, {"spec": {"nodes": nodes}})
        else:
            cluster.patch("Job", name, {"spec": spec})
    except ApiError as error:
        raise UsageError(f"the cluster refuses to scale job {name}: {error.message}") from None


def _await_leaving(cluster: Cluster, name: str, nodes: int) -> None:
    """Return when no pod beyond the first `nodes` indexes is left.

    A pod that still ends while its index counts again would use up a retry of that index.
    """
    for _ in range(_LOOKS):
        pods = cluster.list("Pod", labelSelector=f"{JOB_LABEL}={name}")
        leaving = [pod for pod in pods if pod_index(pod) >= nodes and not _has_ended(pod)]
        if not leaving:
            return
        pause(_SECONDS)
    names = ", ".join(sorted(pod["metadata"]["name"] for pod in leaving))
    raise UnreachableError(
        f"job {name} has {nodes} nodes from now on, and these still end: {names}"
    )


def _has_ended(pod: Document) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
