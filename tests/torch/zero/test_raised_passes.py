"""Backward passes that raise on all ranks, and that the script catches: training goes on."""

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.autograd import Function
from torch.nn import functional

import msrun
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch

WIDTH, WORDS, SAMPLES, STEPS, RAISES = 8, 12, 8, 4, 1


class Raising(Function):
    """Raises in its backward pass."""

    @staticmethod
    def forward(ctx, x):
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx, _gradient):
        del ctx
        raise ArithmeticError


class Words(nn.Module):
    def __init__(self, *, sparse):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)
        self.raises_at = None

    def forward(self, tokens):
        h = self.embed(tokens).mean(1)
        for index, layer in enumerate(self.layers):
            h = layer(h).tanh()
            if index == self.raises_at:
                h = Raising.apply(h)
        return self.head(h)


def trained(config, at, sparse, is_plain):
    """Return the weights after steps of which one raises first, and is tried again."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    model = rt.shard(Words(sparse=sparse))
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    draw = torch.Generator().manual_seed(1)

    def step(*batch):
        if not is_plain:
            rt.step(model, optimizer, functional.cross_entropy, *batch)
            return
        optimizer.zero_grad()
        tokens, target = batch
        functional.cross_entropy(model(tokens), target).backward()
        optimizer.step()

    for index in range(STEPS):
        whole = torch.randint(WORDS, (SAMPLES, 3), generator=draw), torch.arange(SAMPLES) % 5
        share, parts = rt.coordinate.get("dp", 0), rt.layout.axes.get("dp", 1)
        batch = [each.chunk(parts)[share] for each in whole]
        if index == RAISES:
            model.raises_at = at
            with pytest.raises(ArithmeticError):
                step(*batch)
            model.raises_at = None
        step(*batch)
    weights = {name: full_tensor(each.detach()) for name, each in model.named_parameters()}
    weights = {name: each.clone() for name, each in weights.items()}
    rt.close()
    return weights


CONFIGS = {
    "dp": {},
    "buckets": {"reduce": {"fuse": 300}},
    "accumulate": {"accumulate": 2},
    **{f"zero {level}": {"optimizer": {"zero": level}} for level in (1, 2, 3)},
    "zero 1 accumulate": {"accumulate": 2, "optimizer": {"zero": 1}},
    "zero 2 threshold": {"optimizer": {"zero": 2, "threshold": 100}},
}


PLAIN = {name: config for name, config in CONFIGS.items() if "accumulate" not in config}


@pytest.mark.sampled
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_pass_that_raised_leaves_nothing_behind(config, at):
    _compare(config, at, sparse=False, is_plain=False)


@pytest.mark.sampled
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("config", PLAIN.values(), ids=PLAIN)
def test_neither_does_one_of_a_plain_loop(config, at):
    _compare(config, at, sparse=False, is_plain=True)


@pytest.mark.parametrize("is_plain", [False, True], ids=["step", "plain"])
def test_neither_do_sparse_gradients(is_plain):
    _compare({}, 0, sparse=True, is_plain=is_plain)


def _compare(config, at, *, sparse, is_plain):
    alone = run_warm(trained, 1, {}, at, sparse, is_plain)[0]
    for weights in run_warm(trained, 2, config, at, sparse, is_plain):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, alone[name], rtol=0, atol=1e-6, msg=name)
