"""Optimizer parallel where ranks use other modules: refused before a weight is wrong."""

import re

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import msrun
from msrun.parallel.data_parallel.collective_order import CollectiveOrder
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch


class Branches(nn.Module):
    """Two equal layers, used as the way says, each by its number."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"left": nn.Linear(4, 2), "right": nn.Linear(4, 2)})

    def forward(self, x, way):
        return sum(self.layers[name](x) * factor for name, factor in way)


class Forked(nn.Module):
    """A stem, then one of two branches or both."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.branches = Branches()
        self.never = nn.Linear(4, 2)

    def forward(self, x, way):
        return self.branches(self.stem(x), way)


LEFT, RIGHT = [("left", 1.0)], [("right", 1.0)]
APART = ["stem", "branches.layers.left", "branches.layers.right", "never"]
TOGETHER = ["stem", "branches", "never"]


def step(runtime, network, update, way):
    x = torch.ones(4, 4) + runtime.rank
    runtime.step(network, update, lambda y, _: y.square().mean(), x, way, None)


def loop(runtime, network, update, way):
    update.zero_grad()
    network(torch.ones(4, 4) + runtime.rank, way).square().mean().backward()
    update.step()


def forked(options, config, ways, go=step):
    """Go the ways of this rank until refused; return the weights before and after, and why."""
    runtime = msrun.init({"optimizer": options} | config)
    torch.manual_seed(0)
    network = runtime.shard(Forked())
    update = torch.optim.SGD(network.parameters(), lr=0.1, weight_decay=0.1)
    steps, why = [], None
    for way in ways[runtime.rank]:
        steps.append({name: full_tensor(p).tolist() for name, p in network.named_parameters()})
        try:
            go(runtime, network, update, way)
        except msrun.errors.UsageError as error:
            why = error.message
            break
    last = {name: full_tensor(param).tolist() for name, param in network.named_parameters()}
    return steps, last, why


def refused(level, told):
    return (
        f"parallel.optimizer.zero: level {level} needs all ranks to use the same modules in one "
        f"order, and {told}; no weight was changed"
    )


@pytest.mark.sampled
@pytest.mark.parametrize("go", [step, loop])
@pytest.mark.parametrize("config", [{}, {"recompute": {"modules": ["branches"]}}])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_another_module_on_another_rank_is_refused(level, config, go):
    # In the first step both go left, in the second not.
    ways = [[LEFT, LEFT], [LEFT, RIGHT]]
    options = {"zero": level, "modules": APART}
    for steps, last, why in run_warm(forked, 2, options, config, ways, go):
        assert why == refused(
            level,
            "rank 0 gathered branches.layers.left; rank 1 gathered branches.layers.right",
        )
        assert len(steps) == 2
        assert last == steps[1] != steps[0]


def forked_alone(ways):
    """Return the weights of one process before each step and at the end."""
    torch.manual_seed(0)
    network = Forked()
    update = torch.optim.SGD(network.parameters(), lr=0.1, weight_decay=0.1)
    found = []
    for ways_of_ranks in [*zip(*ways, strict=True), ()]:
        found.append({name: param.tolist() for name, param in network.named_parameters()})
        update.zero_grad()
        for rank, way in enumerate(ways_of_ranks):
            (network(torch.ones(4, 4) + rank, way).square().mean() / len(ways)).backward()
        update.step()
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("go", [step, loop])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_ranks_may_use_other_parameters_of_one_module(level, go):
    # In the second step no rank uses the right layer, which then keeps its weights.
    ways = [[LEFT, LEFT, RIGHT], [RIGHT, LEFT, RIGHT]]
    options = {"zero": level, "modules": TOGETHER}
    *before, after = forked_alone(ways)
    for steps, last, why in run_warm(forked, 2, options, {}, ways, go):
        assert why is None
        for found, wanted in zip([*steps, last], [*before, after], strict=True):
            assert found.keys() == wanted.keys()
            for name, values in found.items():
                assert torch.allclose(torch.tensor(values), torch.tensor(wanted[name]), atol=1e-6)


class Skipping(nn.Module):
    """Its one parameter lies in a module that the way may leave out."""

    def __init__(self):
        super().__init__()
        self.branches = Branches()

    def forward(self, x, way):
        return x[:, :2] + self.branches(x, way)


