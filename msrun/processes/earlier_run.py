"""Sets aside what an earlier run left in the log directory, so that nothing of it is overwritten.

The files of the running job are where the documentation has them, such as `worker_0.log`; those of
earlier jobs of the same directory move to `earlier-1`, `earlier-2` and so on, the latest with the
highest number.  Only files move whose names the new job would write.

Several nodes may share the directory, and start at any time.  Each holds a lock on its own
journal, so the first of them finds no other that is locked and moves everything; the others move
what is their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import string
from collections.abc import Iterator
from pathlib import Path

from msrun.processes.ending import VERDICT_FILE
from msrun.supervise import logs

_JOURNAL = re.compile(r"msrun(_.*)?\.log")
_OURS = (
    r"(mindspore_)?scheduler\.log|server_\d+\.log|filtered_std(out|err)(_.*)?\.log|hang_\d+\.txt|"
    + re.escape(VERDICT_FILE)
)
_EARLIER = re.compile(r"earlier-([1-9]\d{0,8})")
_NUMBERS = ("rank", "local_rank")


def claim_journal(log_dir: str, worker_log_name: str, journal: str) -> int:
    """Return a descriptor of this launcher's own log, with the files of an earlier run set aside.

    Args:
        log_dir: The log directory of the job that begins.
        worker_log_name: Its pattern of a worker's log.
        journal: Name of its launcher's own log.

    Raises:
        BlockingIOError: Another launcher writes that journal; nothing was moved.
        OSError: It cannot be made.
    """
    directory = Path(log_dir)
    with _guarded(directory):
        if not _is_held(directory / journal):
            # What cannot be moved stays, and is replaced or refused when it is written.
            with contextlib.suppress(OSError):
                _set_aside(directory, worker_log_name, journal)
        return logs.claim(str(directory / journal))


def _set_aside(directory: Path, worker_log_name: str, journal: str) -> None:
    names = os.listdir(directory)  # noqa: PTH208 - names are wanted
    others = [name for name in names if _JOURNAL.fullmatch(name) and name != journal]
    own = [journal]
    if not any(_is_held(directory / name) for name in others):
        pattern = re.compile(f"{_JOURNAL.pattern}|{_OURS}|{_pattern(worker_log_name)}")
        own = [name for name in names if pattern.fullmatch(name)]
    _move(directory, names, [name for name in own if _has_content(directory / name)])


@contextlib.contextmanager
def _guarded(directory: Path) -> Iterator[None]:
    """Keep other launchers from doing the same at the same time, where the file system can."""
    guard = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(guard, fcntl.LOCK_EX)
        yield
    finally:
        os.close(guard)


def _pattern(worker_log_name: str) -> str:
    """Return which names of files `--worker-log-name` stands for, on any node."""
    parts = []
    for text, field, _, _ in string.Formatter().parse(worker_log_name):
        wild = "" if field is None else r"\d+" if field in _NUMBERS else r".+"
        parts.append(re.escape(text) + wild)
    return "".join(parts) + r"(\.\w+)?\.(log|out|err)"


def _is_held(journal: Path) -> bool:
    """Tell whether the launcher that writes `journal` still runs."""
    try:
        descriptor = logs.reopen(str(journal))
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _has_content(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size > 0


def _move(directory: Path, names: list[str], own: list[str]) -> None:
    if not own:
        return
    numbers = [int(match[1]) for name in names if (match := _EARLIER.fullmatch(name))]
    number = max(numbers, default=1)
    # A node that came late to an earlier run joins that run's other files.
    if any((directory / f"earlier-{number}" / name).exists() for name in own):
        number += 1
    target = directory / f"earlier-{number}"
    target.mkdir(mode=0o700, exist_ok=True)
    for name in own:
        (directory / name).rename(target / name)
