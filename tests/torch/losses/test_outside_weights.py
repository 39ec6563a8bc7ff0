"""Parameters that a script trains beside the model, with an optimizer that msrun never got."""

import warnings

import pytest
import torch
from ranks import assert_equal_curves, batches, build, run_warm
from test_grid import zero
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import msrun
from msrun.errors import ModelError, RanksDisagreeError

pytestmark = pytest.mark.torch

PLAN = [{"match": "fc1", "style": "colwise"}, {"match": "fc2", "style": "rowwise"}]
CONFIGS = {
    "dp": {},
    "zero 1": zero(1),
    "zero 3": zero(3),
    "dp x tp": {"mesh": {"dp": 2, "tp": 2}, "plan": PLAN},
}


def parts(rt, steps=6):
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    return [[t.chunk(count)[share] for t in batch] for batch in batches("mlp", steps=steps)]


def weighted(config, treat):
    """Train by a plain loop with a learned weight of the loss; return losses, or what is said."""
    rt = msrun.init(config)
    network = rt.shard(build("mlp"))
    log_sigma = nn.Parameter(torch.zeros(1))
    update = torch.optim.SGD(network.parameters(), lr=0.1)
    own = torch.optim.SGD([log_sigma], lr=0.1)
    losses = []
    try:
        for x, y in parts(rt):
            update.zero_grad()
            own.zero_grad()
            loss = functional.cross_entropy(network(x), y)
            loss = (loss * torch.exp(-log_sigma) + log_sigma).sum()
            loss.backward()
            if treat == "averaged":
                log_sigma.grad = rt.mean_over_data(log_sigma.grad)
            update.step()
            own.step()
            losses.append(rt.mean_over_data(loss.detach()).item())
    except RanksDisagreeError as error:
        return len(losses), error.message, error.hint
    return losses


@pytest.mark.parametrize("config", CONFIGS)
def test_a_weight_of_the_loss_that_each_rank_trains_alone_is_refused(config):
    ranks = 4 if "tp" in config else 2

    for done, said, hint in run_warm(weighted, ranks, CONFIGS[config], "alone"):
        assert done == 2
        assert said.startswith(
            "each data-parallel rank trains the script's log_sigma alone "
            "(SGD, test_outside_weights.py, line "
        )
        assert said.endswith(": it is in no model of rt.shard, so nothing averages the gradient")
        assert "nn.ModuleDict" in hint


@pytest.mark.parametrize("config", CONFIGS)
def test_a_weight_of_the_loss_whose_gradient_the_script_averages_trains(config):
    expected = run_warm(weighted, 1, {}, "averaged")[0]
    ranks = 4 if "tp" in config else 2

    assert_equal_curves(run_warm(weighted, ranks, CONFIGS[config], "averaged"), expected)


def probed(steps):
    """Train a head of the script on a frozen model; return the warnings."""
    rt = msrun.init()
    network, head = rt.shard(build("mlp").requires_grad_(requires_grad=False)), nn.Linear(10, 10)
    own = torch.optim.Adam(head.parameters())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x, y in parts(rt, steps):
            functional.cross_entropy(head(network(x)), y).backward()
            own.step()
    return [str(each.message) for each in said if str(each.message).startswith("msrun: each")]


def test_a_head_beside_a_frozen_model_is_told_of():
    for said in run_warm(probed, 2, 6):
        assert len(said) == 1
        assert "trains the script's head.weight, the script's head.bias alone (Adam, " in said[0]
        assert "they are in no model of rt.shard, so nothing averages the gradients" in said[0]


def test_a_head_is_not_told_of_in_one_process():
    assert run_warm(probed, 1, 6) == [[]]


def beside(which):
    """Train a model, and another one by itself on all ranks alike or on rank 0 alone."""
    rt = msrun.init()
    network = rt.shard(build("mlp"))
    torch.manual_seed(3)
    other = nn.Linear(4, 4)
    update = torch.optim.SGD(network.parameters(), lr=0.1)
    own = torch.optim.SGD(other.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in parts(rt):
            functional.cross_entropy(network(x), y).backward()
            if which == "all" or rt.is_main:
                other(torch.ones(2, 4)).sum().backward()
                own.step()
            update.step()
    return True


@pytest.mark.parametrize("which", ["all", "first"])
def test_another_model_that_ranks_train_alike_or_one_has_alone_is_left_alone(which):
    assert run_warm(beside, 2, which) == [True] * 2


def with_own_experts():
    """Train a model beside another one, of which `DistributedDataParallel` ignores a part."""
    rt = msrun.init()
    network = rt.shard(build("mlp"))
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        other[1].weight.add_(rt.rank)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        other, ["1.weight", "1.bias"]
    )
    other = DistributedDataParallel(other)
    update = torch.optim.SGD(network.parameters(), lr=0.1)
    own = torch.optim.SGD(other.parameters(), lr=0.1)
    for x, y in parts(rt):
        functional.cross_entropy(network(x), y).backward()
        other(torch.ones(2, 4)).mean().backward()
        own.step()
        update.step()
    return other.module[1].weight.mean().item()


def test_what_ddp_ignores_is_each_ranks_own():
    first, second = run_warm(with_own_experts, 2)

    assert first != second


def unknown(config, kind):
    """Step by an optimizer that msrun never got; return what is said."""
    rt = msrun.init(config)
    network = build("mlp")
    before = torch.optim.SGD(network.parameters(), lr=0.1)
    network = rt.shard(network)
    update = {
        "from before": lambda: before,
        "of matrices": lambda: torch.optim.Muon([network.fc2.weight], lr=0.1),
        "of lists": lambda: torch.optim.AdamW(network.parameters(), foreach=True),
        "plain": lambda: torch.optim.AdamW(network.parameters()),
    }[kind]()
    if kind == "plain" and rt.rank == 1:
        with torch.no_grad():
            network.fc3.bias.add_(1.0)
    x, y = parts(rt)[0]
    functional.cross_entropy(network(x), y).backward()
    try:
        update.step()
    except ModelError as error:
        return error.message
    except RanksDisagreeError as error:
        return error.message
    return ""


SMALL_WHOLE = {"optimizer": {"zero": 1, "threshold": 300}}


@pytest.mark.parametrize(
    ("config", "kind", "said"),
    [
        (zero(1), "from before", "SGD holds parameters from before rt.shard"),
        (zero(1), "of matrices", "Muon multiplies whole matrices"),
        (SMALL_WHOLE, "of lists", "AdamW updates plain and sharded parameters of a group in one"),
        (SMALL_WHOLE, "plain", "ranks have other values of fc3.bias (rank 1)"),
        ({}, "plain", "ranks have other values of fc3.bias (rank 1)"),
    ],
)
def test_an_optimizer_of_a_plain_loop_is_checked_at_its_first_step(config, kind, said):
    for found in run_warm(unknown, 2, config, kind):
        assert found.startswith(said)
