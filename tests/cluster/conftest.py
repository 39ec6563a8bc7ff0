"""Hosts for tests of clusters; `tests/lab/hosts.py` says what they are."""

from __future__ import annotations

import contextlib
import os

import pytest
from hosts import Lab, missing

REQUIRE = ("CI", "MSRUN_REQUIRE_LAB")


@pytest.fixture
def lab_folder(tmp_path):
    """The directory for a lab; where there can be none the test is skipped, or must not be."""
    lacks = missing()
    if lacks and any(map(os.environ.get, REQUIRE)):
        pytest.fail(f"a lab of hosts is required here, but there is {lacks}", pytrace=False)
    if lacks:
        pytest.skip(f"no lab of hosts: {lacks}")
    return tmp_path


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
