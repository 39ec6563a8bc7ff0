"""What README.md shows is what happens."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support import PATIENCE, environment, script

pytestmark = [pytest.mark.process, pytest.mark.torch]

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
# No rank fails before all have met, or others would fail with it.
FAILING = """\
import os
import signal
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
print("step 40  loss 0.712\\nstep 41  loss 0.698")
if os.environ["RANK"] == "2":
    raise ValueError("label 10 is out of range at step 41")
signal.pause()
"""


def block(after):
    """Return the fenced block that follows `after`."""
    return re.compile(r"```\w+\n(.*?)```", re.DOTALL).search(README, README.index(after))[1]


def commands():
    return [line for line in block("## Use it").splitlines() if line.startswith("msrun ")]


def mask(text):
    text = re.sub(r"after \d+\.\d+s", "after Ns", re.sub(r"pid \d+", "pid N", text))
    return text.replace(f"node {os.uname().nodename},", "node laptop,")


def test_a_failure_is_reported_as_shown(tmp_path, finished):
    script(tmp_path, FAILING, "train.py")
    given = ("--job-id", "train-4be1c7", "--log-dir", "msrun_logs/train-4be1c7")
    job = finished(tmp_path, *given, "--nproc-per-node", 3, "train.py")

    shown = job.err[job.err.index("error: ") :].replace(str(tmp_path), "/home/ada")
    assert mask(shown) == mask(block("## When a job fails"))
    assert job.process.returncode == 1


def plan(folder, words):
    """Return the exit code and the output of `msrun plan`, which starts nothing."""
    words = words[1:] if words[:1] in (["plan"], ["verify"]) else words
    process = subprocess.run(
        [sys.executable, "-m", "msrun", "plan", *words],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return process.returncode, process.stdout + process.stderr


def test_the_first_command_is_one_that_can_be_run():
    *_, command = block("<!-- main-command -->").strip().split("&&")
    program, *words = shlex.split(command)
    code, output = plan(ROOT, words)

    assert program == ".venv/bin/msrun"
    assert code == 0, output
    assert re.search(r"^  workers-per-node +4 ", output, re.MULTILINE), output


@pytest.mark.parametrize("command", commands())
def test_every_command_shown_is_accepted(tmp_path, command):
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/__init__.py", "package/train.py"):
        script(tmp_path, "", name)
    script(tmp_path, "workers-per-node: 2\nscript: train.py\n", "job.yaml")
    script(tmp_path, "parallel:\n  mesh: {dp: -1}\n", "p.yaml")
    code, output = plan(tmp_path, shlex.split(command, comments=True)[1:])

    assert code == 0, output
