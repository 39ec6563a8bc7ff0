"""`--join=False`: the launcher goes on without its terminal as soon as the job runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

Body = Callable[[Callable[[], None]], int]
_RUNNING = b"r"


def run(body: Body, *, name: str, log_file: str, has_forked: Callable[[], None]) -> int:
    """Run `body` in a process of its own session; return once it runs, or its exit code.

    Args:
        body: Gets a function to call when the job runs; returns the exit code.
        name: The job, for the message.
        log_file: The log of the launcher's own messages.
        has_forked: Called in the process that waits.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os._exit(_in_background(body, writing))
    has_forked()
    os.close(writing)
    with os.fdopen(reading, "rb") as report:
        is_running = report.read(1) == _RUNNING
    if not is_running:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(f"msrun: {name} runs as pid {pid}; log: {log_file}", file=sys.stderr)  # noqa: T201 - its result
    return 0


def _in_background(body: Body, writing: int) -> int:
    os.setsid()
    _to_null(0, 1)

    def when_running() -> None:
        os.write(writing, _RUNNING)
        os.close(writing)
        # Until now errors were still shown at the terminal where the command was typed.
        _to_null(2)

    return body(when_running)


def _to_null(*descriptors: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)
