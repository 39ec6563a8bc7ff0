"""The forkserver: imports torch once, then forks each worker in a few milliseconds.

An import of torch costs about a second of CPU for each rank.  Forking from a process that has
done it once costs milliseconds, and the ranks share its memory copy-on-write.  The price is that
this process must stay forkable:

- It has one thread, because threads do not survive a fork but their locks do, and opens no device,
  because a CUDA context is broken in every child.  If a preloaded module does either, `why_unsafe`
  says so and each worker is an interpreter of its own instead.
- A forked child must not run on in its parent's stack frames: their `finally` blocks and objects
  are the forkserver's.  So a child raises `Forked`, which unwinds all frames up to the entry of the
  process, and only there begins its own work.
- No garbage collection before the fork (`gc.freeze`): a collector that runs in a child writes to
  every page that it visits, and each worker would copy all of torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pkgutil
import select
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

from msrun import environ
from msrun.supervise import process, shared_memory, title
from msrun.supervise.channel import Channel, ChannelClosed
from msrun.supervise.orders import (
    Configure,
    Exited,
    ForkserverOrder,
    Ping,
    Pong,
    Ready,
    ServerExited,
    ServerSignal,
    ServerSpawned,
    SignalWorkers,
    Spawned,
    SpawnMindSpore,
    SpawnServer,
    SpawnStore,
    SpawnWorker,
)
from msrun.supervise.reaper import Next, SignalHandler, drain, wake_on_child

_DEVICE_FILES = ("/dev/nvidia", "/dev/davinci", "/dev/kfd")
_CANNOT_START = 126 << 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnContext:
    """The facts that a process needs right after it was forked.

    Args:
        configure: The job's first order.
        fork: Whether a Python program continues in this process; else it is exec'ed.
        parent: Pid of the forkserver.
        signals: Handlers of signals before the reaper ignored them.
        wakeup: The forkserver's own end of its signal pipe, to be closed.
        listen_fds: The store's listening sockets.
    """

    configure: Configure
    fork: bool
    parent: int
    signals: dict[signal.Signals, SignalHandler]
    wakeup: int
    listen_fds: tuple[int, ...]


BecomeWorker = Callable[[SpawnContext, SpawnWorker, Sequence[int]], Next]
BecomeStore = Callable[[SpawnContext, SpawnStore], Next]
BecomeServer = Callable[[SpawnContext, SpawnServer], Next]
BecomeMindSpore = Callable[[SpawnContext, SpawnMindSpore], Next]


class MindSporeDoor(Protocol):
    """Where workers are noticed that call MindSpore's scheduler before there is one."""

    @property
    def order(self) -> SpawnMindSpore | None:
        """What to do then; None while it is closed."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when somebody connects."""

    def expect(self, order: SpawnMindSpore) -> None:
        """Open it for the workers of `order`."""

    def answer(self) -> SpawnMindSpore | None:
        """Return the order and close it if a worker calls."""

    def close(self) -> None:
        """Give the port free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """What the processes of a node become; their code is in rooms above this one.

    Args:
        worker: Turns a fresh fork into a worker, like those that follow.
        store: Into the store.
        server: Into a parameter server.
        mindspore: Into MindSpore's scheduler.
        without_torch: Says that the node is ready as it is, if its workers want no torch.
        why_exec: Tells why a program needs interpreters of its own; empty when it does not.
        why_no_mindspore: Tells why MindSpore's scheduler cannot run here; empty when it can.
        door: Closed.
    """

    worker: BecomeWorker
    store: BecomeStore
    server: BecomeServer
    mindspore: BecomeMindSpore
    without_torch: Callable[[Configure], Ready | None]
    why_exec: Callable[[Configure], str]
    why_no_mindspore: Callable[[], str]
    door: MindSporeDoor


class Forked(BaseException):
    """Unwinds the forkserver's frames in a child, which goes on with `become`."""

    def __init__(self, become: Callable[[], Next]) -> None:
        super().__init__()
        self.become = become


@dataclass(slots=True)
class _Child:
    generation: int
    rank: int | None
    is_mindspore: bool = False
    server: int | None = None


