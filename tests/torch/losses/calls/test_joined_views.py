"""Two views of a batch behind each other, as for contrastive losses, and pairs of them."""

import warnings

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError

pytestmark = pytest.mark.torch


class Encoder(nn.Module):
    """Returns features of two views, apart or behind each other."""

    def __init__(self, is_joined):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
        self.is_joined = is_joined

    def forward(self, first, second):
        if self.is_joined:
            return self.layers(torch.cat([first, second])).chunk(2)
        return self.layers(first), self.layers(second)


def both(views):
    return functional.normalize(torch.cat(views))


def others(count):
    return ~torch.eye(count, dtype=torch.bool)


def same_sample(count):
    return torch.eye(count // 2, dtype=torch.bool).repeat(2, 2)


def chosen(views, _):
    z = both(views)
    return (z @ z.T)[others(len(z))].view(len(z), -1).logsumexp(1).mean()


def filled(views, _):
    z = both(views)
    count = len(z)
    odds = (z @ z.T / 0.5).masked_fill(~others(count), -9e15)
    return functional.cross_entropy(odds, (torch.arange(count) + count // 2) % count)


def multiplied(views, _):
    z = both(views)
    near = functional.cosine_similarity(z[:, None], z[None], dim=2)
    return (near.exp() * others(len(z))).sum(1).log().mean()


def hidden(views, _):
    z = both(views)
    return (z @ z.T - 1e9 * ~others(len(z))).logsumexp(1).mean()


def across(views, _):
    first, second = both(views).chunk(2)
    return (first @ second.T).logsumexp(1).mean()


def viewed(views, _):
    first, second = both(views).view(2, -1, 5)
    return (first @ second.T).exp().mean(1).log().mean()


def distant(views, _):
    z = both(views)
    return torch.cdist(z, z).square().mean()


MIXING = [chosen, filled, multiplied, hidden, across, viewed, distant]


def near(views, _):
    first, second = both(views).chunk(2)
    return (first - second).square().sum(1).mean()


def sliced(views, target):
    z, count = both(views), len(target)
    return (z[:count] * z[count:]).sum(1).mean()


def labelled(views, target):
    return functional.cross_entropy(torch.cat(views), torch.cat([target, target]))


def three(views, target):
    first, second, last = torch.cat([*views, views[0] * 2]).split(len(target))
    return (first * second * last).sum(1).mean()


def own_pairs(views, _):
    z = both(views)
    return (z @ z.T)[same_sample(len(z)) & others(len(z))].mean()


def own_odds(views, _):
    z = both(views)
    return (z @ z.T).masked_fill(~same_sample(len(z)), -1e9).logsumexp(1).mean()


def own_hidden(views, _):
    z = both(views)
    far = torch.zeros(len(z), len(z)).masked_fill(~same_sample(len(z)), 1e9)
    return (z @ z.T - far).logsumexp(1).mean()


RIGHT = [own_hidden, near, sliced, labelled, three, own_pairs, own_odds]


def trained(loss, config, *, is_joined=False):
    """Return losses of three steps, and what is said."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    model = rt.shard(Encoder(is_joined))
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            draw = torch.Generator().manual_seed(step)
            views = [torch.randn(8, 6, generator=draw, dtype=torch.double) for _ in range(2)]
            batch = [*views, torch.arange(8) % 5]
            part = [tensor.chunk(rt.world_size)[rt.rank] for tensor in batch]
            try:
                losses.append(rt.step(model, update, loss, *part).item())
            except ModelError as error:
                return [], [error.message]
    return losses, [str(each.message) for each in caught if "msrun" in str(each.message)]


@pytest.mark.parametrize("loss", MIXING)
@pytest.mark.parametrize(("ranks", "config"), [(1, {"accumulate": 2}), (2, {})])
def test_pairs_of_samples_of_joined_views_are_noticed(loss, ranks, config):
    for losses, said in run_warm(trained, ranks, loss, config):
        assert len(said) == 1
        assert "samples of " in said[0] or "pairs of samples" in said[0]
        assert ranks == 2 or not losses


def test_so_are_those_of_a_model_that_takes_its_output_apart():
    for losses, said in run_warm(joined_model, 1):
        assert not losses
        assert "with each other" in said[0] or "pairs of samples" in said[0]


def joined_model():
    return trained(across, {"accumulate": 2}, is_joined=True)


@pytest.mark.parametrize("loss", RIGHT)
def test_a_loss_of_the_views_of_each_sample_is_that_of_one_process(loss):
    expected, _ = run_warm(trained, 1, loss, {})[0]
    for ranks, config in ((1, {"accumulate": 2}), (2, {})):
        for losses, said in run_warm(trained, ranks, loss, config):
            assert said == []
            assert losses == pytest.approx(expected, abs=1e-12)
