"""Batches of any structure, and models that return their loss."""

import functools
from collections import UserDict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError
from msrun.parallel.local import full_tensor
from msrun.parallel.losses.batch import map_leaves, own_loss, split_batch

pytestmark = pytest.mark.torch

SAMPLES = 8
CONFIGS = {
    "dp 2": (2, {}),
    "dp 2, accumulate 2": (2, {"accumulate": 2}),
    "zero 3": (2, {"optimizer": {"zero": 3}}),
    "pp 2": (
        2,
        {"mesh": {"pp": 2}, "pipeline": {"stages": {"a": 0, "b": 1}, "microbatches": 2}},
    ),
    "pp 2 x dp 2": (
        4,
        {"mesh": {"pp": 2, "dp": 2}, "pipeline": {"stages": {"a": 0, "b": 1}, "microbatches": 2}},
    ),
    "dp 2 x tp 2": (
        4,
        {
            "mesh": {"dp": 2, "tp": 2},
            "plan": [{"match": "a", "style": "colwise"}, {"match": "b", "style": "rowwise"}],
        },
    ),
}


class Pair(NamedTuple):
    x: Any
    scale: float


class Output(dict):
    """An output with fields, as transformers has."""

    @property
    def loss(self):
        return self["loss"]


class OwnLoss(nn.Module):
    """Returns its loss beside its logits."""

    wrap = staticmethod(lambda loss, logits: Output(loss=loss, logits=logits))

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x, labels):
        logits = self.b(functional.relu(self.a(x)))
        return self.wrap(functional.cross_entropy(logits, labels), logits)


class OfTuple(OwnLoss):
    wrap = staticmethod(lambda loss, logits: (loss, logits))


class OfTensor(OwnLoss):
    wrap = staticmethod(lambda loss, _: loss)


class OfPair(OwnLoss):
    def forward(self, x, labels):
        logits = self.b(functional.relu(self.a(x)))
        losses = functional.cross_entropy(logits, labels, reduction="sum")
        return losses, (labels >= 0).sum()


class ByName(OwnLoss):
    """Returns logits, from inputs with names."""

    def forward(self, x, labels=None):
        del labels
        return self.b(functional.relu(self.a(x)))


MODELS = {kind.__name__: kind for kind in (OwnLoss, OfTuple, OfTensor, OfPair)}


def data():
    draw = torch.Generator().manual_seed(5)
    found = []
    for _ in range(3):
        x = torch.randn(SAMPLES, 6, generator=draw).double()
        y = torch.randint(0, 5, (SAMPLES,), generator=draw)
        y[torch.rand(SAMPLES, generator=draw) < 0.4] = -100
        y[0] = 1
        found.append((x, y))
    return found


def build(kind):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return kind().double()


def one_process(kind):
    model = build(kind)
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in data():
        update.zero_grad()
        output = model(x, y)
        if kind is ByName:
            loss = functional.cross_entropy(output, y)
        else:
            loss = own_loss(output)
            loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def difference(config, kind, call):
    """Return by how much losses and weights differ; `call(step, x, y)` runs a step."""
    losses, weights = one_process(kind)
    rt = msrun.init(config)
    model = rt.shard(build(kind))
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    count, share = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
    worst = 0.0
    for batch, expected in zip(data(), losses, strict=True):
        x, y = (t.chunk(count)[share] for t in batch)
        loss = call(functools.partial(rt.step, model, update), x, y)
        worst = max(worst, abs(loss.item() - expected))
    for name, param in model.named_parameters():
        worst = max(worst, (full_tensor(param.detach()) - weights[name]).abs().max().item())
    rt.close()
    return worst


def own_losses(config):
    def call(step, x, y):
        return step(UserDict(x=x, labels=y))

    return {name: difference(config, kind, call) for name, kind in MODELS.items()}


@pytest.mark.parametrize("name", [name for name in CONFIGS if "pp" not in name])
@pytest.mark.few(2)
def test_a_model_returns_its_loss(name):
    ranks, config = CONFIGS[name]
    found = run_warm(own_losses, ranks, {"mesh": {"dp": -1}, **config})

    assert found == [dict.fromkeys(MODELS, pytest.approx(0, abs=1e-12))] * ranks


def traced_losses(config):
    def call(step, x, y):
        return step(UserDict(labels=y, x=x))

    return [difference(config, kind, call) for kind in (OfTensor, OwnLoss)]


@pytest.mark.parametrize("name", [name for name in CONFIGS if "pp" in name])
def test_a_model_in_stages_returns_its_loss(name):
    ranks, config = CONFIGS[name]

    assert run_warm(traced_losses, ranks, config) == [[pytest.approx(0, abs=1e-12)] * 2] * ranks


