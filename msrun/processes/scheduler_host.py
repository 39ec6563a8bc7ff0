"""Hosts the scheduler of a cluster that is started by hand, in a process without workers.

It holds the socket on which the scheduler listens, starts it again when it dies, continues it when
somebody has stopped it, and passes on to it the signals with which its user stops the job.
"""

from __future__ import annotations

import os
import shutil
import signal

import msgspec

from msrun import environ
from msrun.cluster.liveness import heartbeat
from msrun.cluster.liveness.heartbeat import Finding, HelperLife, Wakefulness
from msrun.cluster.verdict import Verdict
from msrun.errors import ExitCode
from msrun.job import JobSpec
from msrun.processes import control_file, ending, first_process, run_dir
from msrun.processes.console import Console
from msrun.processes.launcher import STOPS, open_journal, whose
from msrun.processes.rendezvous import formation, job_secret, listen_or_refuse
from msrun.processes.scheduler.supervisor import SchedulerSupervisor, scheduler_config
from msrun.supervise import logs, process
from msrun.topology import Machine
from msrun.transport.loop import Loop

_SCHEDULER_SECONDS = 2.0


def serve(job: JobSpec, machine: Machine) -> int:
    """Host the scheduler of `job` until the job is over; return its exit code.

    Raises:
        MsrunError: It could not be started.
    """
    process.open_standard_streams()
    logs.make_log_dir(job.log_dir)
    loop = Loop()
    try:
        return SchedulerHost(job, machine, loop).run().code
    finally:
        loop.close()


class SchedulerHost:
    """Hosts the scheduler of a job.

    Args:
        job: The job; its scheduler belongs on this machine.
        machine: This machine.
        loop: This process's loop.
    """

    _verdict: Verdict

    def __init__(self, job: JobSpec, machine: Machine, loop: Loop) -> None:
        self._loop = loop
        self._began_at = loop.now()
        loop.on_signals(STOPS, self._on_signal)
        first_process.reap_orphans(loop, lambda: self._scheduler.pids)
        journal, log_dir = open_journal(job, f"msrun_{machine.host}.log")
        job = self._job = msgspec.structs.replace(job, log_dir=log_dir)
        self._console = Console(journal, ())
        self._secret = job_secret(job)
        listening = listen_or_refuse(job.listen_host, job.master_port, "--master-port")
        self._dir, self._lock = run_dir.create(run_dir.name(job.job_id, ""))
        for note in filter(None, (run_dir.why_elsewhere(self._dir), whose(log_dir))):
            self._console.say(note)
        self._config = scheduler_config(job, formation(job), self._secret, self._dir, alone=True)
        self._scheduler = SchedulerSupervisor(self._config, listening, environ.current())
        self._lives: dict[int, HelperLife] = {}
        self._awake = Wakefulness()
        self._look_at = self._began_at

    def run(self) -> Verdict:
        """Host it until its verdict, and report that."""
        job = self._job
        try:
            self._scheduler.start()
            self._scheduler.watch(self._loop, self._console.say, self._on_over)
            card = control_file.card_of(
                job, job.master_port, self._secret, workers=0, began=self._began_at
            )
            control_file.write(self._dir, card)
            self._console.say(
                f"msrun: {job.job_id}: scheduler of {job.world_size} worker(s) at "
                f"{job.listen_host}:{job.master_port}; log: {self._config.log_file}"
            )
            self._loop.run(lambda: self._look_at, self._look)
        finally:
            self._scheduler.end(_SCHEDULER_SECONDS)
            self._scheduler.close()
            shutil.rmtree(self._dir, ignore_errors=True)
            os.close(self._lock)
        took = self._loop.now() - self._began_at
        workers = job.world_size or 0
        ending.report(self._verdict, self._console, job.log_dir, workers=workers, took=took)
        return self._verdict

    def _look(self) -> None:
        """Let a scheduler go on that somebody has stopped; nodes that wait for it would not."""
        now = self._loop.now()
        if now < self._look_at:
            return
        self._look_at = now + heartbeat.LOOK_SECONDS
        awake_since = self._awake.look(now=now)
        self._lives = {pid: self._lives.get(pid, HelperLife()) for pid in self._scheduler.pids}
        for pid, life in self._lives.items():
            found = life.look(process.state(pid), now=now, awake_since=awake_since)
            if found is Finding.WAKE:
                self._console.say(
                    f"warning: the scheduler (pid {pid}) was stopped by a signal; it is continued"
                )
                process.kill(pid, heartbeat.WAKE_SIGNAL)

    def _on_signal(self, signum: int) -> None:
        self._console.say(f"msrun: {signal.Signals(signum).name}: stopping the job")
        self._scheduler.pass_on(signum)

    def _on_over(self, how: str, verdict: Verdict | None) -> None:
        self._verdict = verdict or Verdict(
            job_id=self._job.job_id, code=ExitCode.INTERNAL, reason=how, generation=0, restarts=0
        )
        self._loop.stop()
