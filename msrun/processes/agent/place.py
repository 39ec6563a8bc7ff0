"""What a launcher must have for itself before it starts anything: directories, journal and port.

Another launcher may want the same: another job with the same `--log-dir`, another run with the same
`--rdzv-id`, or the same command in a second terminal, which is a further node of one job.
Whoever comes first has them; the others step aside here, where that keeps their meaning.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from msrun.backend import LaunchPlan
from msrun.errors import UsageError
from msrun.job import LOOPBACK, JobSpec
from msrun.processes import control_file, run_dir
from msrun.processes.launcher import STOPS, open_journal, whose
from msrun.processes.rendezvous import listen_or_refuse

_BESIDE_MAX = 1024
_STORE = "--master-port"


@dataclass(slots=True, kw_only=True)
class Place:
    """What is this launcher's own.

    Args:
        plan: The plan of the job, as it is carried out here.
        directory: Private directory of the job.
        lock: Descriptor that holds its lock.
        journal: Descriptor of the launcher's own log.
        listening: The scheduler's socket; None where another node has the scheduler.
        store: The socket at which this node's workers find the store.
        notes: What the user should know, one line each.
        signals: Signals that were blocked before `take`, which also blocks those that end a job:
            one that comes before there are handlers would leave the directory.
    """

    plan: LaunchPlan
    directory: Path
    lock: int
    journal: int = -1
    listening: socket.socket | None = None
    store: socket.socket = field(init=False)
    notes: list[str] = field(default_factory=list)
    signals: set[int] = field(default_factory=set)

    @property
    def journal_file(self) -> str:
        """Path of the launcher's own log."""
        return str(Path(self.plan.job.log_dir, journal_name(self.plan)))

    def hear_signals(self) -> None:
        """Take the signals that came since, now that there are handlers."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self.signals)

    def release(self) -> None:
        """Give the private directory back; may be called again."""
        if self.lock >= 0:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self.lock)
            self.lock = -1


def take(plan: LaunchPlan) -> Place:
    """Take everything that `plan` needs for itself on this machine.

    Raises:
        UsageError: Something has it that is no part of this job.
    """
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    place: Place | None = None
    try:
        place = _take_directory(plan)
        place.signals = {*signals}
        _take_port(place)
        _take_store_port(place)
        _take_logs(place)
    except BaseException:
        if place:
            for sock in (place.listening, getattr(place, "store", None)):
                if sock:
                    sock.close()
            place.release()
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        raise
    return place


def node_name(job: JobSpec) -> str:
    """Return the name of this node among others on its machine; empty if it is the first."""
    if job.node_name or job.is_alone:
        return job.node_name
    if job.node_rank is None:
        return f"beside{job.beside}" if job.beside else ""
    return f"node{job.node_rank}"


def journal_name(plan: LaunchPlan) -> str:
    """Return the name of our own log, which several nodes may write to one directory."""
    if plan.job.is_alone:
        return "msrun.log"
    return f"msrun_{'_'.join(filter(None, (plan.machine.host, node_name(plan.job))))}.log"


def _take_directory(plan: LaunchPlan) -> Place:
    job = plan.job
    may_be_further = not (job.is_alone or job.node_name or job.node_rank is not None)
    for number in range(_BESIDE_MAX):
        job = msgspec.structs.replace(job, beside=number)
        try:
            directory, lock = run_dir.create(run_dir.name(job.job_id, node_name(job)))
        except run_dir.JobRunsError:
            if not may_be_further:
                raise
            continue
        own = msgspec.structs.replace(plan, job=job)
        notes = [run_dir.why_elsewhere(directory)]
        return Place(plan=own, directory=directory, lock=lock, notes=list(filter(None, notes)))
    msg = f"{job.job_id} has {_BESIDE_MAX} nodes on this machine already"
    raise UsageError(msg, hint="choose another --job-id")


def _take_port(place: Place) -> None:
    job = place.plan.job
    if not job.serves:
        return
    try:
        place.listening = listen_or_refuse(job.listen_host, job.scheduler_port, "--master-port")
    except UsageError:
        if not control_file.has_node(job, but=place.directory):
            raise
        job = msgspec.structs.replace(job, serves=False)
        place.plan = msgspec.structs.replace(place.plan, job=job)


def _take_store_port(place: Place) -> None:
    """Take the port at which a script may expect the store, whatever its node.

    Another node of the job on this machine may have it: its store's end serves this node's workers
    just as well.  Where another program has it, the workers' MASTER_PORT is a free one, unless the
    scheduler is here: then the port is refused, as if it were the scheduler's.
    """
    job = place.plan.job
    is_shared = False
    problem = ""
    try:
        place.store = listen_or_refuse(LOOPBACK, job.store_port, _STORE)
    except UsageError as error:
        is_shared = control_file.is_beside(job, place.directory)
        if job.is_alone or not job.store_port or (job.serves and not is_shared):
            raise
        place.store = listen_or_refuse(LOOPBACK, 0, _STORE)
        problem = error.message
    if problem and not is_shared:
        port = place.store.getsockname()[1]
        place.notes.append(f"{problem}; the workers of this node have MASTER_PORT={port}")


def _take_logs(place: Place) -> None:
    plan = place.plan
    before = plan.job.log_dir
    place.journal, log_dir = open_journal(plan.job, journal_name(plan))
    if warning := whose(before):
        place.notes.append(warning)
    if log_dir == before:
        return
    job = msgspec.structs.replace(plan.job, log_dir=log_dir)
    workers = tuple(worker.in_directory(log_dir) for worker in plan.workers)
    place.plan = msgspec.structs.replace(plan, job=job, workers=workers)
    place.notes.append(f"msrun: logs are in {log_dir}: another job writes to {before}")
