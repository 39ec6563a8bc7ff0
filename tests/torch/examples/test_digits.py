"""The first job of the README: an ordinary torchrun script, under both launchers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "train_digits.py"
LAST_LINE = re.compile(r"accuracy (\d\.\d+) at (\d+) workers in \d+\.\d s")
TIMEOUT = 35.0  # three in one test stay below pytest's own limit


def test_learns_the_same_at_1_2_and_4_workers_under_msrun(tmp_path):
    found = {workers: train_under_msrun(workers, tmp_path) for workers in (1, 2, 4)}

    assert min(found.values()) >= 0.95, found
    assert max(found.values()) - min(found.values()) <= 0.02, found


@pytest.mark.slow
def test_learns_under_torchrun(tmp_path):
    options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    output = tmp_path / "output"

    run(["torch.distributed.run", *options, str(SCRIPT)], output)

    assert accuracy_in(output, workers=2) >= 0.95


def train_under_msrun(workers: int, folder: Path) -> float:
    """Return the accuracy that rank 0 printed last into its log."""
    logs = folder / f"logs-{workers}"
    # Otherwise each worker imports torch's compiler with its first optimizer.
    options = ["--nproc-per-node", str(workers), "--preload", "msrun.parallel.preload"]
    options += ["--log-dir", str(logs)]
    run(["msrun", *options, str(SCRIPT)], folder / f"output-{workers}")
    return accuracy_in(logs / "worker_0.log", workers)


def run(module: list[str], output: Path) -> None:
    """Run a module to its end; the output goes to a file, which no orphan can keep open."""
    with output.open("wb") as file:
        try:
            process = subprocess.run(
                [sys.executable, "-m", *module],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                # On a busy machine the threads of a lone worker would spin for each other.
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                timeout=TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired as expired:
            pytest.fail(f"{expired}\n{output.read_text(errors='replace')}")
    assert process.returncode == 0, output.read_text(errors="replace")


def accuracy_in(log: Path, workers: int) -> float:
    text = log.read_text(errors="replace")
    match = LAST_LINE.fullmatch(text.splitlines()[-1]) if text else None
    assert match, f"no last line with the accuracy:\n{text}"
    assert int(match[2]) == workers, text
    return float(match[1])
