"""The secret that the nodes of one job share: a file that is named, or the user's own.

A holder of the secret may join the job and end it.  The user's own lies in the home directory,
which the nodes of a cluster usually share, and is made on first use.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

from msrun import environ
from msrun.errors import UsageError

SECRET_BYTES = 32
FILE_BYTES_MAX = 64 << 10
_HINT = f"name a file of {SECRET_BYTES} random bytes, the same on every node: --secret-file FILE"


def read_secret(path: str | None) -> bytes:
    """Return the 32 bytes that the file at `path`, by default the user's own, stands for.

    The user's own file is made when it is not there.

    Raises:
        UsageError: It cannot be read or made, is too short, or others may read it.
    """
    file = own_file() if path is None else Path(path)
    if path is None and not os.path.lexists(file):
        _make(file)
    content = _read(file)
    if not SECRET_BYTES <= len(content) <= FILE_BYTES_MAX:
        size = f"{len(content)} bytes" if len(content) <= FILE_BYTES_MAX else "more"
        msg = f"secret file {file} holds {size} (choose {SECRET_BYTES} to {FILE_BYTES_MAX} bytes)"
        raise UsageError(msg, hint=f"head -c {SECRET_BYTES} /dev/urandom makes enough of them")
    return hashlib.sha256(content).digest()


def own_file() -> Path:
    """Return where the user's own secret is or would be.

    Raises:
        UsageError: This user has no home directory.
    """
    directory = environ.config_dir()
    if directory is None:
        msg = "this user has no home directory to keep the job's secret in"
        raise UsageError(msg, hint=_HINT)
    return directory / "msrun" / "secret"


def _read(path: Path) -> bytes:
    """Return the bytes of the file at `path`; of a larger one, a byte more than is allowed."""
    try:
        # Opening a pipe without a writer must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            _check_private(path, os.fstat(descriptor))
            return file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"secret file {path} cannot be read: {reason}", hint=_HINT) from None


def _check_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"secret file {path} is no regular file", hint=_HINT)
    if status.st_uid not in (os.geteuid(), 0):
        msg = f"secret file {path} belongs to user {status.st_uid}, who may read and change it"
        raise UsageError(msg, hint="copy it, and make the copy readable by you alone")
    if status.st_mode & (0o037 if _is_mounted(status) else 0o077):
        mode = stat.S_IMODE(status.st_mode)
        msg = f"secret file {path} may be used by others than its owner (mode {mode:04o})"
        raise UsageError(msg, hint=f"chmod 600 {path}")


def _is_mounted(status: os.stat_result) -> bool:
    """Whether a file may be readable by its group: root's, as Kubernetes mounts it for `fsGroup`.

    A container that does not run as root could not read it otherwise, and nobody else is there.
    """
    return environ.is_pod() and status.st_uid == 0 and os.geteuid() != 0


def _make(path: Path) -> None:
    """Make a secret at `path`, whole from its first moment; one that is there already stays.

    Nodes that share the directory and start together agree on the first one: `link` never
    replaces a file, and no reader ever sees a part of one.
    """
    draft = path.with_name(f".secret-{os.urandom(8).hex()}")
    try:
        path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _check_directory(path.parent)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(os.urandom(SECRET_BYTES))
                file.flush()
                os.fsync(descriptor)
            with contextlib.suppress(FileExistsError):  # A faster node's is everyone's.
                path.hardlink_to(draft)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        msg = f"secret file {path} cannot be made: {error.strerror}"
        raise UsageError(msg, hint=_HINT) from None


def _check_directory(directory: Path) -> None:
    """Refuse a directory in which another user could put a secret of theirs."""
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        msg = f"{directory} must belong to you, and nobody else may write to it"
        raise UsageError(msg, hint=f"chmod 700 {directory}")
