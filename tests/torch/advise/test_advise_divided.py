"""What `msrun advise` says of divided models: memory is as measured, training as in one process."""

from __future__ import annotations

import pytest
import torch
import yaml
from advise_models import LOCAL, TOKENS, TOTAL, local, made, measured, of_length, request
from ranks import run_ranks
from torch.nn import functional

import msrun
from msrun.parallel.advise.advise import advise_model
from msrun.parallel.advise.ranks import operators_divided
from msrun.parallel.advise.stages import stages_of
from msrun.parallel.auto.left_out import has_modules

pytestmark = [pytest.mark.torch, pytest.mark.own_process]

STEPS = 2


def advised(name):
    """Return for each kind of division its row and its configuration."""
    with torch.device("meta"):
        net = made(name)
    sample = [{key: x.to("meta") for key, x in of_length(name)(2).items()}]
    rows = {row.name: row for row in advise_model(net, sample, LOCAL, request(1)).rows}
    found = {}
    for row in rows.values():
        if row.name.split()[0] in ("tp", "pp", "ep", "cp") and "zero" not in row.name:
            found[row.name] = row
    return found


def written(row):
    """Return the configuration of a row, as the command writes it."""
    return yaml.safe_load(yaml.safe_dump(row.config, sort_keys=False))


CASES = ("gpt2", "llama", "bert", "vit", "t5", "mixtral", "llama long")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_ranks_of_divided_models_take_no_more_than_the_estimate(name):
    pytest.importorskip("transformers")
    rows = advised(name)
    assert {"tp 2", "pp 2"} <= set(rows)
    assert ("ep 2" in rows) == (name == "mixtral")
    assert ("cp 2" in rows) == ("long" in name)
    for row in rows.values():
        for peak in run_ranks(measured, 2, name, written(row)):
            assert peak <= 1.05 * row.nbytes, (row.name, peak, row.nbytes)


def trained(name, config):
    """Return losses of some steps, and whole weights."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    net = made(name).eval()  # without dropout
    if name != "mixtral":  # torch has no grouped product of doubles
        net.double()
    torch.manual_seed(5)
    steps = [of_length(name)(TOTAL) for _ in range(STEPS)]
    net = rt.shard(net, sample=local(steps[0], rt))
    optimizer = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    return [rt.step(net, optimizer, local(batch, rt)).item() for batch in steps]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "llama long"])
def test_what_is_recommended_trains_as_one_process(name):
    pytest.importorskip("transformers")
    (losses,) = run_ranks(trained, 1, name, {})
    for row in advised(name).values():
        for found in run_ranks(trained, 2, name, written(row)):
            assert found == pytest.approx(losses, rel=1e-5), row.name


def test_a_search_looks_at_modules_of_models_that_have_them():
    experts = torch.nn.Module()
    experts.up = torch.nn.Parameter(torch.empty(4, 8, 2))
    model = torch.nn.ModuleDict({"experts": experts})
    ids, features = torch.zeros(2, TOKENS).long(), torch.zeros(2, TOKENS)
    assert has_modules(model, [features])
    assert has_modules(torch.nn.Linear(2, 2), [{"x": ids}])
    assert not has_modules(torch.nn.Linear(2, 2), [features])


class Feed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({"fc1": torch.nn.Linear(16, 64), "fc2": torch.nn.Linear(64, 16)})
            for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["fc2"](functional.gelu(layer["fc1"](x)))
        return x.pow(2).mean()


def test_divided_operators_send_what_the_formula_says():
    with torch.device("meta"):
        net, x = Feed(), torch.randn(8, 16)
    ranks = 2
    peaks, _ = operators_divided(net, [x], [], ranks)
    # For each layer an all-reduce of rows forward, and one of columns backward but for the input.
    assert peaks.sent == (2 + 1) * (2 * (ranks - 1) / ranks) * 8 * 16 * 4
    assert peaks.parts["layers.0.fc1.weight"] == 1 / ranks
    assert not torch.distributed.is_initialized()


def test_views_of_divided_tensors_need_no_values():
    class Heads(Feed):
        def forward(self, x):
            for layer in self.layers:
                heads = layer["fc1"](x).unflatten(1, (4, 16)).softmax(-1)
                x = x + layer["fc2"](heads.flatten(1))
            return x.pow(2).mean()

    with torch.device("meta"):
        net, x = Heads(), torch.randn(8, 16)
    # Torch warns once in a process, and warnings are errors here.
    assert operators_divided(net, [x], [], 2)[0].parts["layers.0.fc1.weight"] == 1 / 2


def test_stages_have_their_parameters_and_what_they_send():
    with torch.device("meta"):
        net, x = Feed(), torch.randn(8, 16)
    first, last = stages_of(net, [x], 8, microbatches=4, count=2, recomputed=[])
    assert (first.params, last.params) == (4 * (2 * 16 * 64 + 80),) * 2
    assert (first.received, first.sent) == (last.sent, last.received) == (0, 2 * 16 * 4)
    assert first.saved >= 2 * 64 * 4
