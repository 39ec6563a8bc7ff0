"""Losses that a script adds up over samples, slices or neighbours, in a loop of its own."""

import warnings

import pytest
import torch
from ranks import assert_equal_curves, run_warm
from torch.nn import functional

import msrun

pytestmark = pytest.mark.torch
CLASSES, SAMPLES = 4, 16
CONFIGS = {
    "dp": (2, {}),
    "dp, accumulate": (2, {"accumulate": 2}),
    "pp": (2, {"mesh": {"pp": 2}, "pipeline": {"stages": {"0": 0, "2": 1}, "microbatches": 2}}),
    "tp, accumulate": (
        2,
        {
            "mesh": {"tp": 2},
            "plan": [{"match": "0", "style": "colwise"}, {"match": "2", "style": "rowwise"}],
            "accumulate": 2,
        },
    ),
    "auto": (2, {"mode": "auto", "mesh": {"dp": 2}}),
}


def means(output, target, size=1):
    parts = zip(output.split(size), target.split(size), strict=True)
    return [functional.cross_entropy(a, b) for a, b in parts]


def squares(output, target):
    return [((output[i] - target[i]) ** 2).mean() for i in range(len(output))]


LOSSES = {
    "sum": lambda o, t: sum(means(o, t)),
    "mean": lambda o, t: sum(means(o, t)) / len(o),
    "sum of slices": lambda o, t: sum(means(o, t, 2)),
    "sum of a stack": lambda o, t: torch.stack(means(o, t)).sum(),
    "mean of a stack": lambda o, t: torch.stack(means(o, t, 2)).mean(),
    "sum of chunks": lambda o, t: sum(
        functional.cross_entropy(a, b) for a, b in zip(o.chunk(2), t.chunk(2), strict=True)
    ),
    "sum of squares": lambda o, t: sum(squares(o, t)),
}


def neighbours(output, target):
    return functional.cross_entropy(output, target) + (output[1:] - output[:-1]).square().mean()


def learned(config, name):
    """Return the losses of a model in steps on the same global batches."""
    loss_fn = LOSSES.get(name, neighbours)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, CLASSES)
    ).double()
    with msrun.init(config) as rt:
        ranks, rank = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
        x = torch.randn(3, SAMPLES, 6, generator=torch.Generator().manual_seed(1)).double()
        y = torch.arange(3 * SAMPLES).view(3, SAMPLES) % CLASSES
        model = rt.shard(model, sample=(x[0].chunk(ranks)[rank],))
        update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        losses = [
            rt.step(model, update, loss_fn, own.chunk(ranks)[rank], target.chunk(ranks)[rank])
            for own, target in zip(x, y, strict=True)
        ]
        return [float(loss) for loss in losses]


@pytest.mark.sampled
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loop_over_samples_or_slices_is_that_of_the_batch(name, config):
    expected = run_warm(learned, 1, {}, name)[0]
    ranks, config = CONFIGS[config]
    assert_equal_curves(run_warm(learned, ranks, config, name), expected)


def said(config):
    """Return what a first step says, by an error or a warning."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            learned(config, "neighbours")
        except msrun.UsageError as error:
            return error.message
    return "".join(str(each.message) for each in warned)


@pytest.mark.parametrize("config", CONFIGS)
def test_neighbours_in_the_batch_are_named(config):
    ranks, config = CONFIGS[config]
    for sentence in run_warm(said, ranks, config):
        assert "samples by their position" in sentence
