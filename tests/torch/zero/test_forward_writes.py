"""Parameters that a forward writes while ZeRO has gathered them, by whatever way."""

import pytest
import torch
from ranks import assert_equal_curves, batches, run_warm
from test_grid import zero
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError, RanksDisagreeError

pytestmark = pytest.mark.torch


class InPlace(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.copy_(functional.normalize(self.weight, dim=1))
        return super().forward(x)


class OfData(nn.Linear):
    """Counts for no tensor."""

    def forward(self, x):
        self.weight.data.div_(self.weight.data.norm(dim=1, keepdim=True))
        return super().forward(x)


class Rebound(nn.Linear):
    """As the constrained layers of EEGNet do."""

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


class Shifted(nn.Linear):
    """Begins with values of its first batch, as ActNorm does."""

    is_begun = False

    def forward(self, x):
        if not self.is_begun:
            self.is_begun = True
            with torch.no_grad():
                self.bias.copy_(-super().forward(x).mean(0))
        return super().forward(x)


def trained(config, kind, *, by_step=False):
    rt = msrun.init(config)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), kind(32, 32), nn.ReLU())
    network = rt.shard(nn.Sequential(*network, nn.Linear(32, 10)))
    update = rt.optimizer(torch.optim.SGD(network.parameters(), lr=0.5))
    losses = []
    for x, y in batches("mlp", steps=4):
        part = [tensor.chunk(rt.world_size)[rt.rank] for tensor in (x, y)]
        if by_step:
            losses.append(rt.step(network, update, functional.cross_entropy, *part).item())
            continue
        update.zero_grad()
        loss = functional.cross_entropy(network(part[0]), part[1])
        loss.backward()
        update.step()
        losses.append(rt.mean_over_data(loss).item())
    return losses


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [InPlace, OfData, Rebound])
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("by_step", [True, False])
def test_what_a_forward_writes_stays_written(level, kind, by_step):
    expected = run_warm(trained, 1, {}, kind)[0]

    config = zero(level)
    found = run_warm(by_rt_step if by_step else trained, 2, config, kind)
    assert_equal_curves(found, expected, 1e-5)


def by_rt_step(config, kind):
    return trained(config, kind, by_step=True)


def refused(config, kind):
    with pytest.raises((ModelError, RanksDisagreeError)) as caught:
        trained(config, kind)
    return caught.value.message


@pytest.mark.parametrize("level", [1, 3])
def test_what_ranks_write_from_their_own_samples_is_refused(level):
    said = "ranks have other values of what the forward wrote to its parameters (rank 1), which"
    for found in run_warm(refused, 2, zero(level), Shifted):
        assert found.startswith(said)


def test_what_is_written_in_another_type_is_refused():
    config = zero(2, dtype="bfloat16")
    for found in run_warm(refused, 2, config, OfData):
        assert "2.weight was written while it is gathered in another type" in found
