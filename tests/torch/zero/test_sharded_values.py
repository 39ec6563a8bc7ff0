"""What scripts read of sharded parameters and gradients: the value of one process, or refused."""

import pytest
import torch
from ranks import batches, build, run_warm
from test_grid import zero
from torch.nn import functional

import msrun
from msrun.errors import ModelError

pytestmark = pytest.mark.torch

PLAN = [{"match": "fc1", "style": "colwise"}, {"match": "fc2", "style": "rowwise"}]
CONFIGS = {f"zero {level}": zero(level) for level in (1, 3)}
CONFIGS["tp"] = {"mesh": {"tp": 2}, "plan": PLAN}
# Reductions as scripts write them; DTensor adds up the last two by itself.
READ = {
    "norm": lambda grad: grad.data.norm(2).item(),
    "maximum": lambda grad: float(grad.abs().max()),
    "mean, as text": lambda grad: f"{grad.mean():.9f}",
    "finite": lambda grad: bool(torch.isfinite(grad).all()),
    "norm of norms": lambda grad: torch.stack([grad.norm(), grad.norm()]).norm().item(),
    "compared": lambda grad: bool(grad.norm() > 0.01),
}


REFUSED = {"norm", "maximum", "mean, as text", "finite"}


def gradient(config):
    rt = msrun.init(config)
    network = rt.shard(build("mlp"))
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    x, y = (t.chunk(count)[share] for t in batches("mlp", steps=1)[0])
    functional.cross_entropy(network(x), y).backward()
    return network.get_parameter("fc2.weight").grad


def read(config):
    grad = gradient(config)
    found = {}
    for name, value in READ.items():
        try:
            found[name] = value(grad)
        except ModelError:
            found[f"refused {name}"] = 1.0
    if hasattr(grad, "full_tensor"):
        whole = grad.full_tensor()
        found = {name: value(whole) for name, value in READ.items()} | found
    return {name: float(value) for name, value in found.items()}


@pytest.mark.parametrize("config", CONFIGS)
def test_value_of_a_reduction_is_that_of_one_process_or_refused(config):
    expected = run_warm(read, 1, {})[0]

    for found in run_warm(read, 2, CONFIGS[config]):
        assert {name for name in READ if f"refused {name}" in found} == REFUSED
        assert {name: found[name] for name in READ} == pytest.approx(expected, rel=1e-5)


def hint_of_norm(config):
    try:
        gradient(config).norm().item()
    except ModelError as error:
        return error.hint


def test_sum_that_ranks_have_not_added_up_has_no_value():
    for hint in run_warm(hint_of_norm, 2, zero(3)):
        assert "get_total_norm" in hint


def penalised(config, form):
    """Train by a plain loop with a penalty on all weights; return the parameters or the error."""
    rt = msrun.init(config)
    network = rt.shard(build("mlp"))
    optimizer = rt.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    for x, y in batches("mlp", steps=2):
        optimizer.zero_grad()
        loss = functional.cross_entropy(network(x.chunk(count)[share]), y.chunk(count)[share])
        penalty = 0.01 * sum(param.square().sum() for param in network.parameters())
        if form == "added":
            try:
                (loss + penalty).backward()
            except ModelError as error:
                return str(error), error.hint
        else:
            loss.backward()
            penalty = 0.01 * sum(param.square().sum() for param in network.parameters())
            penalty.backward()
        optimizer.step()
    return [
        (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().tolist()
        for param in network.parameters()
    ]


def test_penalty_that_is_added_to_the_loss_of_a_plain_loop_is_refused():
    for text, hint in run_warm(penalised, 2, zero(3), "added"):
        assert "such as a penalty on weights" in text
        assert "backward() of the penalty by itself" in hint


@pytest.mark.parametrize(
    ("config", "form"), [("zero 1", "added"), ("zero 1", "apart"), ("zero 3", "apart")]
)
def test_penalty_trains_as_in_one_process(config, form):
    expected = run_warm(penalised, 1, {}, form)[0]

    for found in run_warm(penalised, 2, CONFIGS[config], form):
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(own), torch.tensor(other))
