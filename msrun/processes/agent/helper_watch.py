"""Watches the processes of ours around an agent, which nobody else notices when they are frozen.

The end of each is noticed at once, by a channel or a pidfd.  One that somebody has stopped, or that
does not answer for another reason, ends nothing by itself: workers would end unseen, failures
remain without an answer, and processes would be left at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from msrun.cluster.agent.events import (
    Action,
    ForwardSignal,
    SignalServers,
    StartServer,
    StartWorkers,
    SweepGeneration,
)
from msrun.cluster.liveness import heartbeat
from msrun.cluster.liveness.heartbeat import Finding, HelperLife, Wakefulness
from msrun.processes.agent.node_resources import NodeResources
from msrun.processes.console import Console
from msrun.supervise import orders, process, title
from msrun.transport.loop import Loop

REAPER = "reaper"
FORKSERVER = "forkserver"
SCHEDULER = "scheduler"
STORE = "store"
# Of a job of a Python program: it stops the job when the program has ended.
KEEPER = "keeper"
# What reaper and forkserver carry out.
_ORDERS = (StartWorkers, ForwardSignal, SweepGeneration, StartServer, SignalServers)


class HelperWatch:
    """The watch over reaper, forkserver, store, scheduler and keeper of one node.

    Args:
        node: This node's resources.
        loop: This process's loop.
        console: Takes messages to the user.
        ask_scheduler: Asks the scheduler for a sign of life.
        workers: Returns the pids of the workers and servers, which are not ours.
    """

    def __init__(
        self,
        node: NodeResources,
        loop: Loop,
        console: Console,
        ask_scheduler: Callable[[], None],
        workers: Callable[[], set[int]],
    ) -> None:
        self._node = node
        self._loop = loop
        self._console = console
        self._ask_scheduler = ask_scheduler
        self._workers = workers
        self._lives: dict[tuple[str, int], HelperLife] = {}
        self._forkserver = 0
        self._awake = Wakefulness()
        self._look_at: float | None = None
        self._ask_at = 0.0
        self.given_up: dict[str, str] = {}
        """Name of each process that was killed because it was silent, and the words for that."""

    def start(self) -> None:
        """Begin to watch; each process can be asked from its first report on."""
        self._look_at = self._loop.now() + heartbeat.LOOK_SECONDS

    def forkserver_started(self, pid: int) -> None:
        """Take the pid of the forkserver, which answers only when its imports are done."""
        self._forkserver = pid

    def heard(self, name: str) -> None:
        """Take a sign of life of the forkserver, the reaper or the scheduler."""
        for pid in self._pids(name):
            self._life(name, pid).hear(now=self._loop.now())

    def wake_for(self, actions: Iterable[Action]) -> None:
        """Let reaper and forkserver go on, should somebody have stopped them, if they get orders.

        The reaper is our child, and has not reaped a forkserver of which it has not told.
        """
        if not any(isinstance(action, _ORDERS) for action in actions):
            return
        self._node.tree.wake()
        if self._forkserver:
            process.kill(self._forkserver, heartbeat.WAKE_SIGNAL)

    def forkserver_ended(self) -> None:
        """Forget the forkserver, whose pid may soon be another process's."""
        self._forkserver = 0

    def deadline(self) -> float | None:
        """Time by which `tick` must be called; None when there is none."""
        return self._look_at

    def tick(self) -> None:
        """Look at all processes of ours, and ask them whether they live."""
        now = self._loop.now()
        if self._look_at is None or now < self._look_at:
            return
        self._look_at = now + heartbeat.LOOK_SECONDS
        awake_since = self._awake.look(now=now)
        names = (REAPER, FORKSERVER, SCHEDULER, STORE, KEEPER)
        living = [(name, pid) for name in names for pid in self._pids(name)]
        self._lives = {key: self._life(*key) for key in living}
        for (name, pid), life in self._lives.items():
            found = life.look(process.state(pid), now=now, awake_since=awake_since)
            self._act(found, name, pid, life.silence(now=now))
        if now >= self._ask_at:
            self._ask_at = now + heartbeat.ASK_SECONDS
            self._ask()

    def _ask(self) -> None:
        tree = self._node.tree
        for name, channel in ((REAPER, tree.reaper), (FORKSERVER, tree.forkserver)):
            if self._can_answer(name):
                channel.send(orders.Ping())
        if self._can_answer(SCHEDULER):
            self._ask_scheduler()

    def _can_answer(self, name: str) -> bool:
        return any(self._life(name, pid).heard_at is not None for pid in self._pids(name))

    def _pids(self, name: str) -> list[int]:
        if name == REAPER:
            return [self._node.tree.pid]
        if name == SCHEDULER:
            return sorted(self._node.scheduler.pids) if self._node.scheduler else []
        if name == KEEPER:
            parent = os.getppid()
            return [parent] if process.name(parent) == title.KEEPER else []
        if not self._forkserver:
            return []
        if name == FORKSERVER:
            return [self._forkserver]
        workers = self._workers()
        return [pid for pid in process.children(self._forkserver) if pid not in workers]

    def _life(self, name: str, pid: int) -> HelperLife:
        return self._lives.setdefault((name, pid), HelperLife())

    def _act(self, found: Finding | None, name: str, pid: int, silence: float) -> None:
        if found is Finding.WAKE:
            self._console.say(
                f"warning: the {name} (pid {pid}) was stopped by a signal; it is continued"
            )
            process.kill(pid, heartbeat.WAKE_SIGNAL)
        elif found is Finding.GIVE_UP:
            self._give_up(name, pid, f"has not answered for {silence:.0f}s and is killed")

    def _give_up(self, name: str, pid: int, words: str) -> None:
        self._console.say(f"warning: the {name} (pid {pid}) {words}")
        self.given_up[name] = f"the {name} (pid {pid}) {words}"
        if name == REAPER:
            self._node.tree.kill_silent()
        elif name == SCHEDULER and self._node.scheduler:
            self._node.scheduler.kill()
        else:
            process.kill(pid)
