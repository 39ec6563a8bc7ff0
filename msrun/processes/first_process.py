"""What the first process of a container owes to the others there: to reap their orphans.

The kernel gives it every process whose parent has ended, of strangers too, such as probes and
shells.  Nobody else can reap them, and whoever it is of ours that comes first has a loop.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Container

from msrun.supervise import process
from msrun.transport.loop import Loop


def reap_orphans(loop: Loop, own: Callable[[], Container[int]]) -> None:
    """Have `loop` reap them if this process is such a one, which has no child of its own yet.

    Args:
        loop: This process's loop.
        own: Returns the pids of the processes that it has started and waits for.
    """
    if os.getpid() != 1:
        return
    loop.on_signals((signal.SIGCHLD,), lambda _: process.reap_adopted(own()))
    process.reap_adopted(())  # of which no signal told
