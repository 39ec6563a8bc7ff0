"""Every step is a beat."""

import os

import pytest
from ranks import OPTIMIZERS, batches, build, run_ranks
from torch.nn import functional

import msrun
from msrun.worker.beat import LAYOUT

pytestmark = pytest.mark.torch


def beats(folder):
    """Return how often this rank beat after two steps, and after a word of its own."""
    rank = os.environ["RANK"]
    os.environ.update(MSRUN_RUN_DIR=str(folder), MSRUN_GENERATION="0", RANK_ID=rank)
    runtime = msrun.init()
    network = runtime.shard(build("mlp"))
    update = OPTIMIZERS["sgd"](network.parameters())
    for x, y in batches("mlp", steps=2):
        runtime.step(network, update, functional.cross_entropy, x, y)
    path = folder / "g0" / f"beat_{rank}"
    found = [LAYOUT.unpack(path.read_bytes())[0]]
    runtime.beat()
    return [*found, LAYOUT.unpack(path.read_bytes())[0]]


def test_steps_beat(tmp_path):
    (tmp_path / "g0").mkdir()

    assert run_ranks(beats, 2, tmp_path) == [[2, 3], [2, 3]]