@dataclass(slots=True)
class Forkserver:
    """The one forkserver of a node."""

    channel: Channel[ForkserverOrder]
    context: SpawnContext
    roles: Roles
    wakeup: int
    _children: dict[int, _Child] = field(default_factory=dict)
    _lazy_store: SpawnStore | None = None

    def serve(self) -> NoReturn:
        """Carry out orders until the agent is gone.

        Raises:
            ChannelClosed: The agent is gone.
            Forked: This is a child.
        """
        while True:
            poller = select.poll()
            poller.register(self.channel.fileno(), select.POLLIN)
            poller.register(self.wakeup, select.POLLIN)
            if self._lazy_store:
                for descriptor in self.context.listen_fds:
                    poller.register(descriptor, select.POLLIN)
            if self.roles.door.order:
                poller.register(self.roles.door.fileno(), select.POLLIN)
            ready = [fd for fd, _ in poller.poll()]
            if self.wakeup in ready:
                self._reap()
            if self._lazy_store and not set(self.context.listen_fds).isdisjoint(ready):
                self._fork_store(self._lazy_store)
            if self.roles.door.order and self.roles.door.fileno() in ready:
                self._on_mindspore_call()
            if self.channel.fileno() in ready:
                for order in self.channel.receive():
                    self._obey(order)

    def _obey(self, order: ForkserverOrder) -> None:
        match order:
            case SpawnWorker():
                self._fork_worker(order)
            case SpawnStore(lazy=True):
                self._lazy_store = order
            case SpawnStore():
                self._fork_store(order)
            case SpawnMindSpore(when_called=True):
                self.roles.door.expect(order)
            case SpawnMindSpore():
                self._fork_mindspore(order)
            case SpawnServer():
                self._fork_server(order)
            case SignalWorkers():
                self._signal(order)
            case ServerSignal():
                self._signal_servers(order)
            case Ping():
                self.channel.send(Pong())

    def _fork_worker(self, order: SpawnWorker) -> None:
        streams = self.channel.take_descriptors(order.descriptors)
        self._fork_with_streams(order, streams)
        for descriptor in streams:  # not in a `finally`, which the child would run too
            os.close(descriptor)

    def _fork_with_streams(self, order: SpawnWorker, streams: Sequence[int]) -> None:
        child = _Child(order.generation, order.rank)
        if order.until is not None and time.monotonic() >= order.until:
            # The agent was frozen while it gave this order, and the node may be lost by now.
            self._report_exit(0, child, _CANNOT_START, "the node was cut off meanwhile")
            return
        pid = self._fork(child, partial(self.roles.worker, self.context, order, streams))
        if pid:
            report = Spawned(
                generation=order.generation, rank=order.rank, pid=pid, at=time.monotonic()
            )
            self.channel.send(report)

    def _fork_store(self, order: SpawnStore) -> None:
        self._lazy_store = None
        child = _Child(order.generation, None)
        self._fork(child, partial(self.roles.store, self.context, order))

    def _fork_server(self, order: SpawnServer) -> None:
        child = _Child(-1, None, server=order.server)
        if order.until is not None and time.monotonic() >= order.until:
            self._report_exit(0, child, _CANNOT_START, "the node was cut off meanwhile")
            return
        if pid := self._fork(child, partial(self.roles.server, self.context, order)):
            self.channel.send(ServerSpawned(server=order.server, pid=pid, at=time.monotonic()))

    def _on_mindspore_call(self) -> None:
        order = self.roles.door.answer()
        if order is None:
            return
        if problem := order.refusal or self.roles.why_no_mindspore():
            child = _Child(order.generation, None, is_mindspore=True)
            self._report_exit(0, child, 0, f"a worker called MindSpore's init(): {problem}")
            return
        self._fork_mindspore(order)

    def _fork_mindspore(self, order: SpawnMindSpore) -> None:
        self.roles.door.close()
        child = _Child(order.generation, None, is_mindspore=True)
        self._fork(child, partial(self.roles.mindspore, self.context, order))

    def _fork(self, child: _Child, become: Callable[[], Next]) -> int:
        """Fork a process that becomes `child`; return its pid, 0 when there is none."""
        # The child begins with our ignored signals.  Blocked ones stay pending until it has its
        # own handlers, so that a signal right after the fork is not lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, self.context.signals)
        problem = ""
        try:
            pid = os.fork()
        except OSError as error:
            pid, problem = -1, f"fork: {error.strerror}"
        if pid == 0:
            self.channel.close()
            self.roles.door.close()  # a copy of it would keep the port
            raise Forked(become)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.context.signals)
        if problem:
            self._report_exit(0, child, _CANNOT_START, problem)
            return 0
        self._children[pid] = child
        shared_memory.note(self.context.configure.run_dir, pid)
        return pid

    def _signal(self, order: SignalWorkers) -> None:
        if not 0 < order.signum < signal.NSIG:  # the kernel would refuse it for each of them
            return
        # Only this process reaps its children, so none of these pids can have been reused.
        for pid, child in self._children.items():
            if child.rank not in order.ranks:  # None, of a store or a server, never is
                continue
            # A child that has just been forked leads no group yet.
            if not order.group or not process.kill(-pid, order.signum):
                process.kill(pid, order.signum)

    def _signal_servers(self, order: ServerSignal) -> None:
        for pid, child in self._children.items():
            if child.server in order.servers:
                process.kill(pid, order.signum)

    def _reap(self) -> None:
        drain(self.wakeup)
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if child := self._children.pop(pid, None):
                self._report_exit(pid, child, status)

    def _report_exit(self, pid: int, child: _Child, status: int, reason: str = "") -> None:
        at = time.monotonic()
        if child.server is not None:
            end = ServerExited(server=child.server, pid=pid, status=status, at=at, reason=reason)
            self.channel.send(end)
            return
        self.channel.send(
            Exited(
                generation=child.generation,
                rank=child.rank,
                pid=pid,
                status=status,
                at=at,
                reason=reason,
                is_mindspore=child.is_mindspore,
            )
        )


