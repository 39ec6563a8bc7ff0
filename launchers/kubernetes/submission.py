"""A job that is submitted: its objects are created, its log is shown, its end is awaited.

The Job is created first and owns everything else, so that deleting it removes all of it, whatever
became of this process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from launchers.kubernetes.api import CONFLICT, NOT_FOUND, ApiError, Cluster
from launchers.kubernetes.manifests import CONTAINER, JOB_LABEL
from launchers.kubernetes.observe import (
    End,
    is_running,
    pod_index,
    read_end,
    waiting_reasons,
)
from msrun.errors import ExitCode, MsrunError, UnreachableError, UsageError, signal_exit_code
from msrun.processes.batch import follow
from msrun.units import render_duration

Document = dict[str, Any]

_JOBS = ("Job", "JobSet")
# Kinds that not every cluster has.
_INSTALLED = {"JobSet": "JobSet's controller", "PodGroup": "the scheduler that --k8s-gang names"}
_POLL_SECONDS = 2.0  # of `follow`
# The job goes on meanwhile, and its end is still there when the server is back.
_ABSENCE_POLLS = 300
# Looks at a deleted job before its pods have to be gone: their grace period and some.
_GONE_POLLS = 90
_LOG_SECONDS = 5.0


def create_objects(cluster: Cluster, manifests: Sequence[Document]) -> Document:
    """Create the job and what it owns; return the job.

    It is suspended until everything is there that its pods mount.

    Raises:
        UsageError: There is a job of that name, or the cluster refuses an object; nothing is left.
    """
    job = next(each for each in manifests if each["kind"] in _JOBS)
    kind, name = job["kind"], job["metadata"]["name"]
    made = _create(cluster, {**job, "spec": {**job["spec"], "suspend": True}})
    owner = {
        "apiVersion": job["apiVersion"],
        "kind": kind,
        "name": name,
        "uid": made["metadata"]["uid"],
    }
    try:
        for manifest in manifests:
            if manifest is not job:
                metadata = {**manifest["metadata"], "ownerReferences": [owner]}
                _create(cluster, {**manifest, "metadata": metadata})
        if not job["spec"].get("suspend"):
            cluster.patch(kind, name, {"spec": {"suspend": False}})
    except MsrunError:
        cluster.delete(kind, name)
        raise
    return made


def _create(cluster: Cluster, manifest: Document) -> Document:
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    try:
        return cluster.create(manifest)
    except ApiError as error:
        where = f"{kind} {name} in namespace {cluster.namespace}"
        if error.status == CONFLICT:
            hint = "choose another --job-id, or delete that one"
            raise UsageError(f"there is a {where} already", hint=hint) from None
        is_missing = error.status == NOT_FOUND and "namespaces" not in error.message
        if is_missing and kind in _INSTALLED:
            text = f"the cluster has no kind {kind} of {manifest['apiVersion']}"
            raise UsageError(text, hint=f"install {_INSTALLED[kind]}") from None
        raise UsageError(f"the cluster refuses {where}: {error.message}") from None


class Submission:
    """A job in the cluster, followed from here.

    Args:
        cluster: Where it is.
        job: The job as the server has it.
        say: Writes a line for a person.
    """

    def __init__(self, cluster: Cluster, job: Document, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._kind, self._name = job["kind"], job["metadata"]["name"]
        self._uid = job["metadata"]["uid"]
        self._say = say
        self._said: set[str] = set()
        self._absences = 0
        self._gone_in: int | None = None
        self._log: _PodLog | None = None

    def follow(self) -> int:
        """Show the log of the first pod and return the job's exit code; a signal cancels it."""
        try:
            return follow(self._poll, self._cancel)
        finally:
            if self._log:
                self._log.finish()

    def _poll(self) -> int | None:
        try:
            code = self._look()
        except UnreachableError as error:
            self._absences += 1
            self._tell(error.message)
            if self._absences < _ABSENCE_POLLS:
                return None
            away = render_duration(_ABSENCE_POLLS * _POLL_SECONDS)
            self._say(f"error: the API server has not answered for {away}; the job may still run")
            return ExitCode.NODE_LOST
        if self._absences:
            self._absences = 0
            self._said.clear()
            self._say("msrun: the API server answers again")
        return code

    def _look(self) -> int | None:
        """Return the exit code if the job has ended."""
        job = self._cluster.get(self._kind, self._name)
        if job is None or job["metadata"]["uid"] != self._uid:
            if self._gone_in is None:
                self._say(f"error: {self._kind} {self._name} was deleted")
            return signal_exit_code(15)
        if self._gone_in is not None:
            return self._await_deletion()
        pods = self._pods()
        self._show_log(pods)
        end = read_end(job, pods)
        if end is not None:
            return self._tell_end(end)
        if any(not is_running(pod) for pod in pods) or not pods:
            events = self._cluster.list("Event", fieldSelector="type=Warning")
            for line in waiting_reasons(job, pods, events):
                self._tell(line)
        return None

    def _await_deletion(self) -> int | None:
        self._gone_in = (self._gone_in or 0) - 1
        if self._gone_in > 0:
            return None
        self._say(f"warning: {self._kind} {self._name} is being deleted, and its pods still end")
        return signal_exit_code(15)

    def _pods(self) -> list[Document]:
        pods = self._cluster.list("Pod", labelSelector=f"{JOB_LABEL}={self._name}")
        return sorted(pods, key=lambda pod: (pod_index(pod), pod["metadata"]["name"]))

    def _tell_end(self, end: End) -> int:
        if self._log:
            self._log.finish()
            self._log = None
        if end.reason:
            self._say(f"error: {end.reason}")
        return end.code

    def _tell(self, line: str) -> None:
        """Say something once."""
        if line not in self._said:
            self._said.add(line)
            self._say(f"msrun: {line}")

    def _show_log(self, pods: Sequence[Document]) -> None:
        """Follow the log of the newest pod of index 0."""
        firsts = [pod for pod in pods if pod_index(pod) == 0 and is_running(pod)]
        if not firsts:
            return
        newest = max(firsts, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))
        name, uid = newest["metadata"]["name"], newest["metadata"]["uid"]
        if self._log and self._log.uid == uid:
            return
        if self._log:
            self._log.finish()
        self._log = _PodLog(self._cluster, name, uid)

    def _cancel(self) -> None:
        if self._gone_in is None:
            self._gone_in = _GONE_POLLS
            self._say(f"msrun: deleting {self._kind} {self._name}")
        try:
            self._cluster.delete(self._kind, self._name)
        except MsrunError as error:
            self._say(f"warning: {error.message}; {self._kind} {self._name} may still run")


