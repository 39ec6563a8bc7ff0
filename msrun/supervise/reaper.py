"""The reaper: parent of all processes of a job on one node, which it ends when the agent is gone.

The promise is that nothing is ever left running, even after `kill -9` of the agent.  No process
can keep that promise for itself, so it is this one's only duty.  It does almost nothing, so
that it can always do it at once: no torch, no zmq, no user code, one thread.

- *How it learns of the agent's end*: the agent's end of the channel closes, whatever the agent dies
  of.  A frozen agent closes nothing, so the agent also says until when the workers may live
  (`LiveUntil`), and the reaper kills them at that time.
- *How it finds everything*: it is the child subreaper of the node's tree, so processes that a
  worker leaves behind, double forks and own sessions included, become its children.  Where there is
  a cgroup it also has their list, and one write kills them all.
- *How it knows that it is done*: it kills in a loop, because processes fork while they are being
  killed, until the kernel says that there is no child left (`ECHILD`).  Only what the kernel
  itself cannot end within 5 s is given up, and reported as stuck.

The forkserver is spared by a sweep between generations: its imports are what makes a restart fast.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from msrun import environ
from msrun.supervise import containment, process, shared_memory, title
from msrun.supervise.channel import Channel, ChannelClosed
from msrun.supervise.orders import (
    Configure,
    ForkserverExited,
    ForkserverStarted,
    LiveUntil,
    Ping,
    Pong,
    ReaperOrder,
    Sweep,
    Swept,
)

SWEEP_TIMEOUT = 5.0
# Trackers of shared memory end by themselves a few milliseconds after the processes they serve,
# and unlink what these left.  On a machine without a free CPU the sweep waits this long for them,
# because shared memory that nobody unlinks stays for ever.
TRACKER_GRACE = 0.5
_PAUSE_MAX = 0.01
_TRACKERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
DEAF_TO = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)

# The work of a forked process, which it begins after it has left its parent's stack frames.
Next = Callable[[], object] | None
SignalHandler = Callable[..., object] | int | None


def ignore_signals() -> dict[signal.Signals, SignalHandler]:
    """Ignore the signals that people send to whole process groups.

    Returns:
        The handler of each signal before, which a worker must get back.
    """
    handlers = {signum: signal.signal(signum, signal.SIG_IGN) for signum in DEAF_TO}
    # Our parent held them back until now; those that came meanwhile are ignored, too.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DEAF_TO)
    return handlers


def wake_on_child() -> int:
    """Return a descriptor that becomes readable whenever a child changes state."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reading


def drain(descriptor: int) -> None:
    """Read what `wake_on_child` has written so far."""
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        return


