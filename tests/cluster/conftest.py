"""Hosts for tests of clusters; `tests/lab/hosts.py` says what they are."""

from __future__ import annotations

import contextlib
import os

import hosts
import pytest
import wall_clock
from hosts import Lab

REQUIRE = ("CI", "MSRUN_REQUIRE_LAB")


def skip_without(what, lacks):
    """Skip the test where the machine lacks something; fail it where it must not."""
    if lacks and any(map(os.environ.get, REQUIRE)):
        pytest.fail(f"{what} is required here, but there is {lacks}", pytrace=False)
    if lacks:
        pytest.skip(f"no {what}: {lacks}")


@pytest.fixture
def lab_folder(tmp_path):
    """The directory for a lab, where there can be one."""
    skip_without("lab of hosts", hosts.missing())
    return tmp_path


@pytest.fixture
def clock(tmp_path):
    """A wall clock for the programs that get its variables."""
    skip_without("wrong wall clock", wall_clock.missing())
    return wall_clock.WallClock(tmp_path)


@pytest.fixture
def new_lab(lab_folder):
    """Make a lab whose hosts have the names given; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(*names, folder=lab_folder, **options):
            return stack.enter_context(Lab(folder, *names, **options))

        yield start


@pytest.fixture
def lab(new_lab):
    """Three hosts a, b and c."""
    return new_lab("a", "b", "c")
