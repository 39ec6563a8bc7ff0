"""Verbs about a job in Kubernetes: `msrun` in the pod of the scheduler carries them out.

The API server carries the words in and the output out, so no port is open and no key leaves the
cluster.  `stop` deletes the job, because its controller would replace pods that merely end.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launchers.kubernetes.api import Cluster, open_cluster
from launchers.kubernetes.manifests import ALL_LABELS, CONTAINER, JOB_LABEL
from launchers.kubernetes.observe import has_ended, pod_index
from launchers.kubernetes.scale import is_about_servers, scale
from msrun import environ
from msrun.cli.output import answer, say
from msrun.cli.verbs.control import JSON, SCHEMA, STOP, parse
from msrun.errors import UnreachableError, UsageError
from msrun.transport.loop import pause
from msrun.units import counted, shown

Document = dict[str, Any]

_CHOICES_MAX = 8
_SECONDS = 1.0
_JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
# Of a deleted job, until its pods have to be gone.
_LOOKS = 120


def run_verb(verb: str, words: Sequence[str], options: Mapping[str, str]) -> int:
    """Carry out a verb and return its exit code.

    Args:
        verb: Its name.
        words: Everything after it.
        options: `namespace` and `context`.

    Raises:
        UsageError: No one job is meant, or it has no pod that could be asked.
    """
    cluster = open_cluster(
        namespace=options.get("namespace", ""), context=options.get("context", "")
    )
    found = cluster.list("Job", labelSelector=ALL_LABELS)
    jobs = {_job_of(job): job for job in found if not has_ended(job)}
    name, rest = _find_job(sorted(jobs), words, cluster.namespace)
    if verb == "scale" and not is_about_servers(rest):
        return scale(cluster, jobs[name], name, rest)
    if verb == "stop":
        kind = "JobSet" if _JOBSET_LABEL in jobs[name]["metadata"]["labels"] else "Job"
        return _stop(cluster, kind, name, rest)
    pods = cluster.list("Pod", labelSelector=f"{JOB_LABEL}={name}")
    return _run_in(cluster, _first(pods, name), (verb, rest))


def _job_of(job: Document) -> str:
    """Return the name of a job, which a Job of a JobSet has in a label alone."""
    return str(job["metadata"]["labels"].get(JOB_LABEL, job["metadata"]["name"]))


def _find_job(names: Sequence[str], words: Sequence[str], namespace: str) -> tuple[str, list[str]]:
    """Return which of the jobs is meant, and the words without it."""
    where = f"in namespace {namespace}"
    if not names:
        raise UsageError(f"no job of msrun runs {where}")
    choices = ", ".join(names[:_CHOICES_MAX])
    # A name is stronger than the beginning of one, which may be that of a node.
    for word in sorted(words, key=lambda word: word not in names):
        found = [word] if word in names else [name for name in names if name.startswith(word)]
        if not found:
            continue
        if len(found) > 1:
            raise UsageError(f"{shown(word)} is more than one job {where} (choose {choices})")
        rest = list(words)
        rest.remove(word)
        return found[0], rest
    if len(names) > 1:
        raise UsageError(f"{counted(len(names), 'job')} of msrun run {where} (choose {choices})")
    return names[0], list(words)


def _first(pods: Sequence[Document], name: str) -> Document:
    """Return the pod that has the scheduler."""
    for pod in pods:
        is_running = (pod.get("status") or {}).get("phase") == "Running"
        if pod_index(pod) == 0 and is_running and not pod["metadata"].get("deletionTimestamp"):
            return pod
    raise UsageError(
        f"job {name} has no pod of index 0 that runs, which has the scheduler",
        hint="kubectl describe pod says why",
    )


def _run_in(cluster: Cluster, pod: Document, verb: tuple[str, list[str]]) -> int:
    """Run `msrun VERB JOB WORDS` in a pod, with its output on ours; return its exit code."""
    from kubernetes import client, stream

    container = next(c for c in pod["spec"]["containers"] if c["name"] == CONTAINER)
    values = {entry["name"]: entry.get("value", "") for entry in container.get("env") or ()}
    command = [*container["command"], verb[0], values.get(environ.Pod.JOB, ""), *verb[1]]
    core = client.CoreV1Api(cluster.client)
    try:
        line = stream.stream(
            core.connect_get_namespaced_pod_exec,
            pod["metadata"]["name"],
            cluster.namespace,
            container=CONTAINER,
            command=command,
            stdin=False,
            stdout=True,
            stderr=True,
            tty=False,
            _preload_content=False,
        )
    except client.ApiException as error:
        reason = error.reason or f"HTTP status {error.status}"
        raise UnreachableError(
            f"nothing can be run in pod {pod['metadata']['name']}: {reason}",
            hint="your account needs create on pods/exec",
        ) from None
    try:
        while line.is_open():
            line.update(timeout=_SECONDS)
            _copy(line)
        _copy(line)
        code = line.returncode
    finally:
        line.close()
    if code is None:
        raise UnreachableError(f"the line to pod {pod['metadata']['name']} was cut")
    return int(code)


def _copy(line: Any) -> None:
    for has, read, stream in (
        (line.peek_stdout, line.read_stdout, sys.stdout),
        (line.peek_stderr, line.read_stderr, sys.stderr),
    ):
        if has():
            with contextlib.suppress(BlockingIOError):
                os.write(stream.fileno(), read().encode())


def _stop(cluster: Cluster, kind: str, name: str, words: Sequence[str]) -> int:
    given = parse("stop", STOP, words, JSON)
    cluster.delete(kind, name)
    looks = 0
    while cluster.get(kind, name) is not None:
        looks += 1
        if looks > _LOOKS:
            raise UnreachableError(f"{kind} {name} is being deleted, and its pods still end")
        pause(_SECONDS)
    sentence = f"{kind} {name} in namespace {cluster.namespace} is deleted"
    if given["json"]:
        answer(json.dumps({"schema": SCHEMA, "done": sentence}))
    else:
        say(f"msrun: {sentence}")
    return 0
