"""The walk of docs/kubernetes.md from a kind cluster to GPUs, command by command."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("kubernetes")

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]
PAGE = (Path(__file__).parents[3] / "docs" / "kubernetes.md").read_text()
WALK = PAGE.partition("## From a kind cluster to GPUs\n")[2].partition("\n## ")[0]
COMMANDS = re.findall(r"^    ((?:msrun|kubectl) .*)$", WALK, re.MULTILINE)
# In the place of the example, which needs scikit-learn: a job that takes a while and says its rank.
TRAIN = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
time.sleep(3)
dist.barrier()
mounted = os.path.ismount("/mnt/data")
print("rank", dist.get_rank(), "of", dist.get_world_size(), mounted, flush=True)
dist.destroy_process_group()
"""


def test_every_command_of_the_walk_runs(new_cluster, tmp_path):
    cluster = new_cluster(**{f"n{number}": {"nvidia.com/gpu": 8} for number in range(4)})
    image = tmp_path / "image"
    image.mkdir()
    (image / "train_digits.py").write_text(TRAIN)
    cluster.pods.workdirs |= dict.fromkeys(("train:1", "registry/train:1"), str(image))
    (claim,) = re.findall(r"```yaml\n(.*?)```", WALK, re.DOTALL)
    cluster.kubectl("apply", "-f", "-", stdin=claim)
    said = {}
    for command in COMMANDS:
        words = shlex.split(command)
        words[:1] = [sys.executable, "-m", "msrun"] if words[0] == "msrun" else ["kubectl"]
        is_made_here = words[:2] == ["kubectl", "create"]
        if is_made_here:  # which kubectl sends in Protobuf, and the stand-in speaks JSON
            words += ["--dry-run=client", "-o", "json"]
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env={**cluster.environ(), "XDG_RUNTIME_DIR": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        said[command] = done.stdout + done.stderr
        assert done.returncode == 0, (command, said[command], cluster.describe())
        if is_made_here:
            cluster.kubectl("apply", "-f", "-", stdin=done.stdout)
    first, listed, _, _, taken, _, logs, _, nodes, _, last = said.values()
    assert "rank 0 of 4 False" in first
    assert "job.batch/train-digits-" in listed
    assert taken.count("deleted") == 1
    assert re.search(r"rank \d of 2", logs)
    assert re.search(r"^n3 +8$", nodes, re.MULTILINE)
    assert "rank 0 of 4 True" in last
