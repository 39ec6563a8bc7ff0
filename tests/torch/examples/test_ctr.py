"""The click-through example: two servers and four workers learn what one process does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[3]
PROGRAM = str(ROOT / "examples" / "train_ctr.py")
CONFIG = str(ROOT / "examples" / "configs" / "ctr_servers.yaml")


def learn(words, folder, name):
    """Run the example to its end; return its curve and its output."""
    curve = folder / f"{name}.json"
    env = os.environ | {"OMP_NUM_THREADS": "1", "CURVE": str(curve)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(curve.read_text()), done.stdout


def test_two_servers_and_four_workers_learn_what_one_process_does(tmp_path):
    alone, output = learn([PROGRAM], tmp_path, "alone")
    words = ["-m", "msrun", "--server-num", "2", "--worker-num", "4", "--parallel", CONFIG]
    together, _ = learn([*words, "--log-dir", str(tmp_path / "logs"), PROGRAM], tmp_path, "servers")

    assert together == pytest.approx(alone, abs=1e-6)
    assert alone[-1] < 0.2 < alone[0]
    for text in (output, (tmp_path / "logs" / "worker_0.log").read_text()):
        accuracy = text.splitlines()[-1].split()[1]
        assert float(accuracy) > 0.9
