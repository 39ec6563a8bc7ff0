"""Stack dumps of a worker at two signals, whatever it is doing.

They show the main thread alone, which the kernel has handle the signals.  Other threads may run
meanwhile, and reading the frames of one that runs can end the process by SIGSEGV.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal

from msrun import environ

# SIGUSR1 and SIGUSR2 belong to the user; the first real-time signals to the C library.
# For people: the stacks go to the log.
STACK_SIGNAL = signal.SIGRTMIN + 5
# For the agent: they go to a file that it reads.
AGENT_SIGNAL = signal.SIGRTMIN + 6
# Programs may count on the low numbers, which they get first from a shell.
_DESCRIPTOR = 100


def show_on_signal() -> None:
    """Write stacks on either signal, without the help of the interpreter."""
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=False)
    path = environ.rank_file("stack")
    if path is None:
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(OSError):
        low = os.open(path, flags, 0o600)
        try:
            descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _DESCRIPTOR)
        finally:
            os.close(low)
        faulthandler.register(AGENT_SIGNAL, file=descriptor, all_threads=False)
