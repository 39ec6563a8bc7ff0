"""Segments of POSIX shared memory that killed processes of torch left behind."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path

from msrun import bounded_file

# Names of the segments of torch's shared tensors before they are unlinked.
_SEGMENT = re.compile(r"torch_([0-9]+)_[0-9]+_[0-9]+")
_PIDS = "pids"
_PIDS_BYTES_MAX = 2**20
_DIGITS_MAX = 9


def note(run_dir: str, pid: int) -> None:
    """Note a worker in the private directory of its job, for whoever is left to clean up."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    with contextlib.suppress(OSError):
        descriptor = bounded_file.open_regular(Path(run_dir, _PIDS), flags)
        try:
            os.write(descriptor, b"%d\n" % pid)
        finally:
            os.close(descriptor)


def noted(run_dir: str) -> set[int]:
    """Return the workers that were noted, those of earlier generations too."""
    lines = (bounded_file.read_own(Path(run_dir, _PIDS), _PIDS_BYTES_MAX) or b"").split()
    return {int(line) for line in lines if line.isdigit() and len(line) <= _DIGITS_MAX}


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
