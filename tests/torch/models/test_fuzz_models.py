"""Drawn models in drawn configurations: each is equal to one process, or refused on all ranks."""

import re
import subprocess
import sys
from pathlib import Path

import fuzz_models
import pytest

pytestmark = pytest.mark.torch

# With every sixth case below CI has fifty; the nightly run draws others for 8 minutes.
FIRST_SEED, DRAWS = 1, 28
CASES = Path(__file__).with_name("fuzz_cases.txt")


def kept():
    lines = CASES.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_a_case_is_read_as_it_was_printed():
    case = fuzz_models.draw(3)
    assert fuzz_models.read_case(str(case)) == case
    assert fuzz_models.draw(3) == case


@pytest.mark.parametrize(
    ("answers", "answer"),
    [
        (["equal", "equal"], "equal"),
        (["refused: a", "refused: a"], "refused: a"),
        (["refused: a", "equal"], "traceback: on some ranks alone: refused: a"),
        (["hung", "refused: a"], "refused: a"),
        (["hung", "equal"], "hung"),
        (["wrong: b", "hung"], "wrong: b"),
    ],
)
def test_the_worst_answer_counts(answers, answer):
    assert fuzz_models.worst(answers) == answer


def fuzz(*words, timeout):
    """Run the fuzzer alone: ranks that are forked from here have what other tests left in it."""
    command = [sys.executable, fuzz_models.__file__, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))]
)
def test_what_was_found_is_found_no_more(first):
    """Every sixth case in CI."""
    fuzz(*(word for line in kept()[first::6] for word in ("--case", line)), timeout=280)


@pytest.mark.timeout(300)
def test_drawn_models_are_equal_or_refused():
    said = fuzz("--seed", str(FIRST_SEED), "--draws", str(DRAWS), timeout=280)
    assert int(re.search(r"(\d+) equal", said.splitlines()[-1])[1]) > DRAWS // 3
