"""Files that others write: opened without waiting for anybody, and read up to a limit.

Whoever may write to a directory may put a FIFO, a link or a device in place of a file, and write
into it without end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from msrun.errors import UsageError

_MIB = 2**20


def read_bounded(path: str | Path, name: str, *, mebibytes: int) -> bytes:
    """Return the content of the file, which messages call `name`.

    Raises:
        UsageError: It cannot be read, or is larger.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(mebibytes * _MIB + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{name} cannot be read: {reason}") from None
    if len(content) > mebibytes * _MIB:
        raise UsageError(f"{name} is larger than {mebibytes} MiB")
    return content


def read_own(path: str | Path, limit: int) -> bytes | None:
    """Return the bytes of a regular file of this user's own; None without, and if it has more.

    Args:
        path: The file itself, and no link to it.
        limit: Bytes that it may have.
    """
    try:
        descriptor = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or status.st_size > limit:
            return None
        return file.read(status.st_size)


def open_to_read(path: str | Path) -> BinaryIO:
    """Open the regular file `path`, which a worker may have replaced, without waiting.

    A plain `open` of a FIFO waits for its other end, and who waits serves no signal and no peer.

    Raises:
        OSError: It cannot be opened, or is something else.
    """
    return os.fdopen(open_regular(path, os.O_RDONLY), "rb")


def open_regular(path: str | Path, flags: int) -> int:
    """Return a descriptor of the regular file `path`, or make one of mode 0600.

    Raises:
        OSError: It cannot be opened, or is something else.
    """
    # A regular file does not know O_NONBLOCK, so it changes nothing for who gets the descriptor.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return descriptor
