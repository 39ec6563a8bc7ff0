"""Models with what people write into a forward, and a functional trace must not lose."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

SCALE = 1.0


class Quirk(nn.Module):
    """Two linear modules; subclasses say what happens between them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("count", torch.zeros(()))
        self.temperature = 1.0
        self.config = SimpleNamespace(scale=1.0)
        self.plain = torch.ones(())

    def between(self, h):
        return h

    def forward(self, x):
        return self.down(self.between(torch.tanh(self.up(x)))).square().mean()


class NoGrad(Quirk):
    def between(self, h):
        with torch.no_grad():
            scale = torch.sigmoid(self.up.weight.sum()) + h.mean(-1, keepdim=True)
        return h * scale


class NoGradView(Quirk):
    def between(self, h):
        with torch.no_grad():
            turned = h.t()
        return h + turned.t() * 0.5 + h.detach() * h


class NoGradInAutocast(Quirk):
    def between(self, h):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                kept = self.up(self.down(h))
            out = self.up(self.down(h)) + kept
        with torch.autocast("cpu", enabled=False), torch.no_grad(), torch.enable_grad():
            return out.to(h.dtype) * h


class Recomputed(Quirk):
    def between(self, h):
        h = checkpoint(torch.sin, h, use_reentrant=True)
        with torch.no_grad():
            scale = h.mean(-1, keepdim=True)
        return h * scale


class DetachedSpectrum(Quirk):
    def between(self, h):
        found = torch.fft.rfft(h)
        with torch.no_grad():
            kept = found * 2
        return torch.fft.irfft(found * kept + found.detach() * found, n=h.shape[-1])


class GradInNoGrad(Quirk):
    @torch.no_grad()
    def between(self, h):
        with torch.enable_grad():
            inner = h * 2
        return inner + h * 3


class Filled(Quirk):
    def between(self, h):
        o = torch.zeros_like(h)
        o[:, :4] = h[:, 4:8]
        o[:, 7] = 1.0
        o[1:3, 8:12].copy_(h[1:3, :4] * 2)
        return o + h


class Narrowed(Quirk):
    def between(self, h):
        k = h * 2
        k.narrow(1, 2, 3).zero_()
        k.view(-1, 4, 4)[:, 0].mul_(3)
        return k * h


class Turned(Quirk):
    def between(self, h):
        k = h * 2
        k.t()[3].mul_(0.5)
        k.view(-1)[7:9] = 0.25
        k.diagonal().add_(1)
        k.permute(1, 0).unsqueeze(0).transpose(1, 2).select(2, 1).sub_(0.5)
        table = torch.zeros(8, 4)
        first, second = table.split(2, dim=1)
        second[:] = 2.0
        table.unbind(1)[0].add_(1)
        return k * torch.cat([table, first, second], 1).repeat(1, 2).to(h.dtype)


class ReadBefore(Quirk):
    def between(self, h):
        k = h + 0
        early = k[:, :8] * 2
        alias = k
        k += 1
        k[:, :8].clamp_(max=1.2)
        return alias * torch.cat([early, early], 1)


class DropsNothing(Quirk):
    def between(self, h):
        k = functional.dropout(h * 1.5, 0.0, training=True)
        view = k.view(-1)
        k.mul_(2)
        return h * view.view_as(h)


class Put(Quirk):
    def between(self, h):
        k = h.clone()
        row = k[0]
        k[h > 0.3] = 0.0
        k.index_add_(1, torch.tensor([1, 2]), h[:, :2])
        return k + row


class Masked(Quirk):
    def between(self, h):
        scores = h @ h.t()
        scores.view(-1).masked_fill_(torch.eye(len(h), dtype=torch.bool).view(-1), -1e4)
        return scores.softmax(-1) @ h


class Shifted(Quirk):
    """As encoder-decoder models make the decoder's input from labels."""

    def forward(self, x):
        labels = (x * 3).long().clamp(0, 7)
        moved = labels.new_zeros(labels.shape)
        moved[..., 1:] = labels[..., :-1].clone()
        moved[..., 0] = 5
        moved.masked_fill_(moved == 7, 1)
        return (self.down(self.up(functional.one_hot(moved, 8).to(x.dtype))) ** 2).mean()


class Counter(Quirk):
    def between(self, h):
        self.count.add_(1)
        return h * self.count


class Rebound(Quirk):
    def between(self, h):
        h = h * (self.count + 1)
        self.count = self.count + 1
        return h


class Normalized(Quirk):
    """Three times: twice by one module."""

    def __init__(self):
        super().__init__()
        self.norm, self.image_norm = nn.BatchNorm1d(16), nn.BatchNorm2d(4)

    def between(self, h):
        return self.norm(self.image_norm(self.norm(h).view(-1, 4, 2, 2)).flatten(1) * h)


