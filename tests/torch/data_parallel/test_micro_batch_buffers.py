"""Buffers that forward writes, in however many micro-batches: moved once a step, or refused."""

import functools

import pytest
import torch
from ranks import batches, run_warm
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import msrun

pytestmark = pytest.mark.torch


class Critic(nn.Module):
    """Calls a normalized layer twice, so that its buffers move twice a step."""

    def __init__(self, kind):
        super().__init__()
        self.first = KINDS[kind](nn.Linear(16, 16))
        self.last = KINDS[kind](nn.Linear(16, 10))

    def forward(self, x):
        return self.last(self.first(torch.tanh(self.first(x))))


KINDS = {
    "parametrized": parametrizations.spectral_norm,
    "older": spectral_norm,
    "weight norm": parametrizations.weight_norm,
    "older weight norm": weight_norm,
}


def build(kind):
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return Critic(kind).double()


def state(network):
    named = [*network.named_parameters(), *network.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


@functools.cache
def expected(kind):
    network = build(kind)
    update = torch.optim.SGD(network.parameters(), lr=0.1)
    for x, y in batches("mlp"):
        update.zero_grad()
        functional.cross_entropy(network(x.double()), y).backward()
        update.step()
    return state(network)


def trained(kind, config):
    runtime = msrun.init(config)
    network = runtime.shard(build(kind))
    update = torch.optim.SGD(network.parameters(), lr=0.1)
    for x, y in batches("mlp"):
        part = (t.chunk(runtime.world_size)[runtime.rank] for t in (x.double(), y))
        runtime.step(network, update, functional.cross_entropy, *part)
    return state(network)


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (1, {"accumulate": 4}),
        (2, {"accumulate": 4}),
        (2, {"accumulate": 2, "recompute": {"modules": ["first"]}}),
        (2, {}),
    ],
)
def test_spectral_norms_are_those_of_one_process(ranks, config, kind):
    for found in run_warm(trained, ranks, kind, config):
        torch.testing.assert_close(found, expected(kind), rtol=1e-9, atol=1e-11)


def in_pipeline():
    pipeline = {"stages": {"0": 0, "1": 1}, "microbatches": 2}
    runtime = msrun.init({"mesh": {"pp": 2}, "pipeline": pipeline})
    layers = [parametrizations.spectral_norm(nn.Linear(4, 4)) for _ in range(2)]
    with pytest.raises(msrun.ModelError) as caught:
        runtime.shard(nn.Sequential(*layers))
    return caught.value.message


def test_a_spectral_norm_in_micro_batches_of_a_pipeline_is_refused():
    assert run_warm(in_pipeline, 2)[0] == (
        "parallel.pipeline.microbatches: 2 micro-batches would each move "
        "0.parametrizations.weight.0._u of a spectral norm, which one process moves once a step"
    )


def by_script():
    """Split a batch in the script, once in one process and once under the runtime."""
    runtime = msrun.init()
    plain, network = build("parametrized"), runtime.shard(build("parametrized"))
    x, _ = batches("mlp")[0]
    for part in x.double().chunk(2):
        plain(part).sum().backward()
    with runtime.no_sync(network):
        network(x.double()[:8]).sum().backward()
    network(x.double()[8:]).sum().backward()
    return torch.equal(
        plain.first.parametrizations.weight[0]._u,
        network.get_buffer("first.parametrizations.weight.0._u"),
    )


def test_parts_that_the_script_makes_move_them_as_in_one_process():
    assert run_warm(by_script, 1) == [True]


class Writes(nn.Module):
    """Writes a buffer in forward: an average, or a cache that the first forward fills."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.body = nn.Linear(16, 10)
        self.register_buffer("written", torch.full((16,), float("nan")), persistent=False)

    def forward(self, x):
        if self.kind == "average":
            self.written = self.written.nan_to_num().lerp(x.mean(0), 0.1)
        elif self.kind == "counter":
            self.written.nan_to_num_().add_(1)
        elif self.kind == "cache":
            self.written.copy_(torch.arange(16.0))
        return self.body(x)


def writes(kind, config):
    runtime = msrun.init(config)
    network = runtime.shard(Writes(kind))
    before = network.body.weight.tolist()
    update = torch.optim.SGD(network.parameters(), lr=0.1)
    try:
        for x, y in batches("mlp"):
            runtime.step(network, update, functional.cross_entropy, x, y)
    except msrun.ModelError as error:
        assert before == network.body.weight.tolist()
        return error.message
    return None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_buffer_that_each_micro_batch_changes_is_refused(ranks):
    said = (
        "parallel.accumulate: each of 2 micro-batches changes written, which one process changes "
        "once a step"
    )
    for kind in ("average", "counter"):
        assert run_warm(writes, ranks, kind, {"accumulate": 2}) == [said] * ranks
    local = {"accumulate": 2, "batch_norm": "local"}
    assert run_warm(writes, ranks, "average", local) == [None] * ranks
    for kind in ("cache", "nothing"):
        assert run_warm(writes, ranks, kind, {"accumulate": 2}) == [None] * ranks
    assert run_warm(writes, ranks, "counter", {}) == [None] * ranks


class Counted(nn.Module):
    """Counts its calls in an attribute."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 10)

    def forward(self, x):
        self.calls += 1
        return self.linear(x) / self.calls


def counted(config):
    runtime = msrun.init(config)
    model = runtime.shard(nn.Sequential(nn.Linear(16, 16), Counted()))
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        runtime.step(model, update, functional.cross_entropy, *batches("mlp")[0])
    except msrun.ModelError as error:
        return error.message
    return ""


PIPELINE = {"stages": {"0": 0, "1": 1}, "microbatches": 2}


@pytest.mark.parametrize(
    ("ranks", "key", "config"),
    [
        (1, "accumulate", {"accumulate": 2}),
        (2, "pipeline.microbatches", {"mesh": {"pp": 2}, "pipeline": PIPELINE}),
    ],
)
def test_a_number_that_each_micro_batch_changes_is_refused(ranks, key, config):
    sentence = (
        f"parallel.{key}: each of 2 micro-batches changes 1.calls, which one process changes once "
        "a step"
    )
    assert run_warm(counted, ranks, config) == [sentence] * ranks
    assert run_warm(counted, ranks, {**config, "batch_norm": "local"}) == [""] * ranks