def named_inputs(config):
    def by_name(step, x, y):
        return step(functional.cross_entropy, {"x": x}, y)

    def by_position(step, x, y):
        return step(functional.cross_entropy, x, y)

    return [difference(config, ByName, call) for call in (by_name, by_position)]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.few(3)
def test_inputs_have_names(name):
    ranks, config = CONFIGS[name]
    found = run_warm(named_inputs, ranks, {"mesh": {"dp": -1}, **config})

    assert found == [[pytest.approx(0, abs=1e-12)] * 2] * ranks


def without_loss_function():
    def by_position(step, x, y):
        return step(None, x, y)

    def in_a_list(step, x, y):
        return step([x, y])

    return [difference({}, OwnLoss, call) for call in (by_position, in_a_list)]


def test_the_batch_of_a_model_with_its_loss_is_positional_too():
    assert run_warm(without_loss_function, 2) == [[pytest.approx(0, abs=1e-12)] * 2] * 2


class OfMapping(nn.Module):
    """Takes the whole batch as one argument."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, batch):
        return self.linear(batch["x"]).square().mean()


def refusals():
    rt = msrun.init()
    model = rt.shard(OwnLoss())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.ones(4, 6), torch.zeros(4, dtype=torch.long)
    found = []
    for batch in (
        (functional.cross_entropy, x),
        (functional.cross_entropy,),
        (None,),
        ({"x": x[:0], "labels": y[:0]},),
        ({"x": "text"},),
    ):
        with pytest.raises(ModelError) as caught:
            rt.step(model, update, *batch)
        found.append(caught.value.message)
    other = rt.shard(ByName())
    update = rt.optimizer(torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(ModelError) as caught:
        rt.step(other, update, {"x": x})
    found.append(caught.value.message)
    whole = rt.shard(OfMapping())
    update = rt.optimizer(torch.optim.SGD(whole.parameters(), lr=0.1))
    return found, rt.step(whole, update, {"x": x[:, :3]}).shape


def test_sentences_about_batches():
    sentences = [
        "rt.step needs the inputs and the target, not 1 value(s)",
        "rt.step needs the inputs and the target, not 0 value(s)",
        "rt.step needs a batch",
        "the batch has no sample",
        "the batch holds no tensor with a first dim of samples",
        "the loss has shape (4, 5), and must be one number",
    ]

    assert run_warm(refusals, 2) == [(sentences, ())] * 2


def test_own_losses_are_found_or_refused():
    loss = torch.ones((), requires_grad=True) * 2
    for output in (loss, {"loss": loss}, (loss, torch.ones(3)), Output(loss=loss)):
        assert own_loss(output) is loss
    for output in ({"logits": loss}, (torch.ones(3), loss), None):
        with pytest.raises(ModelError, match="without a loss"):
            own_loss(output)
    with pytest.raises(ModelError, match="balances experts over a whole batch"):
        own_loss({"loss": loss, "aux_loss": loss})
    assert own_loss({"loss": loss, "aux_loss": loss}, is_whole=True) is loss


class SequenceFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.RNN(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.cells(x)[0][-1])


def sequence_first(config):
    rt = msrun.init(config)
    x, y = torch.randn(5, 8, 8), torch.randint(0, 4, (8,))
    model = rt.shard(SequenceFirst(), sample=(x,) if rt.config.pipeline else None)
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        return rt.step(model, optimizer, functional.cross_entropy, x, y).item() > 0
    except ModelError as error:
        return error.message


SEQUENCES = {"stages": {"cells": 0, "head": 1}, "microbatches": 2}


@pytest.mark.parametrize(
    "config", [{"accumulate": 2}, {"mesh": {"pp": 2}, "pipeline": SEQUENCES}, {}]
)
def test_a_batch_with_the_sequence_first_is_not_cut_wrongly(config):
    refused = (
        "the first input has 5 rows and the target 8, so 2 micro-batches cannot have their own "
        "part of both"
    )
    assert run_warm(sequence_first, 2, config) == [refused if config else True] * 2


def test_batches_are_cut_and_keep_their_types():
    x = torch.arange(4)
    batch = UserDict(
        x=x,
        deep=[{"x": x}, Pair(x, 0.5)],
        scalar=torch.tensor(1.0),
        mask=torch.ones(3, 4),
        name="text",
        none=None,
    )
    first, second = split_batch(batch, 2)

    assert type(first) is UserDict
    assert [part["x"].tolist() for part in (first, second)] == [[0, 1], [2, 3]]
    assert second["deep"][0]["x"].tolist() == [2, 3]
    assert second["deep"][1] == Pair(pytest.approx([2, 3]), 0.5)
    assert type(second["deep"][1]) is Pair
    assert all(second[key] is batch[key] for key in ("scalar", "mask", "name", "none"))
    assert batch["x"] is x
    assert map_leaves(lambda t: t + 1, MappingProxyType({"x": x}))["x"].tolist() == [1, 2, 3, 4]


class OfSums(OwnLoss):
    """Adds sums to its loss: over weights alone, over the batch, over a mixture made in place."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x, labels):
        output = super().forward(x, labels)
        penalty = 1e-2 * torch.stack([p.pow(2).sum() for p in self.parameters()]).sum()
        if self.kind == "batch":
            penalty = penalty + 1e-2 * output["logits"].pow(2).sum()
        if self.kind == "written":
            mixture = self.a.weight * 1.0
            mixture += output["logits"].pow(2).mean(0).sum()
            penalty = penalty + 1e-2 * mixture.sum()
        output["loss"] = output["loss"] + penalty
        return output


