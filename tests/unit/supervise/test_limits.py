"""Limits of a process of its own, since they cannot be raised again."""

import subprocess
import sys

import pytest


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", f"import resource as r\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(("hard", "expected"), [(200, 200), (64, 64)])
def test_as_many_files_as_the_hard_limit_allows(hard, expected):
    code = f"""
from msrun.supervise import limits
r.setrlimit(r.RLIMIT_NOFILE, (50, {hard}))
print(limits.raise_open_files(), *r.getrlimit(r.RLIMIT_NOFILE))
"""
    assert run(code) == (0, f"{expected} {expected} {expected}\n")


def test_memory_beyond_the_bound_is_refused():
    code = """
from msrun.supervise import limits
limits.bound_memory(1 << 28)
limits.bound_memory(1 << 30)
print(len(bytearray(1 << 26)))
try:
    bytearray(2 << 30)
except MemoryError:
    print("refused")
"""
    assert run(code) == (0, f"{1 << 26}\nrefused\n")


def test_a_bound_above_the_hard_limit_leaves_that():
    code = """
from msrun.supervise import limits
r.setrlimit(r.RLIMIT_DATA, (1 << 28, 1 << 28))
limits.bound_memory(1 << 30)
print(r.getrlimit(r.RLIMIT_DATA)[0])
"""
    assert run(code) == (0, f"{1 << 28}\n")
