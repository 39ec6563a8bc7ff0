"""Training on parameter servers is that of one process, whatever dies."""

import pytest
import torch
from server_tensors import Case, TensorChaos
from torch import nn

from msrun.errors import ConfigError
from msrun.parallel.servers.recipe import recipe_of

pytestmark = pytest.mark.torch

STEPS = 6
TOLERANCE = 1e-6


def groups(model, **second):
    """Return the parameters as three groups with options of their own."""
    return [
        {"params": model.items.parameters()},
        {"params": model.users.parameters(), **second},
        {"params": model.out.parameters(), "lr": 0.02},
    ]


def tables(model):
    return [*model.items.parameters(), *model.users.parameters()]


CASES = {
    "sgd": lambda: Case(lambda m: torch.optim.SGD(groups(m), lr=0.5)),
    "sgd mean decay": lambda: Case(
        lambda m: torch.optim.SGD(groups(m, weight_decay=0.1), lr=0.5), mode="mean"
    ),
    "sgd sparse": lambda: Case(lambda m: torch.optim.SGD(groups(m), lr=0.5), sparse=True),
    "momentum": lambda: Case(
        lambda m: torch.optim.SGD(groups(m, nesterov=True), lr=0.2, momentum=0.9, weight_decay=0.01)
    ),
    "adamw": lambda: Case(
        lambda m: torch.optim.AdamW(groups(m, weight_decay=0.2), lr=0.01, amsgrad=True)
    ),
    "adam scheduled": lambda: Case(lambda m: torch.optim.Adam(groups(m), lr=0.02), decay=0.8),
    "adagrad": lambda: Case(
        lambda m: torch.optim.Adagrad(groups(m, lr_decay=0.1), initial_accumulator_value=0.3)
    ),
    "adagrad sparse": lambda: Case(lambda m: torch.optim.Adagrad(groups(m)), sparse=True),
    "sparseadam": lambda: Case(
        lambda m: torch.optim.SparseAdam(tables(m), lr=0.02), sparse=True, tables_only=True
    ),
    "rmsprop": lambda: Case(lambda m: torch.optim.RMSprop(groups(m), lr=0.01, centered=True)),
    "nadam": lambda: Case(lambda m: torch.optim.NAdam(groups(m), lr=0.01)),
}
OF_GRID = ["sgd mean decay", "sgd sparse", "momentum", "adamw", "adagrad sparse", "sparseadam"]
SHAPES = [(servers, workers) for servers in (1, 2, 3) for workers in (1, 2, 4)]


def quick(values, few):
    """Leave all but a few for the thorough run."""
    return [
        pytest.param(each, marks=[] if each in few else [pytest.mark.thorough]) for each in values
    ]


# Two servers of four workers have every case, below.
IN_CI = [(1, 2), (3, 1), (3, 2)]


def at_night(shapes):
    return [pytest.param(each, marks=pytest.mark.slow) for each in shapes if each not in IN_CI]


def check(name, **words):
    losses, weights = CASES[name]().single(STEPS)
    case = CASES[name]()
    chaos = TensorChaos(case, steps=STEPS, **words)
    chaos.run()
    world = chaos.world

    for clock, loss in enumerate(losses):
        total = sum(world.losses[clock, rank] for rank in range(words["workers"]))
        assert total == pytest.approx(loss, abs=TOLERANCE)
    for each, weight in world.weights.items():
        torch.testing.assert_close(weight, weights[each], rtol=0, atol=TOLERANCE)
    moved = [(weights[each] - case.start[each]).abs().max() for each in world.weights]
    assert min(moved) > 1e-4, "a training that changes nothing shows nothing"
    return world


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch's Adagrad
@pytest.mark.parametrize("name", quick(CASES, ["adamw", "sgd sparse"]))
def test_losses_and_weights_are_those_of_one_process(name):
    check(name, servers=2, workers=4)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch's Adagrad
@pytest.mark.parametrize("shape", [*quick(IN_CI, [(3, 2)]), *at_night(SHAPES)])
def test_any_number_of_servers_and_workers(shape):
    servers, workers = shape

    for name in OF_GRID:
        check(name, servers=servers, workers=workers)


@pytest.mark.parametrize("seed", quick(range(3), [0]))
def test_kills_and_scaling_change_nothing(seed):
    odds = {"kills": 0.3, "scales": 0.1, "losses": 0.1, "doubles": 0.2, "delay": 0.5, "pace": 3.0}

    world = check("momentum", servers=2, workers=2, seed=seed, **odds)

    assert sum(world.kills.values()) > 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", CASES)
def test_kills_and_scaling_change_nothing_for_any_optimizer(name, seed):
    odds = {"kills": 0.3, "scales": 0.1, "losses": 0.1, "doubles": 0.2, "delay": 0.5, "pace": 3.0}

    check(name, servers=2, workers=3, seed=seed, **odds)


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Rprop"])
def test_an_optimizer_that_servers_do_not_offer_is_refused(name):
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = getattr(torch.optim, name)([weight])

    with pytest.raises(ConfigError, match=f"servers do not offer the optimizer {name}"):
        recipe_of(optimizer, {weight: "embed"})


def test_an_optimizer_of_the_user_is_refused_though_it_has_the_name_of_one_of_torch():
    class SGD(torch.optim.SGD):
        pass

    weight = nn.Parameter(torch.ones(3, 2))

    with pytest.raises(ConfigError, match="servers do not offer the optimizer SGD"):
        recipe_of(SGD([weight], lr=0.1), {weight: "embed"})
