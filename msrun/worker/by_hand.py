"""Turns a script that was started by hand into a node of a cluster, in the same process.

The process becomes the agent of a node with one worker or one parameter server, or the host of
the scheduler, by `exec`: it keeps its pid, its terminal and its place in the user's shell, and the
script begins again as that worker.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from msrun import environ
from msrun.errors import UsageError
from msrun.identity import Hand
from msrun.units import shown

_STANDARD = (0, 1, 2)
_SERVER = "the script goes no further, since this process has a parameter server"
_BECOMES = {
    "MS_SCHED": "the script goes no further, since this process has the scheduler",
    "MS_PSERVER": _SERVER,
    "MS_SERVER": _SERVER,
    "MS_WORKER": "the script begins again as a worker of this process",
}


def join() -> None:
    """Take this process's place in its cluster, unless it has one or is of none.

    Raises:
        UsageError: The script cannot begin again.
    """
    role = environ.role_by_hand(environ.current())
    if not role:
        return
    given = f"{Hand.ROLE}={shown(role)}"
    if obstacle := _obstacle():
        msg = f"environment {given}: this process cannot join a cluster, because {obstacle}"
        raise UsageError(msg, hint="call msrun.join() at the beginning of a script file")
    _say(f"msrun: {given}: {_BECOMES.get(role, 'the script goes no further')}\n")
    _flush()
    from msrun.supervise.tree import python_command  # A script with a place needs none of it.

    _close_on_exec()
    os.execv(sys.executable, python_command("msrun.cli.by_hand:main", *sys.orig_argv[1:]))  # noqa: S606 - a list, and no shell


def _obstacle() -> str:
    """Return why this process cannot begin its program again, empty when it can."""
    if hasattr(sys, "ps1") or sys.flags.inspect:
        return "it is an interactive session"
    if sys.argv[:1] in ([""], ["-"]):
        return "its program came from standard input"
    # `join` imports neither of these: a script without them has no such process or group.
    processes = sys.modules.get("multiprocessing.process")
    if processes and processes.parent_process():
        return "it is a child of multiprocessing"
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        return "it has a process group already"
    return "" if sys.executable else "it does not know its Python interpreter"


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, line.encode())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _close_on_exec() -> None:
    """See to it that no file, socket or device of the script outlives it here."""
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor not in _STANDARD:
            with contextlib.suppress(OSError):
                os.set_inheritable(descriptor, False)  # noqa: FBT003 - takes it by position alone
