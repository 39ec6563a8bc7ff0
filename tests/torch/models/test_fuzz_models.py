"""Drawn models in drawn configurations: each is equal to one process, or refused on all ranks."""

import subprocess
import sys
from pathlib import Path

import fuzz_models
import pytest

pytestmark = pytest.mark.torch

FIRST_SEED, DRAWS = 1, 50
CASES = Path(__file__).with_name("fuzz_cases.txt")


@pytest.fixture
def ranks():
    """Ranks that wait for cases."""
    found = fuzz_models.make_ranks()
    yield found
    found.close()


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


@pytest.mark.timeout(300)
def test_what_was_found_is_found_no_more():
    # In a process of its own: ranks that are forked from here have what other tests left in it.
    cases = [word for line in kept() for word in ("--case", line)]
    command = [sys.executable, fuzz_models.__file__, *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_drawn_models_are_equal_or_refused(ranks):
    seeds = range(FIRST_SEED, FIRST_SEED + DRAWS)
    found = {seed: fuzz_models.ask(ranks, fuzz_models.draw(seed)) for seed in seeds}
    failed = {f"seed {seed}": said for seed, said in found.items() if fuzz_models.has_failed(said)}
    assert not failed
    assert sum(said == "equal" for said in found.values()) > DRAWS // 3
