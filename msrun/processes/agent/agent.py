"""The agent: the `msrun` process itself, brain of one node.

It wires sockets, processes, signals and the console to `AgentState`, which decides.
Every process that could outlive it is below the reaper, which it starts first and which ends
with it, however it dies.
"""

# tidy: long file, one place wires every event and every action of a node.

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from msrun.backend import LaunchPlan
from msrun.cluster.agent.events import (
    Action,
    Announce,
    Conclude,
    CountServers,
    Event,
    ForwardSignal,
    GenerationSwept,
    Join,
    SchedulerLost,
    SchedulerMessage,
    SendToScheduler,
    ServerEnded,
    Signalled,
    SignalServers,
    StartServer,
    StartWorkers,
    SweepGeneration,
    Tell,
    TreeLost,
    TreeReady,
    WorkerEnded,
)
from msrun.cluster.agent.state import FORWARDED, AgentPhase, AgentState
from msrun.cluster.agent.uplink import Uplink, UplinkEvent
from msrun.cluster.tick import Tick
from msrun.cluster.verdict import Verdict, render_seconds
from msrun.cluster.wire.link import first_resend
from msrun.cluster.wire.messages import Envelope, FromAgent, Restarting
from msrun.errors import ExitCode, MsrunError, VersionError
from msrun.processes import ending, first_process
from msrun.processes.agent import (
    background,
    mindspore,
    place,
    sentences,
    terminal,
    worker_end,
)
from msrun.processes.agent.event_log import EventLog
from msrun.processes.agent.helper_watch import FORKSERVER, REAPER, SCHEDULER, HelperWatch
from msrun.processes.agent.line_filter import LineFilters
from msrun.processes.agent.log_limit import LogLimit
from msrun.processes.agent.node_control import NodeControl
from msrun.processes.agent.node_resources import NodeResources
from msrun.processes.agent.output import NodeOutput
from msrun.processes.agent.place import Place
from msrun.processes.agent.scheduler_watch import SchedulerWatch
from msrun.processes.agent.timers import TimerServer
from msrun.processes.agent.worker_end import OomCounter, RunningWorker
from msrun.processes.console import Console, open_console
from msrun.processes.launcher import STOPS
from msrun.supervise import logs, orders, process
from msrun.supervise.channel import ChannelClosed
from msrun.supervise.machine import memory_cgroup_files
from msrun.transport.loop import Loop

if TYPE_CHECKING:
    from msrun.processes.agent.parameter_servers import ParameterServers

REFRESH_SECONDS = 0.05
# Seconds for the rest of the logs: after a stop its user does not want to read all of them.
CONSOLE_SECONDS_STOPPED = 1.0
CONSOLE_SECONDS = 30.0


def run(plan: LaunchPlan) -> int:
    """Run the job of `plan` on this node to its end and return its exit code.

    Raises:
        MsrunError: It could not be started; nothing is left of it.
    """
    process.open_standard_streams()
    logs.make_log_dir(plan.job.log_dir)
    own = place.take(plan)
    body = partial(_run, own)
    if not plan.job.detach:
        return body(lambda: None)
    return background.run(
        body, name=plan.job.job_id, log_file=own.journal_file, has_forked=own.hear_signals
    )


# What is not for the scheduler or the user.
_ORDERS = (ForwardSignal, SweepGeneration, StartServer, SignalServers, CountServers)


def _run(own: Place, when_running: Callable[[], None]) -> int:
    loop = Loop()
    try:
        return Agent(own, loop, when_running).run().code
    finally:
        own.release()
        loop.close()


