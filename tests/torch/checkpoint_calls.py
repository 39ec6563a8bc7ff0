"""Saving and loading on one rank or a few, and what tests of checkpoints say of it."""

import json

import pytest
from ranks import MODELS, OPTIMIZERS, batches, build, run_warm

import msrun
import msrun.parallel.checkpoint.api
from msrun.errors import UsageError

DP = {"mesh": {"dp": -1}}


def start(**config):
    """Return the runtime of this rank and its checkpoints."""
    runtime = msrun.init({**DP, **config})
    return runtime, msrun.parallel.checkpoint.api.Checkpoints(runtime.config, runtime.context)


def make(model="mlp", optimizer="adamw", **options):
    network = build(model, **options)
    return network, OPTIMIZERS[optimizer](network.parameters())


def train(network, optimizer, steps, model="mlp"):
    losses = []
    for x, y in batches(model, steps=5)[steps]:
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


def drop_checksums(path):
    """Make the checkpoint `path` one of a release that made no checksums."""
    manifest = json.loads((path / "checkpoint.json").read_text())
    del manifest["checksum"], manifest["checksums"]
    (path / "checkpoint.json").write_text(json.dumps(manifest))


def in_one(function):
    """Make a test of a function that runs on a single rank."""

    def test(tmp_path):
        run_warm(_call, 1, test, tmp_path)

    # By these a rank finds the test, and with it the function.
    test.__module__, test.__qualname__ = function.__module__, function.__qualname__
    test.__doc__, test.function = function.__doc__, function
    return test


def _call(test, path):
    test.function(path)
