"""What keeps the scheduler of a cluster that is started by hand: a process without workers.

It holds the socket on which the scheduler listens, starts it again when it dies, and
passes on to it the signals with which its user stops the job.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import msgspec

from msrun import environ
from msrun.cluster.scheduler.crash_loop_guard import CrashLoopGuard
from msrun.cluster.verdict import Verdict
from msrun.errors import ExitCode
from msrun.job import JobSpec
from msrun.processes import control_file, ending, first_process, run_dir
from msrun.processes.agent.agent import STOPS, open_journal
from msrun.processes.agent.node_resources import formation, job_secret, listen_or_refuse
from msrun.processes.console import Console
from msrun.processes.control_file import Card
from msrun.processes.scheduler.config import SchedulerConfig
from msrun.processes.scheduler.handle import SchedulerProcess
from msrun.supervise import logs, process
from msrun.topology import Machine
from msrun.transport.loop import Loop
from msrun.transport.sockets import control_keys


def serve(job: JobSpec, machine: Machine) -> int:
    """Keep the scheduler of `job` until the job is over; return its exit code.

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
    """Keeps the scheduler of a job.

    Args:
        job: The job, whose scheduler belongs here.
        machine: This machine.
        loop: This process's loop.
    """

    _scheduler: SchedulerProcess
    _verdict: Verdict

    def __init__(self, job: JobSpec, machine: Machine, loop: Loop) -> None:
        self._job = job
        self._loop = loop
        self._began_at = loop.now()
        self._lives = CrashLoopGuard()
        self._signum = 0
        loop.on_signals(STOPS, self._on_signal)
        first_process.reap_orphans(loop, lambda: {self._scheduler.pid})
        journal = open_journal(job.log_dir, f"msrun_{machine.host}.log")
        self._console = Console(journal, ())
        secret = job_secret(job)
        self._listening = listen_or_refuse(job.listen_host, job.master_port, "--master-port")
        self._dir, self._lock = run_dir.create(run_dir.name(job.job_id, ""))
        self._config = SchedulerConfig(
            job_id=job.job_id,
            formation=formation(job),
            join_timeout=job.join_timeout,
            last_call=job.last_call,
            restarts=job.restarts,
            secret=secret,
            wal_file=str(self._dir / run_dir.WAL),
            log_file=str(Path(job.log_dir, "scheduler.log")),
            parent=os.getpid(),
            alone=True,
        )

    def run(self) -> Verdict:
        """Keep it until its verdict, and report that."""
        job = self._job
        try:
            self._start()
            control_file.write(self._dir, self._card())
            self._console.say(
                f"msrun: {job.job_id}: scheduler of {job.world_size} worker(s) at "
                f"{job.listen_host}:{job.master_port}; log: {self._config.log_file}"
            )
            self._loop.run(lambda: None, lambda: None)
        finally:
            self._listening.close()
            shutil.rmtree(self._dir, ignore_errors=True)
            os.close(self._lock)
        took = self._loop.now() - self._began_at
        workers = job.world_size or 0
        ending.report(self._verdict, self._console, job.log_dir, workers=workers, took=took)
        return self._verdict

    def _card(self) -> Card:
        """Return what it takes to control the job from this machine."""
        secret = self._config.secret
        return Card(
            job_id=self._job.job_id,
            host=self._job.listen_host,
            port=self._job.master_port,
            keys=control_keys(secret) if secret else None,
            pid=os.getpid(),
            log_dir=self._job.log_dir,
            serves=True,
            began=self._began_at,
        )

    def _start(self) -> None:
        env = environ.current()
        self._scheduler = SchedulerProcess(self._config, self._listening, env)
        lives = self._config.lives + 1
        self._config = msgspec.structs.replace(self._config, lives=lives)
        self._lives.began(self._loop.now())
        self._loop.watch(self._scheduler.pidfd, self._on_end)

    def _on_signal(self, signum: int) -> None:
        self._console.say(f"msrun: {signal.Signals(signum).name}: stopping the job")
        self._signum = self._signum or signum
        self._scheduler.pass_on(signum)

    def _on_end(self) -> None:
        """Take the verdict of a scheduler that has left, or start one that died again."""
        self._loop.forget(self._scheduler.pidfd)
        how, verdict = self._scheduler.how_it_ended(), self._scheduler.verdict()
        has_died = self._scheduler.has_died  # perhaps before all nodes knew the verdict
        self._scheduler.close()
        term = max(self._config.term, self._scheduler.term)
        self._config = msgspec.structs.replace(self._config, term=term)
        may_begin = self._lives.may_begin_again(self._loop.now())
        if (verdict is None or has_died) and may_begin:
            self._console.say(f"warning: {how}; it is started again")
            self._start()
            if self._signum:
                self._scheduler.pass_on(self._signum)
            return
        self._verdict = verdict or Verdict(
            job_id=self._job.job_id, code=ExitCode.INTERNAL, reason=how, generation=0, restarts=0
        )
        self._loop.stop()
