"""`scripts/verify_models.py`: real models under `verify: first_step`."""

import ast
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


def test_numbers_that_change_nothing_do_not_keep_a_step_from_being_verified():
    pytest.importorskip("transformers")
    done = run("MusicGen:dp")
    line, last = done.stdout.splitlines()
    assert (done.returncode, last) == (0, "1 equal"), done.stdout + done.stderr
    assert line.startswith("MusicGen:dp: equal: equal: msrun: step 1 equals one process: ")


# A model that one process alone cannot compute, in ranks that are forked from a process of its own.
TALKING = """
import dataclasses
import torch
from model_table import train_alone
from verify_models import ZOO, verify

class Talking(torch.nn.Linear):
    def forward(self, x):
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(torch.zeros(1))
        return super().forward(x)

entry = dataclasses.replace(
    ZOO["GPT by hand"],
    make=lambda: Talking(4, 8),
    inputs=lambda: (torch.randn(8, 4, dtype=torch.float64),),
    target=lambda: torch.randint(0, 8, (8,)),
)
torch.set_num_threads(1)
print(verify(entry, "dp", 120.0, train_alone(entry)))
"""


def test_a_step_that_cannot_be_compared_does_not_count_as_equal():
    command = [sys.executable, "-c", TALKING]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, check=False, cwd=SCRIPT.parent
    )
    word, sentence = ast.literal_eval(done.stdout)
    assert word == "not", done.stdout + done.stderr
    assert "nothing was verified in step 1: the loss or the model calls allreduce" in sentence


def test_a_cell_that_is_not_there_is_refused_with_the_choices():
    for cell in ("GPT-2:sideways", "gpt2"):
        done = run(cell)
        assert done.returncode == 2
        assert f"--only {cell}: no such cell (choose MODEL or MODEL:COLUMN, of the " in done.stderr
        assert "GPT-2; " in done.stderr
