"""The forkserver: imports torch once, then forks each worker in a few milliseconds.

It has one thread and opens no device, because both would be broken in every child;
when something it was asked to preload does either, it says so and starts each
worker as an interpreter of its own instead.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from msrun import environ
from msrun.supervise import process
from msrun.supervise.channel import Channel, ChannelClosed
from msrun.supervise.orders import (
    Configure,
    Exited,
    ForkserverOrder,
    Ready,
    SignalWorkers,
    Spawned,
    SpawnStore,
    SpawnWorker,
)
from msrun.supervise.reaper import SignalHandler, drain, wake_on_child

_DEVICE_FILES = ("/dev/nvidia", "/dev/davinci", "/dev/kfd")
_CANNOT_START = 126 << 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """What a process needs to know right after it was forked.

    Args:
        configure: The job's first order.
        fork: Whether a Python program continues in this process; else it is exec'ed.
        parent: Pid of the forkserver.
        signals: What signals did before the reaper ignored them.
        descriptors: The forkserver's own, to be closed.
        listen_fd: The store's listening socket.
    """

    configure: Configure
    fork: bool
    parent: int
    signals: dict[signal.Signals, SignalHandler]
    descriptors: tuple[int, ...]
    listen_fd: int


BecomeWorker = Callable[[Birth, SpawnWorker], NoReturn]
BecomeStore = Callable[[Birth, SpawnStore], NoReturn]


@dataclass(slots=True)
class _Child:
    generation: int
    rank: int | None


@dataclass(slots=True)
class Forkserver:
    """State of the one forkserver of a node."""

    channel: Channel[ForkserverOrder]
    birth: Birth
    become_worker: BecomeWorker
    become_store: BecomeStore
    wakeup: int
    _children: dict[int, _Child] = field(default_factory=dict)
    _lazy_store: SpawnStore | None = None

    def serve(self) -> None:
        """Carry out orders until the agent is gone."""
        while True:
            poller = select.poll()
            poller.register(self.channel.fileno(), select.POLLIN)
            poller.register(self.wakeup, select.POLLIN)
            if self._lazy_store:
                poller.register(self.birth.listen_fd, select.POLLIN)
            ready = [fd for fd, _ in poller.poll()]
            if self.wakeup in ready:
                self._reap()
            if self._lazy_store and self.birth.listen_fd in ready:
                self._fork_store(self._lazy_store)
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
            case SignalWorkers():
                self._signal(order)

    def _fork_worker(self, order: SpawnWorker) -> None:
        child = _Child(order.generation, order.rank)
        pid = self._fork(child, lambda: self.become_worker(self.birth, order))
        if pid:
            report = Spawned(
                generation=order.generation, rank=order.rank, pid=pid, at=time.monotonic()
            )
            self.channel.send(report)

    def _fork_store(self, order: SpawnStore) -> None:
        self._lazy_store = None
        child = _Child(order.generation, None)
        self._fork(child, lambda: self.become_store(self.birth, order))

    def _fork(self, child: _Child, become: Callable[[], NoReturn]) -> int:
        """Fork a process that becomes `child`; return its pid, 0 when there is none."""
        try:
            pid = os.fork()
        except OSError as error:
            self._report_exit(0, child, _CANNOT_START, f"fork: {error.strerror}")
            return 0
        if pid == 0:
            try:
                become()
            finally:
                os._exit(1)
        self._children[pid] = child
        return pid

    def _signal(self, order: SignalWorkers) -> None:
        # Only this process reaps its children, so none of these pids can have been reused.
        for pid, child in self._children.items():
            if child.rank in order.ranks:
                process.kill(-pid if order.group else pid, order.signum)

    def _reap(self) -> None:
        drain(self.wakeup)
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if child := self._children.pop(pid, None):
                self._report_exit(pid, child, status)

    def _report_exit(self, pid: int, child: _Child, status: int, reason: str = "") -> None:
        self.channel.send(
            Exited(
                generation=child.generation,
                rank=child.rank,
                pid=pid,
                status=status,
                at=time.monotonic(),
                reason=reason,
            )
        )


def preload(configure: Configure) -> Ready:
    """Import what the workers will need and say whether forking them is safe."""
    started = time.monotonic()
    if configure.kind == "command" or not configure.fork:
        return Ready(fork=False, seconds=0.0)
    before = environ.hold_back_threads()
    error = _import_all(configure.preload)
    environ.restore(before)
    reason = "" if error else why_unsafe()
    gc.collect()
    gc.freeze()
    seconds = time.monotonic() - started
    return Ready(fork=not reason, reason=reason, error=error, seconds=seconds)


def _import_all(names: Sequence[str]) -> str | None:
    """Import `names`; return one sentence about the first that cannot be."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - any code may run at import
            return f"cannot import {name}: {type(error).__name__}: {error}"
    return None


def why_unsafe() -> str:
    """Return why this process must not be forked into workers; empty when it may be."""
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    if threads > 1:
        return f"the preloaded modules started {threads - 1} thread(s)"
    if started := process.children(os.getpid()):
        return f"the preloaded modules started a process ({process.command_line(started[0])})"
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
    listen_fd: int,
    signals: dict[signal.Signals, SignalHandler],
    become: tuple[BecomeWorker, BecomeStore],
) -> None:
    """Be the forkserver, in the child that the reaper forked, until the agent is gone."""
    process.set_name("msrun forksrv")
    channel: Channel[ForkserverOrder] = Channel(sock, ForkserverOrder)
    os.chdir(configure.cwd)
    ready = preload(configure)
    channel.send(ready)
    wakeup = wake_on_child()
    birth = Birth(
        configure=configure,
        fork=ready.fork,
        parent=os.getpid(),
        signals=signals,
        descriptors=(channel.fileno(), wakeup),
        listen_fd=listen_fd,
    )
    try:
        Forkserver(channel, birth, *become, wakeup).serve()
    except ChannelClosed:
        sys.exit(0)