class _PodLog:
    """Copies the log of one pod to stdout as it grows, in a thread of its own.

    Args:
        cluster: Where it is.
        pod: Its name.
        uid: Its identity, which no other pod of that name has.
    """

    def __init__(self, cluster: Cluster, pod: str, uid: str) -> None:
        self.uid = uid
        self._cluster = cluster
        self._pod = pod
        self._last = (b"", 0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the log has been copied; a line that hangs is given up."""
        self._thread.join(_LOG_SECONDS)

    def _run(self) -> None:
        for _ in range(_ABSENCE_POLLS):
            try:
                self._copy()
            except UnreachableError:
                threading.Event().wait(_POLL_SECONDS)
            except MsrunError:
                return
            else:
                return

    def _copy(self) -> None:
        # After a broken line the last second comes again, of which nothing is shown twice.
        since = f"{self._last[0][:19].decode()}Z" if self._last[0] else ""
        seen = _Seen(*self._last)
        for line in self._cluster.log_lines(self._pod, CONTAINER, since=since):
            at, _, text = line.partition(b" ")
            if seen.has(_comparable(at)):
                continue
            time, count = self._last
            self._last = (_comparable(at), count + 1 if _comparable(at) == time else 1)
            with contextlib.suppress(OSError):  # The reader has closed the pipe.
                os.write(sys.stdout.fileno(), text + b"\n")


class _Seen:
    """The lines of a log that were there before.

    Args:
        last: Time of the last one; empty when there was none.
        count: How many of them had that time.
    """

    def __init__(self, last: bytes, count: int) -> None:
        self._last = last
        self._count = count

    def has(self, at: bytes) -> bool:
        """Whether the next line, of that time, was there."""
        if at == self._last and self._count:
            self._count -= 1
            return True
        return at < self._last


def _comparable(at: bytes) -> bytes:
    """Return a time such as `2026-11-23T04:57:05.1Z` with nine digits after the point."""
    second, _, fraction = at.rstrip(b"Z").partition(b".")
    return second + b"." + fraction.ljust(9, b"0")
