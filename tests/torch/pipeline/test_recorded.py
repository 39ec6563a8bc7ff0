"""What a forward may do between stages: what it does in one process, or one sentence."""

import copy
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from pipelines import CPU, pipeline, train_step
from ranks import run_warm
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from msrun.errors import UsageError
from msrun.parallel.pipeline.penalty import check_loss
from msrun.parallel.pipeline.plan import plan_split
from msrun.parallel.pipeline.split_model import split_model

pytestmark = pytest.mark.torch

AB = {"a": 0, "b": 1, "c": 1}
STAGES = "parallel.pipeline.stages: "
FACTOR = 1.0
SETTINGS = SimpleNamespace(scale=1.0)
CALLS = []


class Three(nn.Module):
    """Three layers; a subclass says what is between them."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 8)
        self.temperature = 1.0
        self.config = SimpleNamespace(scale=1.0, nested=SimpleNamespace(power=1))
        self.steps = 0
        self.kept = []
        self.register_buffer("count", torch.zeros(()))


class NoGrad(Three):
    def forward(self, x):
        with torch.no_grad():
            h = self.a(x)
        with torch.no_grad():
            size = self.b(h).abs().mean()
        return self.c(self.b(h) / size)


class Decorated(Three):
    @torch.no_grad()
    def encode(self, x):
        return self.a(x) * 2

    def forward(self, x):
        return self.c(self.b(self.encode(x)) + self.encode(x))


class Switched(Three):
    def forward(self, x):
        torch.set_grad_enabled(False)
        h = self.a(x)
        torch.set_grad_enabled(True)
        with torch.no_grad(), torch.enable_grad():
            return self.c(self.b(h))


class Autocast(Three):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            h = self.a(x) @ self.b.weight
            with torch.autocast("cpu", enabled=False):
                h = self.b(h.float())
        return self.c(h.float())


class Alias(Three):
    def forward(self, x):
        g = self.a(x)
        k = g
        g += 1
        return self.c(self.b(k))


class LateWrite(Three):
    def forward(self, x):
        g = self.a(x) * 1
        with torch.no_grad():
            u = self.b(g)
        g.mul_(2)
        return self.c(g) + u


class Fill(Three):
    def forward(self, x):
        h = self.a(x)
        o = torch.zeros_like(h)
        o[:, :4] = h[:, 4:]
        o.narrow(1, 6, 2).add_(1)
        o.view(-1, 2, 4)[:, 1].mul_(3)
        shifted = x.new_zeros(x.shape)
        shifted[:, 1:] = x[:, :-1].clone()
        shifted.masked_fill_(shifted > 1, 0.5)
        return self.c(self.b(o) + shifted)


class Branches(Three):
    def forward(self, x, mask=None, *, flags=None):
        h = self.a(x)
        if h.shape[-1] == 8 and h.dim() == 2 and self.training and mask is None:
            h = h / len(x)
        for part in h.split(4, dim=-1):
            h = h + part.sum(dim=-1, keepdim=True)
        if flags:
            h = h * flags["gain"]
        return self.c(self.b(h))


class Output(Three):
    def forward(self, x):
        h, *others = self.a(x), {"x": (x, None)}
        for row in h:
            h = h + row
        return self.c(self.b(h) + others[0]["x"][0])


class OwnValues(Three):
    def forward(self, x):
        mask = torch.ones(8, 8).tril()
        if bool((mask == torch.tril(mask)).all()) and torch.arange(3).max().item() == 2:
            x = x @ mask
        if torch.rand([]) < 0.0:
            x = x * 100
        return self.c(self.b(self.a(x)))


def _whole(kind):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return kind()


def _batch(step, width=8):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, width, generator=generator), torch.arange(8)


def _split(model):
    settings = pipeline(AB, microbatches=2)
    return split_model(model, settings, dist.group.WORLD, CPU, (_batch(0)[0],))


def _difference(kind, change=None):
    """Train three steps; return how far losses and weights are from those of one process.

    `change(models, step)` is called before each step with what a script holds in each case.
    """
    whole, network = _whole(kind), _whole(kind)
    part = _split(network)
    own = torch.optim.SGD(whole.parameters(), lr=0.1)
    update = torch.optim.SGD(part.parameters(), lr=0.1)
    off = []
    for step in range(3):
        if change:
            change((whole, part, network), step)
        x, y = _batch(step)
        own.zero_grad()
        # One process, in micro-batches of the same size: a forward may look at its batch.
        losses = [functional.cross_entropy(whole(x[i : i + 4]), y[i : i + 4]) for i in (0, 4)]
        loss = sum(losses) / 2
        loss.backward()
        own.step()
        update.zero_grad()
        off.append(abs(train_step(part, [x], y, functional.cross_entropy).item() - loss.item()))
        part.reduce_tied()
        update.step()
    weights = dict(whole.named_parameters())
    off += [(p - weights[n]).detach().abs().max().item() for n, p in part.named_parameters()]
    return max(off)


@pytest.mark.parametrize(
    "kind",
    [
        NoGrad,
        Decorated,
        Switched,
        Alias,
        LateWrite,
        Fill,
        Branches,
        Output,
        OwnValues,
    ],
)
def test_forward_between_stages_is_that_of_one_process(kind):
    assert max(run_warm(_difference, 2, kind)) < 1e-6


def test_autocast_between_stages_is_that_of_one_process():
    assert max(run_warm(_difference, 2, Autocast)) < 1e-3


def _moved():
    part = _split(_whole(NoGrad))
    train_step(part, [_batch(0)[0]], _batch(0)[1], functional.cross_entropy)
    return [name for name, p in part.named_parameters() if p.grad is not None and p.grad.any()]


def test_an_encoder_without_gradients_does_not_move():
    assert run_warm(_moved, 2) == [[], ["b.weight", "b.bias", "c.weight", "c.bias"]]


class Noise(Three):
    def forward(self, x):
        noise = torch.randn(8)
        h = self.a(x + torch.rand(8) + noise)
        return self.c(self.b(functional.dropout(h, 0.5)) + noise)


def _noise():
    """Return whether two runs differ, and what one run without the model's layers yields."""
    network = _whole(Noise)
    part = _split(network).eval()
    x = _batch(0)[0]
    with torch.no_grad():
        first, second = part(x), part(x)
    return bool((first != second).any()), first


