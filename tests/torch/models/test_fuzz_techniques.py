"""Drawn shapes and grids of each technique: each is equal to one process, or refused."""

import re
import subprocess
import sys
from pathlib import Path

import fuzz_techniques
import pytest

pytestmark = pytest.mark.torch

# One draw of each kind: half a minute of two cores, each night.  More runs by hand.
FIRST_SEED, DRAWS = 9, len(fuzz_techniques.KINDS)
CASES = Path(__file__).with_name("technique_cases.txt")


def kept():
    return [line for line in CASES.read_text().splitlines() if line.startswith("{")]


def fuzz(*words):
    """Run the fuzzer alone: ranks that are forked from here have what other tests left in it."""
    command = [sys.executable, fuzz_techniques.__file__, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_case_is_read_as_it_was_printed():
    case = fuzz_techniques.draw(3)
    assert fuzz_techniques.read_case(str(case)) == case
    assert fuzz_techniques.draw(3) == case


@pytest.mark.timeout(300)
def test_what_was_found_is_found_no_more():
    fuzz(*(word for line in kept() for word in ("--case", line)))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_drawn_shapes_are_equal_or_refused():
    said = fuzz("--seed", str(FIRST_SEED), "--draws", str(DRAWS))
    assert int(re.search(r"(\d+) equal", said.splitlines()[-1])[1]) > DRAWS // 2
