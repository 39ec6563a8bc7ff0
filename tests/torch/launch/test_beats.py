"""Every step is a beat, and so is every forward pass."""

import os

import pytest
import torch
from ranks import OPTIMIZERS, batches, build, run_ranks
from torch.nn import functional

import msrun
from msrun.worker.beat import LAYOUT

pytestmark = pytest.mark.torch


def beats(folder):
    """Return how often this rank beat in two steps, an evaluation, and a word of its own."""
    rank = os.environ["RANK"]
    os.environ.update(MSRUN_RUN_DIR=str(folder), MSRUN_GENERATION="0", RANK_ID=rank)
    runtime = msrun.init()
    network = runtime.shard(build("mlp"))
    update = OPTIMIZERS["sgd"](network.parameters())
    path = folder / "g0" / f"beat_{rank}"
    found = [0]

    def count():
        found.append(LAYOUT.unpack(path.read_bytes())[0])
        return found[-1] - found[-2]

    data = list(batches("mlp", steps=2))
    for x, y in data:
        runtime.step(network, update, functional.cross_entropy, x, y)
    in_steps = count()
    network.eval()
    with torch.no_grad():
        for x, _ in data * 5:
            network(x)
    in_evaluation = count()
    runtime.beat()
    return in_steps >= 2, in_evaluation, count()


def test_steps_and_evaluations_beat(tmp_path):
    (tmp_path / "g0").mkdir()

    assert run_ranks(beats, 2, tmp_path) == [(True, 10, 1)] * 2


def compiled(folder):
    """Return what a compiled model gives, which is compiled as a whole."""
    rank = os.environ["RANK"]
    os.environ.update(MSRUN_RUN_DIR=str(folder), MSRUN_GENERATION="0", RANK_ID=rank)
    runtime = msrun.init()
    network = runtime.shard(torch.nn.Linear(4, 2)).eval()
    x = torch.ones(3, 4)
    fast = torch.compile(network, backend="eager", fullgraph=True)
    with torch.no_grad():
        return torch.equal(fast(x), network(x))


def test_a_model_can_still_be_compiled_as_a_whole(tmp_path):
    (tmp_path / "g0").mkdir()

    assert run_ranks(compiled, 1, tmp_path) == [True]