def test_random_numbers_are_drawn_anew_and_once_for_all_stages():
    (differs, found), (_, other) = run_warm(_noise, 2)

    assert differs
    assert torch.equal(found, other)


def _scaled(scale, closed):
    class Values(Three):
        def forward(self, x):
            h = self.a(x) * self.temperature * FACTOR * SETTINGS.scale * scale[0]
            for _ in range(self.config.nested.power):
                h = h * self.config.scale * closed()
            return self.c(self.b(h)) if len(CALLS) < 100 else h

    return Values


def _changing(what):
    """Train a model that reads plain values, one of which the script changes between steps."""
    scale, factor = [1.0], 1.0

    def closed():
        return factor

    def change(models, step):
        nonlocal factor
        whole, part, network = models
        value = 1.0 + step
        if what == "attribute":
            whole.temperature = part.temperature = value
        elif what == "attribute of the original":
            whole.temperature = network.temperature = value
        elif what == "configuration":
            whole.config.scale = part.config.scale = value
        elif what == "nested configuration":
            whole.config.nested.power = part.config.nested.power = 1 + step
        elif what == "global":
            globals()["FACTOR"] = value
        elif what == "object":
            SETTINGS.scale = value
        elif what == "closure":
            factor = value
        else:
            scale[0] = value

    return _difference(_scaled(scale, closed), change)


@pytest.mark.parametrize(
    "what",
    [
        "attribute",
        "attribute of the original",
        "configuration",
        "nested configuration",
        "global",
        "object",
        "closure",
        "list of a closure",
    ],
)
def test_a_plain_value_that_changes_is_followed(what):
    assert max(run_warm(_changing, 2, what)) < 1e-6


class Counts(Three):
    def forward(self, x):
        self.steps += 1
        return self.c(self.b(self.a(x)) / self.steps)


class Rebinds(Three):
    def forward(self, x):
        self.count = self.count + 1
        return self.c(self.b(self.a(x)))


class Keeps(Three):
    def forward(self, x):
        self.kept.append(self.a(x))
        return self.c(self.b(self.kept[-1]))


class CountsGlobally(Three):
    def forward(self, x):
        global FACTOR  # noqa: PLW0603 - as some models do
        FACTOR += 1
        return self.c(self.b(self.a(x))) * FACTOR


class SetsOfUnit(Three):
    def forward(self, x):
        self.b.gain = 2.0
        return self.c(self.b(self.a(x)))


class Draws(Three):
    def forward(self, x):
        return self.c(self.b(self.a(x * random.random())))


class Item(Three):
    def forward(self, x):
        h = self.a(x)
        return self.c(self.b(h if h.sum().item() > 0 else -h))


class Drops(Three):
    def forward(self, x):
        h = self.a(x)
        return self.c(self.b(h) if torch.rand(()).item() < 0.5 else h)


class TwoCopies(Three):
    def forward(self, x):
        g = self.a(x)
        first = g[:, :4]
        u = self.b(g)
        g.mul_(2)
        return self.c(u + torch.cat([first, first], 1))


