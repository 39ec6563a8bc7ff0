"""`msrun.beat()`: a worker's sign of progress, in shared memory that its agent reads.

The file `beat_<rank>` in the private directory of the generation holds two unsigned numbers of 64
bits, in the byte order of the machine: how often this worker beat, and when it last did, in
nanoseconds of the monotonic clock, which all processes of a node share.  The worker writes them
into shared memory, so neither side waits for the other, and they outlive the worker.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import struct
import time
from collections.abc import Callable

from msrun import environ
from msrun.worker import collectives

LAYOUT = struct.Struct("=QQ")


def beat() -> None:
    """Say that this worker makes progress; outside of a job nothing happens.

    Cheap enough for every step of a loop: less than a microsecond.
    """
    _writer()()


@functools.cache
def _writer() -> Callable[[], None]:
    """Return a function that writes one beat, or does nothing if beats cannot be written."""
    path = environ.rank_file("beat")
    try:
        memory = None if path is None else _share(path)
    except OSError:
        memory = None
    if memory is not None:
        with contextlib.suppress(OSError, RuntimeError):
            collectives.answer_questions()
    if memory is None:
        return lambda: None
    write, count, now = LAYOUT.pack_into, itertools.count(1), time.monotonic_ns
    return lambda: write(memory, 0, next(count), now())


def _share(path: str) -> mmap.mmap:
    """Return the memory of the file at `path`, which is made for this user alone."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        # Where the file system is full, an error; a file without a block would end this process
        # at its first beat.
        os.posix_fallocate(fd, 0, LAYOUT.size)
        return mmap.mmap(fd, LAYOUT.size)
    finally:
        os.close(fd)
