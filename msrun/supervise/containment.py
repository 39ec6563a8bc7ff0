"""Cgroup v2 around a job, where the user may make one.

The layout is `<own cgroup>/msrun-<job>.<random>/g<generation>`: the forkserver sits in the
first, the workers of a generation in the second, parameter servers in `servers` beside it, so that
one write to `cgroup.kill`
ends a generation or the whole job, fork bombs included.  The reaper stays outside:
leaving at the end would make it wait for the kernel for some 40 ms.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_KILL = "cgroup.kill"
_PROCS = "cgroup.procs"
_REMAINS = ".cgroup"


def describe(cgroup: str | None) -> str:
    """Return the words that `plan` and the logs use for the containment level."""
    return "cgroup2 and subreaper" if cgroup else "subreaper"


def create(parent: str, name: str) -> str | None:
    """Make the directory of a job below `parent`; None when the kernel refuses."""
    directory = Path(parent, name)
    try:
        directory.mkdir()
    except OSError:
        return None
    return str(directory)


def enter(directory: str) -> None:
    """Move the calling process, which has one thread, into `directory`."""
    Path(directory, _PROCS).write_text("0")


def generation_dir(directory: str, generation: int) -> str:
    """Return where the workers of `generation` live."""
    return str(Path(directory, f"g{generation}"))


def enter_generation(directory: str, generation: int) -> None:
    """Move the calling process among the workers of `generation`."""
    path = Path(generation_dir(directory, generation))
    path.mkdir(exist_ok=True)
    enter(str(path))


def servers_dir(directory: str) -> str:
    """Return where the parameter servers live."""
    return str(Path(directory, "servers"))


def enter_servers(directory: str) -> None:
    """Move the calling process among the parameter servers."""
    path = Path(servers_dir(directory))
    path.mkdir(exist_ok=True)
    enter(str(path))


def kill(directory: str) -> None:
    """SIGKILL every process in `directory` and below it."""
    with contextlib.suppress(OSError):
        Path(directory, _KILL).write_text("1")


def members(directory: str) -> list[int]:
    """Return the pids in `directory` and below it."""
    pids: list[int] = []
    for path in Path(directory).rglob(_PROCS):
        with contextlib.suppress(OSError):
            pids.extend(map(int, path.read_text().split()))
    return pids


def remove(directory: str) -> bool:
    """Remove `directory` and the ones below it that hold no process; return if all are gone."""
    for path, _, _ in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):
            Path(path).rmdir()
    return not Path(directory).exists()


def note_remains(directory: str, run_dir: str) -> None:
    """Write down, beside the removed `run_dir`, a `directory` that could not be removed."""
    file = Path(run_dir).with_name(f".{Path(run_dir).name}{_REMAINS}")
    with contextlib.suppress(OSError):
        file.write_text(directory)


def remove_remains(parent: str) -> None:
    """Remove the cgroups noted below `parent`, if the kernel has ended their processes."""
    for file in Path(parent).glob(f".*{_REMAINS}"):
        with contextlib.suppress(OSError):
            if remove(file.read_text()):
                file.unlink()