SUMMING = {name: functools.partial(OfSums, name) for name in ("weights", "batch", "written")}


def summed(name):
    def call(step, x, y):
        return step({"x": x, "labels": y})

    try:
        return difference({}, SUMMING[name], call)
    except ModelError as error:
        return error.message


@pytest.mark.parametrize("name", SUMMING)
def test_sums_over_weights_and_over_the_batch_are_told_apart(name):
    for found in run_warm(summed, 2, name):
        if name == "weights":
            assert found == pytest.approx(0, abs=1e-12)
        else:
            assert "over a part of the batch" in found


class OfItems(OwnLoss):
    """Divides the sum of losses by what the batch says, as models of transformers do."""

    def forward(self, x, labels, num_items_in_batch=None):
        logits = self.b(functional.relu(self.a(x)))
        if num_items_in_batch is None:
            return {"loss": functional.cross_entropy(logits, labels)}
        loss = functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch
        return {"loss": loss}


def with_items(config, counted):
    """Return losses, or the refusal, where the batch has the number of its targets."""
    rt = msrun.init(config)
    count, share = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
    x, y = (part.chunk(count)[share] for part in data()[0])
    sample = {"x": x, "labels": y} if config.get("pipeline") else None
    model = rt.shard(build(OfItems), sample)
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for x, y in data():
        own = y.chunk(count)[share]
        items = {"all": (y >= 0).sum(), "own": int((own >= 0).sum()), "wrong": len(own)}[counted]
        batch = {"x": x.chunk(count)[share], "labels": own, "num_items_in_batch": items}
        try:
            losses.append(rt.step(model, update, batch).item())
        except ModelError as error:
            return error.message
    return losses


IN_STAGES = {"mesh": {"pp": 2}, "pipeline": {"stages": {"a": 0, "b": 1}, "microbatches": 2}}


@pytest.mark.sampled
@pytest.mark.parametrize("counted", ["all", "own"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"optimizer": {"zero": 3}},
        {"accumulate": 2},
        {"verify": "first_step"},
        IN_STAGES,
        pytest.param(IN_STAGES | {"mesh": {"pp": 2, "dp": 2}}, marks=pytest.mark.slow),
    ],
)
def test_targets_that_a_script_counted_are_compared(config, counted):
    expected = run_warm(with_items, 1, {}, "all")[0]
    world = 4 if config.get("mesh") == {"pp": 2, "dp": 2} else 2

    for losses in run_warm(with_items, world, config, counted):
        assert losses == pytest.approx(expected, abs=1e-12)


def test_targets_that_a_script_counted_otherwise_are_refused():
    y = data()[0][1]
    said = (
        f"num_items_in_batch is {len(y)} over all ranks, and {(y >= 0).sum()} targets count; no "
        "weight was changed"
    )
    assert run_warm(with_items, 2, {}, "wrong") == [said] * 2
    assert run_warm(with_items, 2, IN_STAGES, "wrong") == [said] * 2


def test_a_first_tensor_that_all_samples_share_is_named():
    batch = {"positions": torch.zeros(1, 5), "x": torch.zeros(4, 5)}

    with pytest.raises(ModelError) as error:
        split_batch(batch, 2)

    assert error.value.message == (
        "parallel.accumulate: 2 micro-batches of a batch of 1 sample(s): the first tensor of the "
        "batch has shape (1, 5), and another one has (4, 5)"
    )
    assert "put one with a row for each sample first" in error.value.hint


def compiled_around():
    rt = msrun.init()
    model = torch.compile(rt.shard(nn.Linear(4, 3)))
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(msrun.UsageError) as error:
        rt.step(model, optimizer, functional.cross_entropy, torch.ones(2, 4), torch.ones(2).long())
    return error.value.message, error.value.hint


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, at the import
def test_a_model_that_is_compiled_after_shard_is_told_what_compiles_it_in_place():
    assert (
        run_warm(compiled_around, 2)
        == [
            (
                "OptimizedModule is not a model of rt.shard",
                "pass what rt.shard returned; model.compile() compiles it in place",
            )
        ]
        * 2
    )
