"""The private directory of one job of a program: made, locked, and removed when both ends are gone.

The caller and the keeper of its job hold the lock; whoever of them ends last removes the directory.
What a kill of both leaves is removed by the next job of that user.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from msrun.errors import UsageError

_LOCK = "lock"


def make() -> tuple[Path, int]:
    """Make a directory for one job; return it and the descriptor that holds its lock.

    Raises:
        UsageError: It cannot be made.
    """
    prefix = f"msrun-call-{os.getuid()}-"
    try:
        parent = Path(tempfile.gettempdir())
        for old in parent.glob(f"{prefix}*"):
            _remove_if_left(old)
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        draft = directory / f"{_LOCK}.new"
        lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Under its name it is held from the first moment, so nobody takes this directory for left.
        draft.rename(directory / _LOCK)
    except OSError as error:
        raise UsageError(
            f"no temporary directory for the job can be made: {error}", hint="set TMPDIR"
        ) from None
    return directory, lock


def remove(directory: Path) -> None:
    """Remove the directory of a job that has ended."""
    shutil.rmtree(directory, ignore_errors=True)


def _remove_if_left(directory: Path) -> None:
    """Remove `directory` if it is this user's, and nobody holds its lock."""
    with contextlib.suppress(OSError):
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return
        # One without a lock is about to get it.
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(directory)
        finally:
            os.close(lock)