def preload(configure: Configure, why_exec: Callable[[Configure], str] = lambda _: "") -> Ready:
    """Import the modules that workers need and say whether forking them is safe.

    Args:
        configure: The job.
        why_exec: Tells why its program needs interpreters of its own; empty when it does not.
    """
    started = time.monotonic()
    if configure.kind == "command" or not configure.fork:
        return Ready(fork=False, seconds=0.0)
    if why := why_exec(configure):
        return Ready(fork=False, reason=why, seconds=time.monotonic() - started)
    before = environ.hold_back_threads()
    # No collection before `gc.freeze`, as its documentation advises: workers would fill the holes
    # that it frees, and each would copy the pages around them.
    gc.disable()
    error = _import_all(configure.preload) or _import_all(
        configure.preload_of_user, beside=_program_directory(configure)
    )
    gc.freeze()
    gc.enable()
    environ.restore(before)
    _keep_operators()
    reason = "" if error else why_unsafe()
    seconds = time.monotonic() - started
    return Ready(fork=not reason, reason=reason, error=error, seconds=seconds)


def _import_all(names: Sequence[str], beside: str = "") -> str | None:
    """Import `names`; return one sentence about the first that cannot be.

    Args:
        names: Modules.
        beside: Directory in front on `sys.path` while they are imported.
    """
    path = [beside] if beside and not sys.flags.safe_path else []
    sys.path[:0] = path
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - any code may run at import, even exit
            return f"cannot import {name}: {type(error).__name__}: {error}".rstrip(": ")
    for directory in path:
        with contextlib.suppress(ValueError):  # a module may have changed the path
            sys.path.remove(directory)
    return None


def _program_directory(configure: Configure) -> str:
    """Return the first directory on the program's `sys.path`, so that both import the same."""
    if configure.kind == "module":
        return configure.cwd
    file = os.path.join(configure.cwd, configure.argv[0])  # noqa: PTH118 - as it was given
    if pkgutil.get_importer(file) is not None:
        return file
    return str(Path(os.path.realpath(file)).parent)


def _keep_operators() -> None:
    """Have no worker unregister, at its exit, the operators that torch registered at import.

    That would cost each worker 35 ms, for a result that ends with the process.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # noqa: SLF001 - there is no public list
        referent = finalizer.peek()
        if referent and referent[1].__module__ == "torch.library":
            finalizer.atexit = False


def why_unsafe() -> str:
    """Return why this process must not be forked into workers; empty when it may be."""
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    if threads > 1:
        return f"the preloaded modules started {threads - 1} thread(s)"
    if started := process.children(os.getpid()):
        # In the midst of its exec a process has no command line.
        command = process.command_line(started[0]).strip() or f"pid {started[0]}"
        return f"the preloaded modules started a process ({command})"
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith(_DEVICE_FILES):
            return f"the preloaded modules opened {target}"
    return ""


def run(
    configure: Configure,
    sock: socket.socket,
    listen_fds: tuple[int, ...],
    signals: dict[signal.Signals, SignalHandler],
    roles: Roles,
) -> Next:
    """Be the forkserver, in the child that the reaper forked, until the agent is gone.

    Returns only in the processes that it forked, with the work of each.
    """
    title.set_name("msrun forksrv")
    title.show_as(["msrun", "forkserver", configure.job_id], environ.current())
    channel: Channel[ForkserverOrder] = Channel(sock, ForkserverOrder)
    os.chdir(configure.cwd)
    faulthandler.enable()  # an imported extension may crash
    ready = roles.without_torch(configure) or preload(configure, roles.why_exec)
    channel.send(ready)
    wakeup = wake_on_child()
    context = SpawnContext(
        configure=configure,
        fork=ready.fork,
        parent=os.getpid(),
        signals=signals,
        wakeup=wakeup,
        listen_fds=listen_fds,
    )
    try:
        Forkserver(channel, context, roles, wakeup).serve()
    except Forked as child:
        return child.become
    except ChannelClosed:
        # The agent is gone.  If somebody has stopped the reaper, nobody else can tell it to go on.
        process.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
