"""`rt.metric` in a loss function: the quotient of one process, on every rank."""

import pytest
import torch
from ranks import batches, build, run_warm
from torch.nn import functional

import msrun
from msrun.errors import ModelError

pytestmark = pytest.mark.torch

PLAN = [{"match": "fc1", "style": "colwise"}, {"match": "fc2", "style": "rowwise"}]
STAGES = {"stages": {"fc1": 0, "fc2": 1, "fc3": 1}, "microbatches": 4}
CONFIGS = {
    "dp, accumulate": (2, {"accumulate": 2}),
    "zero 3": (2, {"optimizer": {"zero": 3}}),
    "dp x tp, vocab": (
        4,
        {"mesh": {"dp": 2, "tp": 2}, "plan": [*PLAN, {"match": "fc3", "style": "vocab"}]},
    ),
    "pp": (2, {"mesh": {"pp": 2}, "pipeline": STAGES}),
    "verify": (2, {"verify": "first_step"}),
}


def measured(config):
    """Return the metrics of two steps, read together, and those that came since."""
    rt = msrun.init(config)
    model = rt.shard(build("mlp"))
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def loss_fn(output, target):
        rt.metric("accuracy", (output.argmax(1) == target).sum(), len(target))
        if rt.coordinate.get("dp", 0) == 0:
            rt.metric("samples of the first", len(target))
        return functional.cross_entropy(output, target)

    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    for batch in batches("mlp", steps=2):
        rt.step(model, update, loss_fn, *(t.chunk(count)[share] for t in batch))
    return rt.metrics(), rt.metrics()


@pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank")
@pytest.mark.parametrize("name", CONFIGS)
def test_they_are_those_of_one_process(name):
    ((expected, none),) = run_warm(measured, 1, {})
    ranks, config = CONFIGS[name]

    for found, after in run_warm(measured, ranks, config):
        assert found["accuracy"] == pytest.approx(expected["accuracy"])
        assert found.keys() == expected.keys()
        assert after == none == {}


def refused():
    rt = msrun.init()
    with pytest.raises(ModelError) as caught:
        rt.metric("accuracy", torch.ones(3))
    return caught.value.message, caught.value.hint


def test_more_than_one_number_is_refused():
    said = (
        "rt.metric('accuracy', ...) has shape (3,), and must be a sum and a count, one number each"
    )
    hint = "rt.metric('accuracy', values.sum(), values.numel())"
    assert run_warm(refused, 1) == [(said, hint)]