@dataclass(slots=True)
class Reaper:
    """The one reaper of a node.

    Args:
        channel: To the agent; also the lifeline.
        configure: The agent's first order.
        forkserver: Pid of the forkserver; None when it is gone.
        wakeup: As of `wake_on_child`.
    """

    channel: Channel[ReaperOrder]
    configure: Configure
    forkserver: int | None
    wakeup: int
    _lease: LiveUntil | None = None
    _no_child_left: bool = field(default=False)
    _killed: set[int] = field(default_factory=set)
    # Processes that outlived a whole sweep: the next one does not wait for them again.
    _stuck: set[int] = field(default_factory=set)

    def serve(self) -> None:
        """Carry out orders until the agent is gone, then end everything."""
        poller = select.poll()
        poller.register(self.channel.fileno(), select.POLLIN)
        poller.register(self.wakeup, select.POLLIN)
        self._reap()
        try:
            while True:
                ready = [fd for fd, _ in poller.poll(self._timeout())]
                if self.wakeup in ready:
                    self._reap()
                if self.channel.fileno() in ready:
                    for order in self.channel.receive():
                        self._obey(order)
                if self._timeout() == 0:
                    self._fence()
        except ChannelClosed:
            self._end()

    def _reap(self) -> None:
        """Collect every child that has ended."""
        drain(self.wakeup)
        self._no_child_left = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._no_child_left = True
                return
            if pid == 0:
                return
            if os.WIFSIGNALED(status):
                # Such as a worker that the kernel killed with the forkserver before we saw it.
                self._killed.add(pid)
            if pid == self.forkserver:
                self.forkserver = None  # its pid may soon be another process's
                self.channel.send(ForkserverExited(status=status))

    def _timeout(self) -> int | None:
        """Return the milliseconds that the workers may still live; None without a limit."""
        if self._lease is None:
            return None
        return max(0, math.ceil((self._lease.at - time.monotonic()) * 1000))

    def _obey(self, order: ReaperOrder) -> None:
        match order:
            case LiveUntil():
                self._lease = order
            case Sweep(generation=generation, spare=servers):
                # Servers that live on are bound to the lease as workers are.
                self._lease = self._lease if servers else None
                stuck = self._kill_generation(generation, servers)
                self.channel.send(Swept(generation=generation, stuck=stuck))
            case Ping():
                self.channel.send(Pong())

    def _fence(self) -> None:
        """Kill workers and servers: the scheduler may take this node for lost by now."""
        if self._lease:
            self._kill_generation(self._lease.generation)
            self._lease = None

    def _kill_generation(self, generation: int, servers: Collection[int] = ()) -> list[str]:
        """Kill everything but the forkserver and `servers`; describe the processes that stay."""
        cgroups = []
        if cgroup := self.configure.cgroup:
            cgroups = [containment.generation_dir(cgroup, generation)]
            if not servers:
                cgroups.append(containment.servers_dir(cgroup))
        stuck = self._kill_until_gone(self.forkserver, cgroups, servers)
        for directory in cgroups[:1]:
            containment.remove(directory)
        return stuck

    def _end(self) -> None:
        """Kill the whole tree, remove the job's files on this node, report stuck processes."""
        if self.forkserver is not None:
            process.kill(self.forkserver)
        cgroup = self.configure.cgroup
        stuck = self._kill_until_gone(None, [cgroup] if cgroup else [])
        # The directory goes last: to the next launcher it tells of the cgroup, if we are killed.
        if cgroup and not containment.remove(cgroup):
            containment.note_remains(cgroup, self.configure.run_dir)
        shutil.rmtree(self.configure.run_dir, ignore_errors=True)
        self.channel.send(Swept(generation=-1, stuck=stuck))

    def _kill_until_gone(
        self, spare: int | None, cgroups: Sequence[str], servers: Collection[int] = ()
    ) -> list[str]:
        """SIGKILL all descendants but `spare` until none is left; describe those that stay.

        Children of `spare` among `servers` stay too, with all below them.

        It is a loop because processes fork while they are being killed; one that forks faster
        than the loop runs is killed with its cgroup, one of `cgroups`.  Trackers of shared memory
        get a moment to unlink what killed processes left.
        """
        started = time.monotonic()
        # At the end SIGCHLD wakes us when no child is left.  A sweep spares the forkserver, whose
        # children are no children of ours, so it has to look at /proc again and again.
        pause = _PAUSE_MAX if spare is None else 0.001
        while True:
            waited = time.monotonic() - started
            spared = self._spared(spare, servers)
            alive = self._kill_once(spared, cgroups, spare_trackers=waited < TRACKER_GRACE)
            self._stuck.intersection_update(alive)  # the kernel may reuse the pids of the others
            if not alive and (spare is not None or self._no_child_left):
                self._remove_shared_memory()
                return []
            if waited > SWEEP_TIMEOUT or (alive and self._stuck.issuperset(alive)):
                self._stuck.update(alive)
                self._remove_shared_memory()
                return [process.describe(pid) for pid in alive]
            self._wait(pause)
            pause = min(pause * 2, _PAUSE_MAX)

    def _remove_shared_memory(self) -> None:
        """Remove what the dead have left; their pids may be other processes' by now."""
        known = self._killed | shared_memory.noted(self.configure.run_dir)
        dead = {pid for pid in known if not process.is_alive(pid)}
        shared_memory.remove(dead)
        self._killed -= dead

    def _wait(self, seconds: float) -> None:
        """Reap what ends within `seconds`, or until no child is left.

        Looking again at each end would take the CPU from those that are still dying.
        """
        deadline = time.monotonic() + seconds
        while not self._no_child_left and (left := deadline - time.monotonic()) > 0:
            select.select([self.wakeup], [], [], left)
            self._reap()

    @staticmethod
    def _spared(spare: int | None, servers: Collection[int]) -> set[int]:
        if spare is None:
            return set()
        spared = {spare}
        # The pid of one that ended just now may be another process's, but no child of `spare`.
        for pid in set(process.children(spare)).intersection(servers) if servers else ():
            spared.update((pid, *process.descendants(pid)))
        return spared

    def _kill_once(
        self, spared: Collection[int], cgroups: Sequence[str], *, spare_trackers: bool
    ) -> list[int]:
        """Kill the processes that live now; return them, with the trackers that were spared."""
        self._reap()
        if not spared and self._no_child_left:
            return []
        for directory in cgroups:
            members = containment.members(directory)
            self._killed.update(members)
            if not (spare_trackers and any(map(_is_tracker, members))):
                containment.kill(directory)
        alive = []
        for pid in process.descendants(os.getpid()):
            if pid in spared:
                continue
            alive.append(pid)
            self._killed.add(pid)
            if not (spare_trackers and _is_tracker(pid)):
                process.kill(pid)
        return alive


