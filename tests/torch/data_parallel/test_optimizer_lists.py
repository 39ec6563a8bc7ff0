"""`rt.optimizer` has divided parameters updated as lists, unless the user chose."""

import pytest
import torch
from ranks import batches, build, run_warm
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import msrun

pytestmark = pytest.mark.torch

ADAM = torch.optim.AdamW


class Lists(TorchFunctionMode):
    """Notes the lists that operators update: number of axes of their mesh, 0 for plain tensors."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "").startswith("_foreach_"):
            first = next(arg for arg in args if isinstance(arg, (list, tuple)))[0]
            self.seen.add(first.device_mesh.ndim if hasattr(first, "device_mesh") else 0)
        return func(*args, **(kwargs or {}))


def trained(config, kind, options):
    """Return what each step updates in lists, and all parameters after the last.

    What is updated is a number of mesh axes, 0 of plain tensors.
    """
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    update = runtime.optimizer(kind(network.parameters(), lr=0.01, **options))
    seen = []
    for x, y in batches("mlp"):
        with Lists() as lists:
            runtime.step(network, update, functional.cross_entropy, x, y)
        seen.append(lists.seen)
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in network.parameters()]
    assert [group["foreach"] for group in update.param_groups] == [options.get("foreach")]
    for param, state in update.state.items():
        of_param = [value for key, value in state.items() if key != "step"]
        assert all(type(value) is type(param.data) for value in of_param)
    assert set(update.state) <= set(network.parameters())
    return seen, [v.tolist() for v in values]


def sharded_lists(seen):
    return set().union(*seen) - {0}


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, {"shard_size": 2}, {"threshold": 256}])
@pytest.mark.parametrize(("kind", "own"), [(ADAM, {}), (torch.optim.SGD, {"momentum": 0.9})])
def test_lists_change_nothing(kind, own, options):
    config = {"optimizer": {"zero": 3, **options}}
    lists, found = run_warm(trained, 4, config, kind, own)[0]
    one_by_one, expected = run_warm(trained, 4, config, kind, own | {"foreach": False})[0]

    assert sharded_lists(lists) == ({2} if "shard_size" in options else {1})
    assert not sharded_lists(one_by_one)
    assert found == expected


def test_steps_with_a_state_update_parts():
    first, *later = run_warm(trained, 2, {"optimizer": {"zero": 3}}, ADAM, {})[0][0]

    assert 1 in first
    assert later
    assert all(seen == {0} for seen in later)


def large(options):
    """Return what each step of a layer of 512 KiB updates in lists, and its weight after them."""
    runtime = msrun.init({"optimizer": {"zero": 3}})
    torch.manual_seed(0)
    network = runtime.shard(torch.nn.Linear(256, 512))
    update = runtime.optimizer(ADAM(network.parameters(), lr=0.01, **options))
    seen = []
    for _ in range(3):
        with Lists() as lists:
            x = torch.linspace(-1, 1, 1024).view(4, 256)
            runtime.step(network, update, functional.cross_entropy, x, torch.arange(4))
        seen.append(lists.seen)
    return seen, network.weight.full_tensor().tolist()


def test_large_parts_on_a_host_are_updated_one_by_one():
    (first, *later), found = run_warm(large, 2, {})[0]

    assert 1 in first
    assert later == [set(), set()]
    assert found == run_warm(large, 2, {"foreach": True})[0][1]


def test_whole_parameters_stay_as_torch_has_them():
    assert sharded_lists(run_warm(trained, 2, {}, ADAM, {})[0][0]) == set()


def test_what_the_user_chose_stays():
    config = {"optimizer": {"zero": 1}}
    assert sharded_lists(run_warm(trained, 2, config, ADAM, {"fused": True})[0][0]) == set()


def test_other_optimizers_stay_as_torch_has_them():
    config = {"optimizer": {"zero": 1}}
    assert sharded_lists(run_warm(trained, 2, config, torch.optim.RMSprop, {})[0][0]) == set()


def test_many_axes_are_left_alone():
    plan = [{"match": "fc1", "style": "colwise"}, {"match": "fc2", "style": "rowwise"}]
    config = {"mesh": {"dp": 2, "tp": 2}, "plan": plan, "optimizer": {"zero": 1, "shard_size": 1}}
    # Three axes shard the first two layers; the third layer has no rule.
    assert sharded_lists(run_warm(trained, 4, config, ADAM, {})[0][0]) == {2}