def skipping(options, ways):
    runtime = msrun.init({"optimizer": options | {"modules": ["branches.layers.*"]}})
    network = runtime.shard(Skipping())
    update = torch.optim.SGD(network.parameters(), lr=0.1)
    step(runtime, network, update, ways[runtime.rank])


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_rank_that_uses_no_divided_module_is_refused(level):
    with pytest.raises(pytest.fail.Exception) as caught:
        run_warm(skipping, 2, {"zero": level}, [LEFT, []])

    told = "the loss of rank 1 depends on no parameter that is trained"
    # In a job the end of this one is the end of the other.
    assert caught.value.msg.startswith("rank 0: did not return in time\nrank 1: ")
    assert f"RanksDisagreeError: {refused(level, told)}\n" in caught.value.msg


class Chosen(nn.Module):
    """Many layers, of which the sum of some is taken."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 2) for _ in range(9)])

    def forward(self, x, chosen):
        return sum(self.layers[index](x) for index in chosen)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.body = Chosen()

    def forward(self, x, chosen):
        return self.body(self.stem(x), chosen)


def wide():
    """Return why it is refused that the last rank uses another one of many layers."""
    runtime = msrun.init({"optimizer": {"zero": 3, "modules": ["stem", "body.layers.*"]}})
    network = runtime.shard(Wide())
    update = torch.optim.SGD(network.parameters(), lr=0.1)
    chosen = [*range(7), 7 if runtime.rank == 2 else 8]
    with pytest.raises(msrun.errors.UsageError) as caught:
        step(runtime, network, update, chosen)
    return caught.value.message


def test_of_many_modules_those_are_named_that_differ():
    told = "ranks 0, 1 gathered body.layers.8; rank 2 gathered body.layers.7"
    assert run_warm(wide, 3) == [refused(3, told)] * 3


def long_after():
    """Return why two ranks that remember one gather by name are refused for the second."""
    runtime = msrun.init({})
    torch.manual_seed(0)
    network = Forked()
    for module in (network.stem, *network.branches.layers.values(), network):
        fully_shard(module)
    order = CollectiveOrder(network, runtime.group("dp"), runtime.device, level=3, events_max=1)
    with torch.no_grad():
        network(torch.ones(2, 4), LEFT if runtime.rank else RIGHT)
    with pytest.raises(msrun.errors.UsageError) as caught:
        order.sum_and_compare(1.0)
    assert order.sum_and_compare(2.0) == 4.0
    return caught.value.message


def test_what_is_too_long_ago_is_refused_without_its_name():
    first, second = run_warm(long_after, 2)

    assert first == second
    other = r"did other things after 1 alike \([0-9a-f]{8}\)"
    assert re.fullmatch(rf".* and rank 0 {other}; rank 1 {other}; no weight was changed", first)


@pytest.mark.parametrize("level", [2, 3])
def test_another_order_in_micro_batches_is_refused(level):
    ways = [[LEFT + RIGHT], [RIGHT + LEFT]]
    options = {"zero": level, "modules": APART}
    for steps, last, why in run_warm(forked, 2, options, {"accumulate": 2}, ways):
        assert why == refused(
            level,
            "rank 0 gathered branches.layers.left; rank 1 gathered branches.layers.right",
        )
        assert last == steps[0]


def train_together(level, ways):
    return forked({"zero": level, "modules": APART} if level else {}, {}, ways)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_modules_may_change_from_step_to_step_where_they_do_on_all_ranks(level):
    ways = 2 * [[LEFT, RIGHT, LEFT + RIGHT, RIGHT + LEFT]]
    expected = run_warm(train_together, 2, 0, ways)
    for (_, own, why), (_, plain, _) in zip(
        run_warm(train_together, 2, level, ways), expected, strict=True
    ):
        assert why is None
        for name, value in own.items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(plain[name]), msg=name)


def test_the_remedy_of_the_hint_is_right():
    sides = [("left", 1.0), ("right", 0.0)], [("left", 0.0), ("right", 1.0)]
    ways = [[list(sides[0])], [list(sides[1])]]
    expected = run_warm(train_together, 2, 0, [[LEFT], [RIGHT]])[0][1]
    for _, own, why in run_warm(train_together, 2, 3, ways):
        assert why is None
        for name, value in own.items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(expected[name]), msg=name)


def one_unit():
    """Return the losses of a model that is gathered as one, by a plain loop."""
    runtime = msrun.init({"optimizer": {"zero": 3}})
    torch.manual_seed(0)
    network = runtime.shard(nn.Linear(4, 2))
    update = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        update.zero_grad()
        loss = functional.mse_loss(network(torch.ones(2, 4)), torch.zeros(2, 2))
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


def test_one_module_whose_hooks_run_at_the_end_of_backward():
    first, second = run_warm(one_unit, 2)

    assert first == second
    assert first[2] < first[1] < first[0]
