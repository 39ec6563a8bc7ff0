"""A model that a script changes by the weights of another one, which an optimizer trains."""

import pytest
import torch
from ranks import assert_equal_curves, batches, build, run_warm
from test_grid import zero

import msrun

pytestmark = pytest.mark.torch


def of_data(own, other):
    for param, trained in zip(own.parameters(), other.parameters(), strict=True):
        param.data.copy_(0.5 * param.data + 0.5 * trained.data)


@torch.no_grad()
def in_place(own, other):
    for param, trained in zip(own.parameters(), other.parameters(), strict=True):
        param.mul_(0.5).add_(trained, alpha=0.5)


def learned(config, change):
    """Learn towards a target network, whose output is detached, as of deep Q-learning."""
    rt = msrun.init(config)
    online, target = rt.shard(build("mlp")), rt.shard(build("mlp"))
    update = rt.optimizer(torch.optim.SGD(online.parameters(), lr=0.5))
    losses = []
    for x, actions in batches("mlp", steps=4):
        part = [tensor.chunk(rt.world_size)[rt.rank] for tensor in (x, actions)]
        chosen = online(part[0]).gather(1, part[1][:, None])[:, 0]
        wanted = 1 + 0.5 * target(part[0].flip(1)).amax(1).detach()
        loss = (chosen - wanted).square().mean()
        update.zero_grad()
        loss.backward()
        update.step()
        change(target, online)
        with torch.no_grad():
            seen = target(part[0]).square().mean()
        losses += [rt.mean_over_data(value.detach()).item() for value in (loss, seen)]
    return losses


@pytest.mark.parametrize("change", [of_data, in_place])
@pytest.mark.parametrize("level", [1, 3])
def test_a_target_network_follows_as_in_one_process(level, change):
    expected = run_warm(learned, 1, {}, change)[0]

    assert_equal_curves(run_warm(learned, 2, zero(level), change), expected, 1e-5)
