"""Limits of the kernel on one process."""

from __future__ import annotations

import contextlib
import resource


def raise_open_files() -> int:
    """Raise the limit on open files as far as allowed, for children too; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The kernel refuses a limit above its own, which the hard limit may be.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft


def bound_memory(size: int) -> None:
    """Have this process end rather than take more than `size` bytes of its own."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or size < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (size, hard))
