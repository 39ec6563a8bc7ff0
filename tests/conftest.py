"""What holds for every test: none leaves a process behind."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Iterator

import hypothesis
import psutil
import pytest

# Every process that a test starts inherits this mark, also when its parent is gone.
MARK = "MSRUN_TESTS_SESSION"
# Markers of tests whose processes have children of their own.
STARTS_TREES = ("process", "torch", "device")
# What tests/torch/ranks.py calls its processes, which wait for the next test of their file.
WAITING = "warm rank"
# A process that was told to end may need a moment to be gone.
GRACE = 0.5

# A busy machine is no failure, and the same commit must give the same answer.
hypothesis.settings.register_profile("msrun", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("msrun")


def pytest_configure() -> None:
    os.environ[MARK] = uuid.uuid4().hex
    # Tests start hundreds of processes, and each would compile what it imports.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


@pytest.fixture(autouse=True)
def reap(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test when it leaves a live process behind, say which, and end it."""
    with_orphans = any(map(request.node.get_closest_marker, STARTS_TREES))
    before = _living(with_orphans=with_orphans)
    yield
    left = _living(with_orphans=with_orphans) - before
    if not left:
        return
    _, left = map(set, psutil.wait_procs(left, timeout=GRACE))
    lines = [f"  {_describe(process)}" for process in sorted(left, key=lambda p: p.pid)]
    for process in left:
        with contextlib.suppress(psutil.Error):  # ended by itself meanwhile
            process.kill()
    psutil.wait_procs(left, timeout=GRACE)
    if lines:
        pytest.fail("\n".join(["left behind by this test, now killed:", *lines]), pytrace=False)


def _living(*, with_orphans: bool) -> set[psutil.Process]:
    """Return descendants of this process, and with orphans also those that lost their parent."""
    found = set(psutil.Process().children(recursive=True))
    if with_orphans:
        found |= {process for process in psutil.process_iter() if _has_our_mark(process)}
    return {process for process in found if _counts(process)}


def _has_our_mark(process: psutil.Process) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get(MARK) == os.environ[MARK]
    except psutil.Error:  # gone, or another user's
        return False


def _counts(process: psutil.Process) -> bool:
    """Whether `process` runs and is not one that ends by itself, with this one or its file."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if process.name() == WAITING and process.ppid() == os.getpid():
            return False
        return not any("resource_tracker" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        command = " ".join(process.cmdline()) or process.name()
        return f"pid {process.pid}, {process.status()}: {command}"
    except psutil.Error:
        return f"pid {process.pid}"
