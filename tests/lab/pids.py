"""A cgroup that bounds the number of processes, for tests of those that have no end to them."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def limited(most: int) -> Iterator[Path]:
    """Make a cgroup for so many processes; skip the test where that cannot be."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = {kind: path.strip("/") for _, kind, path in groups}
    v1 = Path("/sys/fs/cgroup/pids", own.get("pids", ""))
    parent = v1 if "pids" in own else Path("/sys/fs/cgroup", own.get("", ""))
    directory = parent / f"msrun-test-{uuid.uuid4().hex[:8]}"
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"no pids cgroup can be made: {error}")
    try:
        try:
            (directory / "pids.max").write_text(str(most))
        except OSError as error:
            pytest.skip(f"no pids cgroup can be limited: {error}")
        yield directory
    finally:
        _end(directory)
        directory.rmdir()


def _end(directory: Path) -> None:
    """Kill what a failed test has left, which can fork no more."""
    with contextlib.suppress(OSError):
        (directory / "pids.max").write_text("0")
        for pid in map(int, (directory / "cgroup.procs").read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
