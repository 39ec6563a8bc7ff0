"""Saving and loading on one rank or a few, and what tests of checkpoints say of it."""

import pytest
from ranks import MODELS, OPTIMIZERS, batches, build, run_ranks

import msrun
import msrun.parallel.checkpoint
from msrun.errors import UsageError

DP = {"mesh": {"dp": -1}}


def start(**config):
    """Return the runtime of this rank and its checkpoints."""
    runtime = msrun.init({**DP, **config})
    return runtime, msrun.parallel.checkpoint.Checkpoints(runtime)


def make(model="mlp", optimizer="adamw", **options):
    network = build(model, **options)
    return network, OPTIMIZERS[optimizer](network.parameters())


def train(network, optimizer, steps, model="mlp"):
    losses = []
    for x, y in batches(model)[steps]:
        optimizer.zero_grad()
        loss = MODELS[model][1](network(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def refusal(call, *args, **options):
    with pytest.raises(UsageError) as caught:
        call(*args, **options)
    return caught.value.message


def leaves(folder):
    return sorted(path.name for path in folder.iterdir())


def in_one(function):
    """Make a test of a function that runs on a single rank."""

    def test(tmp_path):
        run_ranks(function, 1, tmp_path)

    test.__doc__ = function.__doc__
    return test
