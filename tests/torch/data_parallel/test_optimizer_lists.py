"""`rt.optimizer` has divided parameters updated as lists, unless the user chose."""

import pytest
import torch
from ranks import batches, build, run_warm
from torch.nn import functional

import msrun

pytestmark = pytest.mark.torch

ADAM = torch.optim.AdamW


def trained(config, kind, options):
    """Return how each group is updated, and all parameters after some steps."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    update = runtime.optimizer(kind(network.parameters(), lr=0.01, **options))
    for x, y in batches("mlp"):
        runtime.step(network, update, functional.cross_entropy, x, y)
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in network.parameters()]
    return [group["foreach"] for group in update.param_groups], [v.tolist() for v in values]


@pytest.mark.parametrize("options", [{}, {"shard_size": 2}, {"threshold": 256}])
@pytest.mark.parametrize(("kind", "own"), [(ADAM, {}), (torch.optim.SGD, {"momentum": 0.9})])
def test_lists_change_nothing(kind, own, options):
    config = {"optimizer": {"zero": 3, **options}}
    lists, found = run_warm(trained, 4, config, kind, own)[0]
    one_by_one, expected = run_warm(trained, 4, config, kind, own | {"foreach": False})[0]

    assert sorted(lists, key=str) == ([None, True] if "threshold" in options else [True])
    assert set(one_by_one) == {False}
    assert found == expected


def test_whole_parameters_stay_as_torch_has_them():
    assert run_warm(trained, 2, {}, ADAM, {})[0][0] == [None]


def test_what_the_user_chose_stays():
    config = {"optimizer": {"zero": 1}}
    assert run_warm(trained, 2, config, ADAM, {"fused": True})[0][0] == [None]


def test_other_optimizers_stay_as_torch_has_them():
    config = {"optimizer": {"zero": 1}}
    assert run_warm(trained, 2, config, torch.optim.RMSprop, {})[0][0] == [None]


def axes_of_groups(config):
    """Return of each group how many axes divide it, and how it is updated."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    update = runtime.optimizer(ADAM(network.parameters()))
    return {
        (group["params"][0].device_mesh.ndim, group["foreach"]) for group in update.param_groups
    }


def test_many_axes_are_left_alone():
    plan = [{"match": "fc1", "style": "colwise"}, {"match": "fc2", "style": "rowwise"}]
    config = {"mesh": {"dp": 2, "tp": 2}, "plan": plan, "optimizer": {"zero": 1, "shard_size": 1}}
    # The third layer has no rule.
    assert run_warm(axes_of_groups, 4, config)[0] == {(2, True), (3, None)}