class Handed(Three):
    def forward(self, x):
        box = Box()
        return (
            self.c(self.b(self.a(x)) * box(x))
            if False
            else self.c(Takes.take(self.b, box, self.a(x)))
        )


class Box:
    value = 1


class Takes:
    @staticmethod
    def take(module, box, x):
        return module(x, box)


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        del ctx
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        del ctx
        return gradient * 3


class Applies(Three):
    def forward(self, x):
        return self.c(self.b(Custom.apply(self.a(x))))


class Seeds(Three):
    def forward(self, x):
        torch.manual_seed(0)
        return self.c(self.b(self.a(x) * torch.rand(8)))


class Reentrant(Three):
    def forward(self, x):
        return self.c(checkpoint(lambda y: self.b(y).sin(), self.a(x), use_reentrant=True))


class OtherWeights(Three):
    def forward(self, x):
        halved = {name: value / 2 for name, value in self.b.named_parameters()}
        return self.c(torch.func.functional_call(self.b, halved, (self.a(x),)))


def _hooked(kind):
    def build():
        model = Three()
        getattr(model, kind)(lambda *_: None)
        return model

    return build


READS = "forward reads the value of a tensor (item), which other stages do not have"
REENTRANT = "torch.utils.checkpoint with use_reentrant=True"
HERE = "(test_recorded.py, line {line})"


@pytest.mark.parametrize(
    ("kind", "line", "sentence"),
    [
        (Counts, 0, "the forward of Counts sets steps, and is divided"),
        (Rebinds, 0, "the forward of Rebinds sets count, and is divided"),
        (Keeps, 0, "the forward of Keeps sets kept, and is divided"),
        (CountsGlobally, 0, "the forward of CountsGlobally sets FACTOR, and is divided"),
        (SetsOfUnit, 1, "forward sets b.gain " + HERE),
        (Draws, 0, "the forward of Draws draws numbers of random.random, and is divided"),
        (Item, 2, f"{READS} {HERE}"),
        (Drops, 2, f"{READS} {HERE}"),
        (Handed, 0, "forward hands b an object of Box "),
        (Applies, 1, "forward calls torch.autograd.Function.apply " + HERE),
        (Seeds, 1, "forward calls torch.manual_seed " + HERE),
        (Reentrant, 1, f"forward calls {REENTRANT} {HERE}"),
        (OtherWeights, 2, f"forward calls b with other tensors in place of its parameters {HERE}"),
        (TwoCopies, 0, "mul_ after b of stage 1 writes in place to what "),
        (_hooked("register_forward_hook"), 0, "Three has forward hooks, and is divided"),
        (_hooked("register_forward_pre_hook"), 0, "Three has forward_pre hooks, and is divided"),
        (_hooked("register_full_backward_hook"), 0, "Three has backward hooks, and is divided"),
    ],
)
def test_what_stages_cannot_repeat_is_refused(kind, line, sentence):
    number = kind.forward.__code__.co_firstlineno + line if line else 0

    with pytest.raises(UsageError) as caught:
        plan_split(kind(), pipeline(AB), 2, (_batch(0)[0],))

    assert str(caught.value).startswith(STAGES + sentence.format(line=number))


def test_a_refused_forward_leaves_the_model_as_it_was():
    model, state = Counts(), random.getstate()
    before = copy.copy(vars(model))

    with pytest.raises(UsageError):
        plan_split(model, pipeline(AB), 2, (_batch(0)[0],))

    assert vars(model) == before
    assert random.getstate() == state


def test_a_penalty_in_the_loss_function_is_refused():
    model, (x, y) = _whole(Branches), _batch(0)
    output = model(x)
    loss = functional.cross_entropy(output, y)
    penalty = sum(param.pow(2).sum() for param in model.parameters())

    check_loss(model, [output.grad_fn], loss)
    with pytest.raises(UsageError) as caught:
        check_loss(model, [output.grad_fn], loss + 0.01 * penalty)

    assert str(caught.value) == (
        f"{STAGES}the loss function reads a.weight, and of the model's weights it sees those of "
        "the last stage alone"
    )


def _refused_penalty():
    """Return what the rank of the last stage says; the other does not run."""
    part = _split(_whole(Branches))
    if dist.get_rank() == 0:
        return ""
    ends = [torch.ones(1, requires_grad=True).exp().grad_fn]
    with pytest.raises(UsageError) as caught:
        check_loss(part, ends, part.c.bias.sum())
    return str(caught.value).partition(" reads ")[2].partition(",")[0]


def test_a_penalty_is_found_in_the_parameters_of_a_stage():
    assert run_warm(_refused_penalty, 2) == ["", "c.bias"]
