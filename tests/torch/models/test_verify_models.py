"""`scripts/verify_models.py`: real models under `verify: first_step`."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SCRIPT = Path(__file__).parents[3] / "scripts" / "verify_models.py"
LIMIT = 300.0


def run(*cells):
    only = [part for cell in cells for part in ("--only", cell)]
    command = [sys.executable, str(SCRIPT), "--limit", "120", *only]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)


def test_steps_of_real_models_equal_one_process():
    pytest.importorskip("transformers")
    done = run("GPT-2:dp", "LSTM:zero 3")
    *lines, last = done.stdout.splitlines()
    assert (done.returncode, last) == (0, "2 equal"), done.stdout + done.stderr
    assert [line.partition(": equal: ")[0] for line in lines] == ["GPT-2:dp", "LSTM:zero 3"]
    assert all("step 1 equals one process: loss " in line for line in lines)


def test_a_step_that_cannot_be_compared_does_not_count_as_equal():
    pytest.importorskip("transformers")
    done = run("MusicGen:dp")
    line, last = done.stdout.splitlines()
    assert (done.returncode, last) == (0, "1 not"), done.stdout + done.stderr
    assert line.startswith("MusicGen:dp: not: equal: ")
    assert "nothing was verified in step 1: the model draws random numbers" in line


def test_a_cell_that_is_not_there_is_refused_with_the_choices():
    for cell in ("GPT-2:sideways", "gpt2"):
        done = run(cell)
        assert done.returncode == 2
        assert f"--only {cell}: no such cell (choose MODEL or MODEL:COLUMN, of the " in done.stderr
        assert "GPT-2; " in done.stderr
