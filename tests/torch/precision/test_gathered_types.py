"""ZeRO under `precision`: what one process computes in float32 is not gathered in fewer bits."""

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch


class Layer(nn.Module):
    """Products in bfloat16 beside what autocast leaves in float32, or what the script does."""

    def __init__(self, *, has_wide_product):
        super().__init__()
        self.has_wide_product = has_wide_product
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 16)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.decay = nn.Parameter(torch.linspace(0.1, 0.9, 16))
        self.mix, self.gate = nn.Parameter(torch.randn(16, 16) / 8), nn.Linear(16, 16)

    def forward(self, x):
        x = x + self.up(self.norm(x)) + self.conv(x[:, None])[:, 0]
        x = x + self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]
        with torch.autocast("cpu", enabled=False):
            x = x.float() @ self.mix * torch.exp(-torch.exp(self.decay))
            if self.has_wide_product:
                x = self.gate(x)
        return x + self.gate(x)


class Net(nn.Module):
    def __init__(self, *, has_wide_product=False):
        super().__init__()
        self.step, self.head = nn.Embedding(8, 16), nn.Linear(16, 10)
        self.layers = nn.ModuleList([Layer(has_wide_product=has_wide_product) for _ in range(2)])

    def forward(self, x, time):
        # Times that differ are one number in bfloat16.
        x = x + self.step(time.long() % 8) + torch.sin(time[:, None])
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def built(**options):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net(**options)


def batches():
    numbers = torch.Generator().manual_seed(7)
    for _ in range(2):
        x = torch.randn(16, 16, generator=numbers)
        time = 990 + torch.rand(16, generator=numbers)
        yield x, time, torch.randint(0, 10, (16,), generator=numbers)


def of_one():
    """Return what one process learns from the batches of two ranks, one after the other."""
    model, losses = built(), []
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        update.zero_grad()
        parts = zip(*(tensor.chunk(2) for tensor in batch), strict=True)
        loss = 0.0
        for x, time, target in parts:
            with torch.autocast("cpu", torch.bfloat16):
                part = functional.cross_entropy(model(x, time), target) / 2
            part.backward()
            loss += part.item()
        update.step()
        losses.append(loss)
    return losses, [param.detach() for param in model.parameters()]


def trained(config):
    rt = msrun.init(config)
    model, losses = rt.shard(built()), []
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in batches():
        x, time, target = (tensor.chunk(2)[rt.rank] for tensor in batch)

        losses.append(rt.step(model, update, functional.cross_entropy, x, time, target).item())
    return losses, [full_tensor(param.detach()) for param in model.parameters()]


def each_is_that_of_one(settings):
    expected, weights = of_one()
    for setting in settings:
        losses, found = trained({"precision": "bf16", "optimizer": setting})
        msrun.init().close()
        assert losses == pytest.approx(expected, abs=1e-6), setting
        for param, whole in zip(found, weights, strict=True):
            assert (param - whole).abs().max() <= 1e-6, setting


def test_weights_that_autocast_leaves_alone_are_gathered_whole():
    settings = [{"zero": 1}, {"zero": 3}, {"zero": 3, "threshold": 128}]
    run_warm(each_is_that_of_one, 2, settings)


class ByHand(nn.Module):
    """Multiplies by the weight of its linear layer, and does not call that."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x, time):
        with torch.autocast("cpu", enabled=False):
            return (x + time[:, None]) @ self.up.weight


def said_of(model):
    """Return what is said of a forward of `model`, and the type of a layer alone in evaluation."""
    rt = msrun.init({"precision": "bf16", "optimizer": {"zero": 3}})
    model = rt.shard(model)
    x, time, _ = next(batches())
    with pytest.raises(ModelError) as caught:
        model(x, time)
    with torch.no_grad():
        alone = next(part for part in model.modules() if isinstance(part, nn.Linear))(x)
    return caught.value.message, alone.dtype


def test_a_product_outside_of_autocast_is_refused_in_training():
    called, by_hand = (
        run_warm(said_of, 2, model) for model in (built(has_wide_product=True), ByHand())
    )

    sentence = (
        "parallel.precision: layers.0.gate runs outside of autocast, and with optimizer.zero its "
        "weight is gathered in bf16"
    )
    assert called == 2 * [(sentence, torch.bfloat16)]
    for message, _ in by_hand:
        assert message.startswith(
            "parallel.optimizer.zero: a product outside of autocast has factors of two types, and "
            "ZeRO gathers in the narrower one: "
        )
