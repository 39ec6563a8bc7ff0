"""Plans by name of convolutional blocks, as timm, torchvision and diffusers name their members."""

import copy
import warnings

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch


class Basic(nn.Module):
    """A block of a ResNet; of three convolutions, the second with groups, if `groups` is not 0."""

    def __init__(self, groups=0):
        super().__init__()
        self.conv1 = nn.Conv2d(8, 8, 1 if groups else 3, padding=0 if groups else 1, bias=False)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=groups or 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        if groups:
            self.conv3, self.bn3 = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x, time):
        del time
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (x + (self.bn3(self.conv3(y.relu())) if hasattr(self, "conv3") else y)).relu()


class Excite(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_reduce, self.conv_expand = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)

    def forward(self, x):
        gate = self.conv_expand(self.conv_reduce(x.mean((2, 3), keepdim=True)).relu())
        return x * gate.sigmoid()


class Inverted(nn.Module):
    """A block of an EfficientNet."""

    def __init__(self):
        super().__init__()
        self.conv_pw, self.conv_pwl = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 1)
        self.conv_dw = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.bn1, self.bn2, self.bn3 = (nn.BatchNorm2d(width) for width in (16, 16, 8))
        self.se = Excite()

    def forward(self, x, time):
        del time
        y = self.bn2(self.conv_dw(self.bn1(self.conv_pw(x)).relu())).relu()
        return x + self.bn3(self.conv_pwl(self.se(y)))


class Timed(nn.Module):
    """A block of a UNet."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, 8), nn.GroupNorm(4, 16)
        self.conv1, self.conv2 = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.time_emb_proj = nn.Linear(6, 16)

    def forward(self, x, time):
        y = self.conv1(functional.silu(self.norm1(x))) + self.time_emb_proj(time)[:, :, None, None]
        return x + self.conv2(functional.silu(self.norm2(y)))


class Net(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList([block, copy.deepcopy(block)])

    def forward(self, x, time):
        for block in self.blocks:
            x = block(x, time)
        return x


# Excitation stays whole.
WHOLE = ["msrun: conv2d is computed whole on every rank"]
# Plan -> block, how many parameters of both blocks are divided, and what is said.
CASES = {
    "resnet": (Basic, 4, []),
    "resnet, three convolutions with groups": (lambda: Basic(4), 4, []),
    "efficientnet": (Inverted, 10, WHOLE),
    "unet": (Timed, 10, []),
}


def difference(case):
    """Return how far two steps are from one process, parameters that are divided, warnings."""
    torch.manual_seed(3)
    model = Net(CASES[case][0]()).double()
    whole = copy.deepcopy(model)
    plain = torch.optim.SGD(whole.parameters(), lr=0.1)
    batches = [(torch.randn(4, 8, 5, 5).double(), torch.randn(4, 6).double()) for _ in range(2)]
    rt = msrun.init({"mesh": {"tp": 2}, "plan": case.partition(",")[0]})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = rt.shard(model)
        update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in batches:
            plain.zero_grad()
            functional.mse_loss(whole(*batch), batch[0]).backward()
            plain.step()
            rt.step(model, update, functional.mse_loss, *batch, batch[0])
    there = whole.state_dict()
    worst = max(
        (full_tensor(value).double() - there[name].double()).abs().max().item()
        for name, value in model.state_dict().items()
    )
    params = [param for param in model.parameters() if hasattr(param, "to_local")]
    divided = sum(param.to_local().numel() < param.numel() for param in params)
    return worst, divided, [str(w.message) for w in caught if "msrun" in str(w.message)]


@pytest.mark.parametrize("case", CASES)
def test_a_convolutional_block_equals_one_process(case):
    for worst, divided, said in run_warm(difference, 2, case):
        assert worst == pytest.approx(0, abs=1e-12)
        assert (divided, said) == CASES[case][1:]
