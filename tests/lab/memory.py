"""A memory cgroup with a small limit, for tests of what the kernel kills."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

_BYTES = 300 << 20


@contextlib.contextmanager
def limited() -> Iterator[Path]:
    """Make a cgroup below the one this process is in; skip the test where that cannot be."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = {kind: path.strip("/") for _, kind, path in groups}
    if "memory" in own:
        parent, limit = Path("/sys/fs/cgroup/memory", own["memory"]), "memory.limit_in_bytes"
    else:
        parent, limit = Path("/sys/fs/cgroup", own.get("", "")), "memory.max"
    directory = parent / f"msrun-test-{uuid.uuid4().hex[:8]}"
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    try:
        try:
            (directory / limit).write_text(str(_BYTES))
        except OSError as error:
            pytest.skip(f"no memory cgroup can be limited: {error}")
        yield directory
    finally:
        directory.rmdir()


def entering(directory: Path) -> list[str]:
    """Return the words before a command that run it in a cgroup."""
    return ["sh", "-c", f'echo $$ > {directory}/cgroup.procs; exec "$@"', "sh"]
