"""Segments of POSIX shared memory that killed processes of torch left behind."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path

# Names of the segments of torch's shared tensors before they are unlinked.
_SEGMENT = re.compile(r"torch_([0-9]+)_[0-9]+_[0-9]+")


def remove(pids: Collection[int], directory: str = "/dev/shm") -> None:  # noqa: S108 - not ours to choose
    """Remove this user's segments that were named after one of `pids`, all of them dead."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            match = _SEGMENT.fullmatch(entry.name)
            if match and int(match[1]) in pids and _is_ours(entry):
                Path(entry.path).unlink(missing_ok=True)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.stat(follow_symlinks=False).st_uid == os.getuid()
    except OSError:
        return False