class Agent:
    """One node of a job.

    Args:
        own: What is this launcher's own, with the plan of the job.
        loop: This process's loop.
        when_running: Called when all workers run for the first time.
    """

    _verdict: Verdict | None = None

    def __init__(self, own: Place, loop: Loop, when_running: Callable[[], None]) -> None:
        plan = self._plan = own.plan
        self._job = plan.job
        self._loop = loop
        self._when_running: Callable[[], None] | None = when_running
        self._began_at = loop.now()
        self._workers: dict[int, RunningWorker] = {}
        self._running = 0
        self._known = ""
        self._has_imported = False
        self._oom = OomCounter(memory_cgroup_files())
        self._stops = (*STOPS, *(signal.Signals[name] for name in plan.job.stop_signals))
        loop.on_signals(dict.fromkeys((*self._stops, *FORWARDED)), self._on_signal)
        own.hear_signals()
        # What is below the reaper comes to this process if the reaper is killed.
        process.become_subreaper()
        first_process.reap_orphans(loop, lambda: self._node.pids, is_subreaper=True)
        journal = own.journal
        # Of several nodes, none knows its ranks yet.
        self._limit = LogLimit(plan.job.log_limit)
        self._output = NodeOutput(plan.job, loop, self._limit.gap)
        tails = self._output.tails((w, {}) for w in plan.workers) if plan.job.is_alone else []
        self._console: Console = open_console(journal, tails, plan.machine.host)
        self._output.show_with(self._console.pump)
        loop.on_signals((signal.SIGWINCH,), lambda _: self._on_resized())
        if terminal.is_foreground():
            loop.on_signals((signal.SIGTSTP,), lambda _: self._on_suspended())
        node = place.journal_name(plan).removesuffix(".log").removeprefix("msrun").strip("_")
        self._filters = LineFilters(plan.job, node, self._limit.gap)
        self._timers: TimerServer | None = None
        self._events = EventLog(plan.job, plan.machine.host, self._console.say)
        is_watching = tails or self._console.is_live or plan.job.filters
        self._refresh_at = self._began_at if is_watching else None
        # In the background nothing may hold on to the terminal.
        for note in own.notes:
            self._console.say(note)
        self._node = NodeResources(own, stderr=journal if self._job.detach else None)
        self._open_watches()
        servers = self._servers = self._open_servers()
        self._stuck: list[str] = []
        self._uplink = Uplink(
            job_id=self._job.job_id,
            node_id=self._node.node_id,
            incarnation=secrets.randbits(63),
            lease=self._node.lease,
            first_resend=first_resend(self._job.nnodes_max, self._node.lease),
        )
        self._state = AgentState(
            job_id=self._job.job_id,
            register=self._node.register(),
            grace=self._job.grace,
            forwarded=tuple(signum for signum in FORWARDED if signum not in self._stops),
            form_by=self._began_at + self._job.join_timeout,
            join_timeout=self._job.join_timeout,
            lease=self._node.lease,
            scheduler=self._node.scheduler_name,
            servers=servers.machine if servers else None,
        )

    def _open_watches(self) -> None:
        self._scheduler = SchedulerWatch(
            self._node, self._loop, self._console, tell=self._handle, greet=self._greet
        )
        send, gap_of = self._tell_scheduler, self._limit.gap
        self._control = NodeControl(
            self._job, self._node, self._loop, self._console, send=send, gap_of=gap_of
        )
        self._helpers = HelperWatch(
            self._node,
            self._loop,
            self._console,
            ask_scheduler=self._greet,
            workers=lambda: {
                *(worker.pid for worker in self._workers.values() if worker.pid),
                *self._server_pids(),
            },
        )

    def _open_servers(self) -> ParameterServers | None:
        if not self._job.servers:
            return None
        from msrun.processes.agent.parameter_servers import ParameterServers  # Few jobs have any.

        return ParameterServers(self._job, self._node, self._plan.machine.host, self._oom)

    def _server_pids(self) -> set[int]:
        return self._servers.pids if self._servers else set()

    def run(self) -> Verdict:
        """Take part in the job until its verdict, then end everything and report."""
        try:
            return self._run()
        except Exception as caught:  # noqa: BLE001 - it is raised again, in words
            error = ending.in_words(caught)
            # A refusal of the start is said, and nothing has run that a verdict could be of.
            if not isinstance(error, MsrunError) or self._workers:
                self._record(error)
            raise error from error.__cause__

    def _record(self, error: Exception) -> None:
        """Leave a verdict with the cause known so far; by now our files are closed."""
        root = self._state.root()
        known = root.sentence() if root else self._known
        if self._verdict:
            known = self._verdict.reason or "all ranks exited with code 0"
        job, generation = self._job, self._state.generation
        ending.record(error, known, job.job_id, job.log_dir, generation=generation, root=root)

    def _run(self) -> Verdict:
        stuck: list[str] = []
        with terminal.modes_kept(), self._console:
            try:
                self._start()
                self._loop.run(self._deadline, self._tick)
            finally:
                stuck = [*self._stuck, *self._node.close()]
                if self._timers:
                    self._timers.close()
                self._output.copy()
                self._filters.copy(final=True)
            decided = self._decided()
            stopped = decided.code > ExitCode.DO_NOT_REQUEUE and decided.root is None
            seconds = CONSOLE_SECONDS_STOPPED if stopped else CONSOLE_SECONDS
            self._console.finish(self._loop.now, total=seconds)
            self._limit.close_up()
        verdict = msgspec.structs.replace(
            decided,
            stuck=list(dict.fromkeys([*decided.stuck, *stuck])),
            insecure=self._job.insecure,
        )
        took = self._loop.now() - self._began_at
        self._events.over(self._workers.values(), verdict, took=took, is_stopped=stopped)
        workers = self._job.workers_per_node
        ending.report(verdict, self._console, self._job.log_dir, workers=workers, took=took)
        return verdict

    def _decided(self) -> Verdict:
        if self._verdict is None:
            raise RuntimeError("the loop ended without a verdict")
        return self._verdict

    def _start(self) -> None:
        self._limit.check(self._job.log_dir)
        self._filters.open()
        self._limit.follow("the copy of lines", self._filters.paths, now=self._began_at)
        if self._node.timer_file:
            self._timers = TimerServer(self._node.timer_file, self._loop, self._on_expired)
        self._node.open()
        job = self._job
        host, containment = self._plan.machine.host, self._node.containment
        self._console.say(sentences.begun(job, host, containment))
        self._loop.watch(self._node.tree.reaper.fileno(), self._on_reaper)
        self._loop.watch(self._node.tree.forkserver.fileno(), self._on_forkserver)
        self._loop.watch(self._node.socket.socket, self._on_scheduler)
        self._scheduler.start()
        self._helpers.start()
        process.raise_priority(before_all=True)
        self._perform(self._state.begin())

    # Events.

    def _deadline(self) -> float | None:
        dues = (
            self._state.deadline(),
            self._uplink.deadline(),
            self._scheduler.deadline(),
            self._control.deadline(),
            self._timers.deadline() if self._timers else None,
            self._helpers.deadline(),
            self._limit.deadline(),
            self._refresh_at,
        )
        return min((due for due in dues if due is not None), default=None)

    def _tick(self) -> None:
        if self._refresh_at is not None and self._refresh_at <= self._loop.now():
            self._refresh_at = self._loop.now() + REFRESH_SECONDS
            self._filters.copy()
            self._console.pump()
            elapsed, workers = self._loop.now() - self._began_at, self._job.workers_per_node
            status = sentences.status(
                self._state, workers=workers, running=self._running, elapsed=elapsed
            )
            self._console.show(status)
        self._scheduler.tick()
        self._control.tick()
        if self._timers:
            self._timers.tick()
        self._helpers.tick()
        for warning in self._limit.tick(now=self._loop.now()):
            self._console.say(warning)
        self._keep_time()
        self._handle(Tick())

    def _keep_time(self) -> None:
        """Check the lease before any event that happened after its end.

        After a freeze the agent finds workers dead that did not fail: the reaper killed them.
        """
        self._after_uplink(*self._uplink.tick(now=self._loop.now()))

    def _on_signal(self, signum: int) -> None:
        if signum in self._stops:
            self._console.say(f"msrun: {signal.Signals(signum).name}: stopping the workers")
        self._handle(Signalled(signum))

    def _on_expired(self, pid: int, name: str, signum: int) -> None:
        self._console.say(sentences.expired(self._workers.values(), pid, name, signum))

    def _on_resized(self) -> None:
        if self._output.terminal:
            self._output.terminal.follow_size()
            # The kernel tells only the process group that a terminal controls.
            self._node.signal_groups([self._output.rank_at_terminal], signal.SIGWINCH)

    def _on_suspended(self) -> None:
        self._console.pause()
        ranks = list(self._workers)
        terminal.stop_with(lambda signum: self._node.signal_groups(ranks, signum))

    def _on_scheduler(self) -> None:
        self._keep_time()
        try:
            envelopes = self._node.socket.receive()
        except VersionError as error:
            reason = f"{self._node.scheduler_name}: {error.message}: {error.hint}"
            self._handle(SchedulerLost(reason, code=error.exit_code))
            return
        if envelopes:
            self._helpers.heard(SCHEDULER)
        for envelope in envelopes:
            until = self._uplink.live_until
            self._after_uplink(*self._uplink.receive(envelope, now=self._loop.now()))
            is_idle = self._state.phase is AgentPhase.JOINING and not self._server_pids()
            if self._uplink.live_until != until and not is_idle:
                self._node.let_live(self._state.generation, self._uplink.live_until)

    def _greet(self) -> None:
        self._send(self._uplink.ask(now=self._loop.now()))

    def _after_uplink(self, events: list[UplinkEvent], frames: list[Envelope]) -> None:
        self._send(frames)
        for event in events:
            if isinstance(event, SchedulerMessage) and self._control.is_for(event.body):
                self._control.serve(event.generation, event.body)
            else:
                self._handle(event)

    def _on_reaper(self) -> None:
        self._keep_time()
        tree = self._node.tree
        try:
            reports = tree.reaper.receive()
        except ChannelClosed:
            self._loop.forget(tree.reaper.fileno())
            self._helpers.forkserver_ended()
            self._stuck += self._node.kill_by_force()
            how = self._helpers.given_up.get(REAPER, f"the reaper (pid {tree.pid}) ended")
            self._handle(TreeLost(how, ExitCode.NODE_LOST))
            return
        self._helpers.heard(REAPER)
        for report in reports:
            match report:
                case orders.Swept(generation=generation, stuck=stuck):
                    self._handle(GenerationSwept(generation, tuple(stuck)))
                case orders.ForkserverStarted(pid=pid):
                    self._helpers.forkserver_started(pid)
                case orders.ForkserverExited(status=status):
                    self._helpers.forkserver_ended()
                    when = "" if self._has_imported else " during its imports"
                    how = f"the forkserver {process.render_status(status)}{when}"
                    how = self._helpers.given_up.get(FORKSERVER, how)
                    self._handle(TreeLost(how, ExitCode.NODE_LOST))

    def _on_forkserver(self) -> None:
        self._keep_time()
        forkserver = self._node.tree.forkserver
        try:
            reports = forkserver.receive()
        except ChannelClosed:
            # Its parent, the reaper, reports how it ended.
            self._loop.forget(forkserver.fileno())
            return
        self._helpers.heard(FORKSERVER)
        for report in reports:
            match report:
                case orders.Ready():
                    self._on_ready(report)
                case orders.Spawned():
                    self._on_spawned(report)
                case orders.Exited(is_mindspore=True):
                    self._on_mindspore_end(report)
                case orders.Exited(rank=None):
                    self._on_store_end(report)
                case orders.Exited():
                    self._on_worker_end(report)
                case orders.ServerSpawned() | orders.ServerExited():
                    self._on_server(report)

    def _on_ready(self, ready: orders.Ready) -> None:
        self._has_imported = True
        self._node.mindspore.is_known = ready.mindspore
        if ready.reason:
            self._console.say(
                f"warning: {ready.reason}, so every worker is an interpreter of its own"
            )
        self._handle(TreeReady(ready.error))

    def _on_spawned(self, spawned: orders.Spawned) -> None:
        if spawned.generation != self._state.generation:
            return
        worker = self._workers[spawned.rank]
        worker.started_at, worker.pid = spawned.at, spawned.pid
        self._events.started(worker, spawned.generation)
        self._running += 1
        if self._running < self._job.workers_per_node:
            return
        self._control.running()
        after = render_seconds(self._loop.now() - self._began_at)
        self._console.say(f"msrun: running {self._running}/{self._running} after {after}")
        if self._when_running:
            self._when_running()
            self._when_running = None

    def _on_store_end(self, end: orders.Exited) -> None:
        if end.generation == self._state.generation and self._state.phase is AgentPhase.RUNNING:
            how = end.reason or process.render_status(end.status)
            self._handle(TreeLost(f"the store of the process group {how}", ExitCode.NODE_LOST))

    def _on_mindspore_end(self, end: orders.Exited) -> None:
        is_needed = self._state.phase is AgentPhase.RUNNING
        lost = mindspore.loss(end, self._job.log_dir)
        if lost and is_needed and end.generation == self._state.generation:
            self._handle(lost)

    def _on_server(self, report: orders.ServerSpawned | orders.ServerExited) -> None:
        if self._servers is None:
            return
        event = self._servers.take(report, now=self._loop.now())
        if isinstance(event, ServerEnded) and self._state.phase is not AgentPhase.LEAVING:
            is_leaving = self._servers.machine.is_leaving(event.exit.rank)
            self._console.say(sentences.server_ended(event.exit, is_leaving=is_leaving))
        self._handle(event)

    def _on_worker_end(self, end: orders.Exited) -> None:
        if end.generation != self._state.generation or end.rank is None:
            return
        worker = self._workers[end.rank]
        worker.pid = 0
        self._output.copy()
        self._running -= worker.started_at is not None
        rank_exit = worker_end.describe(end, worker, self._oom, now=self._loop.now())
        self._events.ended(rank_exit)
        self._handle(WorkerEnded(end.generation, rank_exit))

    # Actions.

    def _handle(self, event: Event) -> None:
        self._perform(self._state.handle(event, now=self._loop.now()))

    def _perform(self, actions: list[Action]) -> None:
        self._helpers.wake_for(actions)
        for action in actions:
            if isinstance(action, _ORDERS):
                self._order(action)
                continue
            match action:
                case Join(register=register):
                    now, generation = self._loop.now(), self._state.generation
                    self._send(self._uplink.join(generation, register, now=now))
                    self._control.rejoined()
                case SendToScheduler(generation=generation, body=body):
                    self._send(self._uplink.send(generation, body, now=self._loop.now()))
                case StartWorkers():
                    self._start_workers(action)
                case Announce(restarting=restarting):
                    self._announce(restarting)
                case Tell(sentence=sentence, warn=warn):
                    self._console.say(f"{'warning' if warn else 'msrun'}: {sentence}")
                case Conclude(verdict=verdict):
                    self._verdict = verdict
                    self._loop.stop()

    def _order(
        self, action: ForwardSignal | SweepGeneration | StartServer | SignalServers | CountServers
    ) -> None:
        match action:
            case ForwardSignal(ranks=ranks, signum=signum):
                self._node.signal_workers(ranks, signum)
            case SweepGeneration(generation=generation, spare=spare):
                self._node.tree.reaper.send(orders.Sweep(generation=generation, spare=list(spare)))
            case _ if self._servers:
                self._servers.perform(action, self._uplink.live_until)

    def _tell_scheduler(self, body: FromAgent) -> None:
        generation, now = self._state.generation, self._loop.now()
        self._send(self._uplink.send(generation, body, now=now))

    def _send(self, frames: list[Envelope]) -> None:
        for frame in frames:
            self._node.socket.send(frame)

    def _start_workers(self, action: StartWorkers) -> None:
        process.raise_priority(before_all=True)
        self._running = 0
        self._workers = {
            worker.plan.rank: worker
            for worker in self._node.start_workers(
                action.generation, action.start, self._uplink.live_until, self._output
            )
        }
        self._filters.follow((w.plan, action.generation) for w in self._workers.values())
        for rank, worker in self._workers.items():
            self._limit.follow(f"rank {rank}", worker.plan.logs, now=self._loop.now())
        self._control.started(action.generation, self._workers.values())
        if not self._job.is_alone:
            workers = self._workers.values()
            self._console.follow(self._output.tails((w.plan, w.log_starts) for w in workers))
            if self._refresh_at is None:
                self._refresh_at = self._loop.now()

    def _announce(self, restarting: Restarting) -> None:
        self._known = restarting.reason
        self._console.say(sentences.restarting(restarting))
