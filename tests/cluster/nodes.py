"""Launchers on the hosts of a lab."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from hosts import Host
from support import Job, shell


class Node(Job):
    """One launcher of a cluster; in all else a job as on one machine.

    Args:
        host: Where it runs; its `XDG_RUNTIME_DIR` is in the lab's folder.
        arguments: Words after `msrun`.
        options: As of a job; `wrapper` is a command of this machine that enters the host.
    """

    def __init__(self, host: Host, arguments: Sequence[object], **options: object) -> None:
        self.host = host
        self.is_expected_clean = True
        folder = host.lab.folder
        runtime = folder / f"run-{host.name}"
        runtime.mkdir(mode=0o700, exist_ok=True)
        wrapper = [*options.pop("wrapper", ()), *host.enter(folder)]
        super().__init__(folder, arguments, runtime=runtime, wrapper=wrapper, **options)

    @property
    def pid(self) -> int:
        """The launcher itself, not the process that entered its host."""
        return psutil.Process(self.process.pid).children()[0].pid

    def kill_host(self) -> None:
        """SIGKILL all processes of its host at once, so that nothing there can clean up."""
        self.host.kill_all()
        self.is_expected_clean = False

    def leftovers(self) -> list[str]:
        """Describe what an ended launcher has left on a host that still is what it was."""
        return super().leftovers() if self.host.pid and self.is_expected_clean else []


class Identity(NamedTuple):
    """What a worker was told."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    host: str


WHO = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE"
TELL_WHO = f"echo {' '.join('$' + name for name in WHO.split())} $(hostname)"


def tell_who(rest: str = "") -> list[str]:
    """Return the words after `msrun` of workers that write their identity, then do the rest."""
    return shell(f"{TELL_WHO}; {rest}")


def identities(directories: Iterable[Path]) -> list[Identity]:
    """Return what workers have written into log directories, in the order of ranks."""
    paths = [path for directory in directories for path in directory.glob("worker_*.log")]
    lines = [path.read_text().splitlines()[0].split() for path in paths]
    return sorted(Identity(*map(int, numbers), host) for *numbers, host in lines)