class NormalizedInput(Quirk):
    """Of what no parameter has a part in, and by a function that keeps no statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8, affine=False, momentum=0.3)

    def forward(self, x):
        return super().forward(functional.batch_norm(self.norm(x), None, None, training=True))


class NormalizedFrozen(Quirk):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16).eval()

    def between(self, h):
        return self.norm(h + 1)


class NormalizedInstance(Quirk):
    def between(self, h):
        return functional.instance_norm(h.view(-1, 4, 4)).flatten(1) * h


class TwoNames(Quirk):
    """Has one of its modules under a second name, as peft has the embedding of a model."""

    def __init__(self):
        super().__init__()
        self.again = self.up

    def between(self, h):
        return self.again(h[:, :8]) * h


class ReadsConstants(Quirk):
    """Values that follow from shapes alone, of tensors that are written in part."""

    def between(self, h):
        mask = torch.ones(len(h), len(h)).triu(1)
        view = mask[0]
        view[1] = 3.0
        if (mask.sum(1) > 3).any() and int(mask[0, 1]) == 3:
            h = h * mask.sum().item()
        return h * 2 if torch.equal(mask, mask.T) else h


class Member(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, h):
        self.calls = self.calls + 1
        return h * self.calls


class ReboundInside(Quirk):
    """Sets a buffer of modules within, which are equal."""

    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList([Member(), Member(), Member()])

    def between(self, h):
        for member in self.members:
            h = member(h)
        return h


RIGHT = {
    kind.__name__: kind
    for kind in (
        *(NoGrad, NoGradView, NoGradInAutocast, GradInNoGrad, Filled, Narrowed, Turned),
        *(ReadBefore, DropsNothing, Put, Masked, Shifted, Counter, Rebound),
        *(Normalized, NormalizedInput, NormalizedFrozen, NormalizedInstance, ReadsConstants),
        *(TwoNames, Recomputed, DetachedSpectrum),
        *(ReadBefore, DropsNothing, Put, Masked, Shifted, Counter, Rebound, ReboundInside),
    )
}


class Dropping(Quirk):
    """An executor runs it, since it drops."""

    def forward(self, x):
        h = functional.dropout(torch.tanh(self.up(x)), 0.1, training=self.training)
        return self.down(self.between(h)).square().mean()


class WritesParameter(Dropping):
    def between(self, h):
        with torch.no_grad():
            self.down.weight.clamp_(-1, 1)
        return h


class WritesInput(Dropping):
    def forward(self, x):
        x.mul_(2)
        return super().forward(x)


class WritesData(Dropping):
    def between(self, h):
        h.detach().clamp_(max=0.5)
        return h


class WritesWithoutGrad(Dropping):
    def between(self, h):
        k = h * 1
        with torch.no_grad():
            k.clamp_(max=0.5)
        return k


class WritesMean(Dropping):
    def between(self, h):
        self.count = 0.9 * self.count + 0.1 * h.mean().detach()
        return h * self.count


class WritesUnfolded(Dropping):
    def between(self, h):
        k = h * 1
        k.unfold(1, 2, 2).mul_(2)
        return h + k


class DrawsPython(Dropping):
    def between(self, h):
        return h * random.random()


class DrawsNumpy(Dropping):
    def between(self, h):
        return h * float(np.random.rand())  # noqa: NPY002 - as people write it


class NormalizesByComputed(Dropping):
    def between(self, h):
        mean = self.count.expand(16) * 1
        return functional.batch_norm(h, mean, torch.ones_like(mean), training=True)


class TracksInstances(Dropping):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)

    def between(self, h):
        return self.norm(h.view(-1, 4, 4)).flatten(1)


class Counts(Dropping):
    def between(self, h):
        self.temperature += 0.5
        return h / self.temperature


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        del ctx
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        del ctx
        return gradient * 2


class OwnGradient(Dropping):
    def between(self, h):
        return Doubled.apply(h)


class Applying(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, h):
        return Doubled.apply(self.linear(h))


class OwnGradientsInside(Dropping):
    """Has it in modules that are equal, of which a trace follows one."""

    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList([Applying(), Applying(), Applying()])

    def between(self, h):
        for member in self.members:
            h = member(h)
        return h


class ReturnsNumber(Dropping):
    def forward(self, x):
        loss = super().forward(x)
        return loss, loss.detach().item()


REFUSED = {
    WritesParameter: "a forward that writes to parameter down.weight",
    WritesInput: "a forward that writes to input x",
    WritesData: "a forward that writes to a tensor with a gradient through .detach() or .data "
    "(clamp_)",
    WritesWithoutGrad: "a forward that writes to a tensor with a gradient under torch.no_grad "
    "(clamp_)",
    WritesMean: "a forward that writes what it computes from inputs or parameters to buffer count",
    WritesUnfolded: "a forward that writes to a tensor through unfold",
    DrawsPython: "a forward that draws numbers from Python's random",
    DrawsNumpy: "a forward that draws numbers from numpy.random",
    NormalizesByComputed: "a batch norm with statistics that the forward computes, as the model "
    "has",
    TracksInstances: "instance_norm with running statistics, as norm does",
    OwnGradient: "a forward that calls Doubled, which has a gradient of its own",
    OwnGradientsInside: "a forward that calls Doubled, which has a gradient of its own",
    Counts: "a forward that changes Counts.temperature from 1.5 to 2.0",
}


class Mapped(Dropping):
    def between(self, h):
        return torch.vmap(lambda row: row / (1 + row.square().sum()))(h)


class Chosen(Dropping):
    def between(self, h):
        chosen = (h[:, 0] > 0).nonzero().flatten()
        return h.index_add(0, chosen, h[chosen])


class Reading(Dropping):
    """Reads plain values of every kind."""

    class_scale = 1.0

    def between(self, h):
        return h * self.temperature * self.config.scale * self.class_scale * SCALE * self.plain


class Evaluating(Dropping):
    def between(self, h):
        return h if self.training else h * 2


@dataclass
class Answer:
    """What a model returns beside its loss."""

    hidden: Tensor
    note: str
    missing: None = None


class Cache:
    """An object that holds tensors, and no trace can look into."""

    def __init__(self, keys):
        self.keys = keys


class Structured(Quirk):
    def forward(self, x):
        h = self.up(x)
        loss = self.down(h).square().mean()
        return {
            "count": 3,
            "loss": loss,
            "more": [Answer(h * 2, "twice"), (h, None, torch.float32)],
            "cache": Cache(h),
        }


def given():
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
