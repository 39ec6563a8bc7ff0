"""The private directory of one job on one node, and the removal of those of earlier jobs.

It is in `$XDG_RUNTIME_DIR/msrun`, or in `/tmp/msrun-UID` where that is not this user's own, or in
`~/.cache/msrun-HOST` where another user has made that one.  It has the job's id as its name and
holds an exclusive lock as long as the job's reaper lives.  A directory with a free lock belonged to
a job whose reaper and agent were both killed; it is removed here, with the job's processes and its
cgroup.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from msrun import environ
from msrun.errors import UsageError
from msrun.supervise import containment, process, shared_memory
from msrun.supervise.tree import end_strays

_LOCK = "lock"
_CGROUP = "cgroup"
WAL = "scheduler.wal"


class JobRunsError(UsageError):
    """A job of that name runs on this machine."""


def location(name: str) -> Path:
    """Return where the directory `name` would be."""
    return _parent() / name


def name(job_id: str, node_name: str) -> str:
    """Return the name of the directory of a job on a node, which may have a name of its own."""
    return f"{job_id}.{node_name}" if node_name else job_id


def cookie(directory: Path) -> bytes:
    """Return the assignment that the environment of every process of that job holds."""
    return f"{environ.RUN_DIR}={directory}".encode()


def create(name: str) -> tuple[Path, int]:
    """Make the directory `name`; return it and the descriptor that holds its lock.

    Raises:
        UsageError: The job runs already, or the directory cannot be made.
    """
    clean()
    parent = _parent()
    try:
        _make_parent(parent)
        with _guarded(parent):
            return _make(parent / name)
    except OSError as error:
        msg = f"{error.filename or parent} cannot be used: {error.strerror}"
        raise UsageError(msg, hint="it holds the job's private files") from None


def clean() -> list[str]:
    """Remove what killed launchers of this user have left; return the names of their directories.

    That is wherever one of them may have had its place, since each session may have another.
    """
    removed: list[str] = []
    for parent in dict.fromkeys((*_places(), _parent())):
        with contextlib.suppress(OSError, UsageError):  # there is none, or it is not ours
            _check_private(parent)
            with _guarded(parent):
                removed += _remove_stale(parent)
    return removed


def why_elsewhere(directory: Path) -> str:
    """Return why a job's directory is not at its usual place, as a message; empty if it is."""
    if directory.parent != _at_home():
        return ""
    try:
        _make_parent(_fallback())
        problem = f"{_fallback()} cannot be used"
    except (OSError, UsageError) as error:
        problem = error.message if isinstance(error, UsageError) else str(error)
    return f"msrun: private files are in {directory.parent}: {problem}"


def make_again(directory: Path) -> int:
    """Make `directory` of a job that runs, which somebody has removed; return its new lock.

    Without the lock, the next launcher would take the job's processes for strays.

    Raises:
        OSError: It cannot be made.
        UsageError: Its parent is not ours.
    """
    _make_parent(directory.parent)
    with _guarded(directory.parent):
        _, lock = _make(directory)
    return lock


def held() -> list[Path]:
    """Return the directories of this user's jobs that run on this machine, by name."""
    held: list[Path] = []
    for parent in {_parent(), *_places()}:
        try:
            _check_private(parent)
            with _guarded(parent):
                directories = [directory for directory in parent.iterdir() if directory.is_dir()]
                held += [d for d in directories if not _is_free(d / _LOCK)]
        except (OSError, UsageError):  # there is none, or it is not ours
            continue
    return sorted(held, key=lambda directory: directory.name)


@contextlib.contextmanager
def _guarded(parent: Path) -> Iterator[None]:
    """Keep other launchers of this user from looking for jobs, or making one, inside."""
    guard = os.open(parent / ".guard", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield
    finally:
        os.close(guard)


def make_cgroup(directory: Path, parent: str) -> str | None:
    """Make the cgroup of a job below `parent`, and note it; None when the kernel refuses.

    It is noted first, for the launcher that cleans up if we are killed in between.  Its name is no
    other job's: one of the same id may run in a session with another place for its directory.

    Raises:
        OSError: It cannot be noted.
    """
    name = f"msrun-{directory.name}.{secrets.token_hex(3)}"
    note = directory / _CGROUP
    note.write_text(str(Path(parent, name)))
    cgroup = containment.create(parent, name)
    if cgroup is None:
        note.unlink()
    return cgroup


def write_private(path: str, content: str) -> None:
    """Write a file that is not there yet and that its owner alone may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(content)


def _parent() -> Path:
    """Return where this process makes the directories of jobs."""
    runtime = environ.runtime_dir()
    if runtime and _is_ours(Path(runtime)):
        return Path(runtime, "msrun")
    home = _at_home()
    # What another user has made there first stays theirs; nobody can do so in our home.
    try:
        _check_private(_fallback())
    except FileNotFoundError:
        return _fallback()
    except (OSError, UsageError):
        return home or _fallback()
    return _fallback()


def _places() -> list[Path]:
    """Return where any process of this user makes them, but for its XDG_RUNTIME_DIR."""
    home = _at_home()
    return [_fallback()] if home is None else [_fallback(), home]


def _at_home() -> Path | None:
    """Return the place in our home, which several hosts may share."""
    cache = environ.cache_dir()
    return cache and cache / f"msrun-{os.uname().nodename}"


def _fallback() -> Path:
    return Path(f"/tmp/msrun-{os.getuid()}")  # noqa: S108 - its owner and mode are checked


def _is_ours(directory: Path) -> bool:
    try:
        status = directory.stat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _make_parent(directory: Path) -> None:
    directory.parent.mkdir(mode=0o700, exist_ok=True)  # ~/.cache; all others are there
    directory.mkdir(mode=0o700, exist_ok=True)
    _check_private(directory)


def _check_private(directory: Path) -> None:
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        msg = f"{directory} must be a directory of this user alone, mode 0700"
        raise UsageError(msg, hint="remove it, or set XDG_RUNTIME_DIR to a directory of your own")


def _make(directory: Path) -> tuple[Path, int]:
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        msg = f"--job-id {directory.name} is the name of a job that still runs on this machine"
        raise JobRunsError(msg, hint="choose another name, or leave --job-id out") from None
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return directory, lock


def _remove_stale(parent: Path) -> list[str]:
    containment.remove_remains(str(parent))
    removed = []
    for directory in parent.iterdir():
        if directory.is_dir() and _is_free(directory / _LOCK):
            _end_strays(directory)
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory.name)
    return removed


def _is_free(lock: Path) -> bool:
    """Return whether `lock` is free; its maker takes it under the same guard."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def _end_strays(directory: Path) -> None:
    try:
        cgroup = (directory / _CGROUP).read_text()
    except OSError:
        cgroup = ""
    end_strays(cookie(directory), cgroup or None)
    workers = shared_memory.noted(str(directory))
    shared_memory.remove({pid for pid in workers if not process.is_alive(pid)})
    if cgroup and Path(cgroup).exists():
        containment.note_remains(cgroup, str(directory))