def _is_tracker(pid: int) -> bool:
    return any(name in process.command_line(pid) for name in _TRACKERS)


def _first_order(channel: Channel[ReaperOrder]) -> Configure:
    """Wait for the first order, which may arrive in several pieces."""
    orders: list[ReaperOrder] = []
    try:
        while not orders:
            orders = channel.receive()
    except ChannelClosed:
        os._exit(1)
    if len(orders) != 1 or not isinstance(orders[0], Configure):
        os._exit(1)
    return orders[0]


ForkserverMain = Callable[
    [Configure, socket.socket, tuple[int, ...], dict[signal.Signals, SignalHandler]], Next
]


def run(arguments: list[str], forkserver_main: ForkserverMain) -> Next:
    """Be the reaper: fork the forkserver, serve, exit; only the forked child returns.

    Args:
        arguments: Descriptors of the channel, of the forkserver's channel, of the
            lock file, which is held until the end, and of the store's listening sockets.
        forkserver_main: What the forked child runs.
    """
    channel_fd, forkserver_fd, lock_fd, *listen_fds = map(int, arguments)
    inherited = ignore_signals()
    process.become_subreaper()
    channel: Channel[ReaperOrder] = Channel(socket.socket(fileno=channel_fd), ReaperOrder)
    forkserver_socket = socket.socket(fileno=forkserver_fd)
    configure = _first_order(channel)
    # From here on there may be something to clean up when the agent dies.
    process.outlive_parent()
    title.set_name("msrun reaper")
    reaper = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(lock_fd)
        process.die_with_parent(reaper)
        if configure.cgroup:
            containment.enter(configure.cgroup)
        channel.close()
        sockets = tuple(listen_fds)
        return partial(forkserver_main, configure, forkserver_socket, sockets, inherited)
    forkserver_socket.close()
    channel.send(ForkserverStarted(pid=pid))
    # The store's sockets stay open: as long as they take connections, peers know that processes of
    # this node may live.
    title.show_as(["msrun", "reaper", configure.job_id], environ.current())
    process.raise_priority()
    Reaper(channel, configure, pid, wake_on_child()).serve()
    os._exit(0)
