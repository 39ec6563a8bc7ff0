"""The duty of the first process of a container: to reap orphans.

The kernel makes it the parent of every process whose own parent has ended, also of foreign ones
such as probes and shells.  No other process can reap them.  Whichever of our processes is the first
one has a loop, which does it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Container

from msrun.supervise import process
from msrun.transport.loop import Loop


def reap_orphans(
    loop: Loop, own: Callable[[], Container[int]], *, is_subreaper: bool = False
) -> None:
    """Have `loop` reap orphans if this is the first process; it has no child of its own yet.

    Args:
        loop: This process's loop.
        own: Returns the pids of the processes that it has started and waits for.
        is_subreaper: It gets orphans of its own descendants, also if it is not the first.
    """
    if os.getpid() != 1 and not is_subreaper:
        return
    loop.on_signals((signal.SIGCHLD,), lambda _: process.reap_adopted(own()))
    process.reap_adopted(())  # those that ended before the handler was there
