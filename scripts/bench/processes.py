"""Linux's view of processes: trees, memory, what they mapped, and their end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from pathlib import Path

_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


class TimeoutReached(Exception):  # noqa: N818 - it says what happened
    """Something did not happen within its time limit."""


def become_subreaper() -> None:
    """Adopt every descendant whose parent ends, so that none is missed or left behind.

    Raises:
        OSError: The kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def parents() -> dict[int, int]:
    """Return pid -> pid of its parent for every process, zombies included."""
    found = {}
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(*_GONE):
                # pid (name) state ppid ...; only the name may hold spaces and brackets.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                found[int(entry.name)] = int(fields[1])
    return found


def descendants(root: int, parent_of: dict[int, int]) -> list[int]:
    """Return all processes below `root`, parents before their children."""
    found = [root]
    for pid in found:  # grows while it is read
        found += [child for child, parent in parent_of.items() if parent == pid]
    return found[1:]


def memory_mib(pid: int) -> dict[str, float]:
    """Return the kernel's sums over all mappings of `pid` (`Rss`, `Pss`, ...); empty if gone."""
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
    except _GONE:
        return {}
    fields = (line.split() for line in lines)
    return {name.removesuffix(":"): int(kib) / 1024 for name, kib, *_ in fields}


def command(pid: int) -> str:
    """Return the command line of `pid`; empty when it is gone."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except _GONE:
        return ""


def holds_torch(pid: int) -> bool:
    """Whether a library of torch is mapped in `pid`."""
    try:
        return "libtorch" in (_PROC / str(pid) / "maps").read_text()
    except _GONE:
        return False


def await_exit(pid: int, timeout: float) -> float:
    """Return the monotonic time at which a child ended; it still has to be waited for.

    Raises:
        TimeoutReached: It runs on.
    """
    descriptor = os.pidfd_open(pid)
    try:
        waiter = select.poll()
        waiter.register(descriptor, select.POLLIN)
        if not waiter.poll(timeout * 1000):
            raise TimeoutReached(f"process {pid} did not end within {timeout:g} s")
        return time.monotonic()
    finally:
        os.close(descriptor)


def reap(timeout: float) -> None:
    """Wait until this process has no child, so that all CPU time below it is accounted for.

    Raises:
        TimeoutReached: Some run on.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            if time.monotonic() > deadline:
                left = descendants(os.getpid(), parents())
                raise TimeoutReached(f"left running: {'; '.join(map(command, left))}")
            time.sleep(0.005)


def end_all() -> None:
    """Kill everything below this process; for a run that went wrong."""
    while left := descendants(os.getpid(), parents()):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutReached):
            reap(timeout=1)
