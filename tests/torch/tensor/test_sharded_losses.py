"""Cross entropy of logits that ranks share by sample or position: no rank gathers them."""

import itertools
import math

import pytest
import torch
from ranks import Counted, run_warm
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

import msrun
from msrun.errors import ModelError

pytestmark = pytest.mark.torch

CLASSES = 6
OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 2},
    {"label_smoothing": 0.1},
    {"weight": torch.arange(1.0, 1 + CLASSES).double()},
    {"weight": torch.arange(1.0, 1 + CLASSES).double(), "ignore_index": 2, "label_smoothing": 0.1},
]
# Shape of the logits, and axes of each dim.
LAYOUTS = [
    ((8, CLASSES), ["tp", None]),
    ((8, CLASSES, 4), ["tp", None, None]),
    ((8, CLASSES, 4), [None, None, "tp"]),
    ((4, CLASSES, 4, 2), [None, None, "tp", None]),
]


def losses():
    """Return how far each case is from plain torch, and the bytes of each collective."""
    runtime = msrun.init({"mesh": {"tp": 2}, "mode": "manual"})
    worst, sent = [], []
    for (shape, dims), given, is_soft in itertools.product(LAYOUTS, OPTIONS, (False, True)):
        numbers = torch.Generator().manual_seed(3)
        logits = torch.randn(shape, generator=numbers).double().requires_grad_()
        target = torch.randint(0, CLASSES, (shape[0], *shape[2:]), generator=numbers)
        if is_soft:
            target = logits.detach().sin().softmax(1)
        left_out = "ignore_index" if is_soft else ""
        options = {key: value for key, value in given.items() if key != left_out}

        def loss(x, y, options=options):
            return functional.cross_entropy(x.cos(), y, **options)

        expected = loss(logits, target)
        weights = torch.randn(expected.shape, generator=numbers)
        (gradient,) = torch.autograd.grad((expected * weights).sum(), logits)
        with Counted() as counted:
            found = msrun.shard(loss, in_=[dims])(logits, target)
            (of_shards,) = torch.autograd.grad((found * weights).sum(), logits)
        worst.append(max((found - expected).abs().max(), (of_shards - gradient).abs().max()).item())
        if options.get("reduction") != "none":
            sent.append({name: n for name, n in counted.bytes.items() if name != "all_reduce"})
            sent[-1]["reduced"] = counted.bytes["all_reduce"]
    runtime.close()
    return max(worst), sent


def test_logits_stay_where_they_are():
    """The only thing that is gathered is the gradient of logits that the script gave whole."""
    for worst, sent in run_warm(losses, 2):
        assert worst < 1e-12
        assert {each["reduced"] for each in sent} <= {8, 16}


def all_ignored():
    runtime = msrun.init({"mesh": {"tp": 2}, "mode": "manual"})
    target = torch.full((4,), -100)
    loss = msrun.shard(functional.cross_entropy, in_=[["tp", None]])(torch.ones(4, 3), target)
    runtime.close()
    return loss.isnan().item()


def test_targets_that_are_all_ignored_have_no_mean():
    assert run_warm(all_ignored, 2) == [True, True]


def stepped():
    """Return the bytes of each collective of a step whose last layer divides samples further."""
    plan = [{"match": "0", "strategy": [[4, 1], [1, 1]]}]
    runtime = msrun.init({"mesh": {"dp": 2, "tp": 2}, "plan": plan})
    model = runtime.shard(torch.nn.Sequential(torch.nn.Linear(16, 256)))
    update = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        x, y = torch.randn(16, 16), torch.arange(16)
        with Counted() as counted:
            runtime.step(model, update, functional.cross_entropy, x, y)
    return dict(counted.bytes)


def test_a_strategy_that_divides_samples_gathers_no_logits():
    for sent in run_warm(stepped, 4):
        # Parameters' gradients, the loss and its count; 16 x 256 logits would be 16 KiB.
        assert max([0, *(n for name, n in sent.items() if "gather" in name)]) < 256


class StoppedError(Exception):
    pass


def after_an_error():
    """Return the loss of logits that all ranks have, after a loss function raised in a step."""
    runtime = msrun.init({"mesh": {"tp": 2}, "plan": [{"match": "*", "style": "vocab"}]})
    model = runtime.shard(torch.nn.Linear(4, CLASSES))
    optimizer = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def stop(output, target):
        functional.cross_entropy(output, target)
        raise StoppedError

    target = torch.tensor([0, 5, 2])
    with pytest.raises(StoppedError):
        runtime.step(model, optimizer, stop, torch.randn(3, 4), target)
    mesh = model.weight.device_mesh
    logits, target = (
        DTensor.from_local(x, mesh, [Replicate()]) for x in (torch.ones(3, CLASSES), target)
    )
    logits.requires_grad_()
    loss = functional.cross_entropy(logits, target)
    loss.backward()
    runtime.close()
    return loss.full_tensor().item()


def test_a_loss_that_raises_leaves_those_after_it_as_they_are():
    assert run_warm(after_an_error, 2) == [pytest.approx(math.log(CLASSES))] * 2


def differentiated_twice():
    runtime = msrun.init({"mesh": {"tp": 2}, "plan": [{"match": "0", "style": "vocab"}]})
    model = runtime.shard(torch.nn.Sequential(torch.nn.Linear(8, 8)))
    update = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 8, requires_grad=True)

    def loss_fn(output, target):
        loss = functional.cross_entropy(output, target, reduction="sum")
        (slope,) = torch.autograd.grad(loss, output, create_graph=True)
        return loss + slope.square().sum()

    with pytest.raises(ModelError) as caught:
        runtime.step(model, update, loss_fn, x, torch.arange(4))
    return caught.value.message


def test_a_loss_by_class_is_differentiated_once():
    said = "the gradient of a cross entropy of logits that ranks share by class cannot be "

    for found in run_warm(differentiated_twice, 2):
        assert found.startswith(said)
