"""Gradients of parameters on servers: on a rank alone, and from one step to the next."""

import pytest
import torch
from ranks import run_warm
from server_jobs import serving
from torch import nn

import msrun
from msrun.errors import MsrunError
from msrun.parallel.servers.gradients.remote_gradients import RemoteGradients, Terms
from msrun.parallel.servers.gradients.server_gradient import ServerGradient

pytestmark = pytest.mark.torch


class Remote:
    """A parameter on servers, of which nothing is pushed here."""

    def __init__(self, name, parameter):
        self.name, self.parameter = name, parameter


class Either(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


def watched():
    model = Either()
    remotes = [Remote(name, parameter) for name, parameter in model.named_parameters()]
    terms = Terms(scale=1.0, is_pushed=True, is_alone=True, is_sync=True)
    gradients = RemoteGradients(remotes, terms, no_servers)
    gradients.watch(model)
    return model, gradients


def fail(_):
    raise ArithmeticError


def no_servers():
    raise AssertionError("a rank alone needs no server for a norm")


def test_every_parameter_has_a_gradient_after_a_backward_pass_that_follows_one_that_raised():
    model, _gradients = watched()
    broken = model.used.weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        model(torch.ones(1, 2)).sum().backward()
    broken.remove()
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()

    assert all(isinstance(each.grad, ServerGradient) for each in model.parameters())
    norms = [float(each.grad.norm()) for each in model.parameters()]
    assert norms == pytest.approx([2.0, 2**0.5, 0.0, 0.0])


class Turns(nn.Module):
    """Uses one table in some steps, the other one in the others, and a layer always."""

    def __init__(self, *, sparse=False):
        super().__init__()
        self.even = nn.EmbeddingBag(40, 4, sparse=sparse)
        self.odd = nn.Embedding(300, 4, sparse=sparse)
        self.wide, self.out = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, ids, *, is_odd):
        found = self.odd(ids).sum(1) if is_odd else self.even(ids)
        return self.out(torch.tanh(self.wide(found) if is_odd else found))[:, 0]


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.5)


def zeros(update, _step):
    update.zero_grad(set_to_none=False)


def kept(update, step):
    """Add up the gradients of two steps."""
    if step % 2 == 0:
        update.zero_grad()


def repeated(update, step):
    """Step again with the gradients of the step before, and then with zeros."""
    if step == 2:
        update.step()
    update.zero_grad(set_to_none=False)
    if step == 4:
        update.step()
    update.zero_grad()


WAYS = {
    "zeros momentum": (zeros, momentum, False),
    "zeros adamw": (zeros, adamw, False),
    "zeros sparse": (zeros, adagrad, True),
    "kept": (kept, momentum, False),
    "repeated": (repeated, adamw, False),
}


def in_turns(rt, before, optimizer, *, sparse):
    """Train in a plain loop, with `before` each step; return the losses, and the weights."""
    torch.manual_seed(3)
    model = Turns(sparse=sparse)
    model = rt.shard(model) if rt else model
    update = optimizer(model)
    update = rt.optimizer(update) if rt else update
    losses = []
    for step in range(7):
        draw = torch.Generator().manual_seed(step)
        ids, target = torch.randint(0, 40, (8, 3), generator=draw), torch.rand(8, generator=draw)
        if rt:
            ids, target = (each.chunk(rt.world_size)[rt.rank] for each in (ids, target))
        before(update, step)
        loss = nn.functional.mse_loss(model(ids, is_odd=step in {1, 2, 5}), target)
        loss.backward()
        update.step()
        losses.append(loss.item())
    weights = rt.state_dict(model) if rt else model.state_dict()
    return losses, {name: each.clone() for name, each in weights.items()}


def each_way():
    found = {}
    for name, (before, optimizer, sparse) in WAYS.items():
        rt = msrun.init({"servers": {"params": ["even.*", "odd.*", "wide.*"]}})
        found[name] = in_turns(rt, before, optimizer, sparse=sparse)
        rt.close()
    return found


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch's Adagrad
def test_gradients_stay_between_steps_as_in_one_process(tmp_path, monkeypatch):
    """`zero_grad` may make zeros of them, with which momentum and weight decay go on."""
    with serving(tmp_path, monkeypatch, 2, 2):
        found = run_warm(each_way, 2)

    for name, (before, optimizer, sparse) in WAYS.items():
        losses, weights = in_turns(None, before, optimizer, sparse=sparse)
        curves = [each[name][0] for each in found]
        mean = [sum(parts) / 2 for parts in zip(*curves, strict=True)]
        assert mean == pytest.approx(losses, abs=1e-6), name
        for _, state in (each[name] for each in found):
            for key, weight in weights.items() if state else ():
                torch.testing.assert_close(state[key], weight, rtol=0, atol=1e-6, msg=name)


def norms_between_steps():
    """Return a norm after the optimizer's step, once of zeros, and what is said of another."""
    rt = msrun.init({"servers": {"params": ["even.*", "odd.*"]}})
    model = rt.shard(Turns())
    update = rt.optimizer(momentum(model))
    model(torch.tensor([[1, 2, rt.rank]]), is_odd=False).mean().backward()
    update.step()
    model.cpu()  # as libraries do at their end
    try:
        model.even.weight.grad.norm()
    except MsrunError as error:
        said = f"{error} {error.hint}"
    update.zero_grad(set_to_none=False)
    zero = float(torch.nn.utils.clip_grad_norm_([model.even.weight], 1.0))
    model(torch.tensor([[1, 2, rt.rank]]), is_odd=False).mean().backward()
    norm = float(torch.nn.utils.clip_grad_norm_([model.even.weight], 1.0))
    update.step()
    rt.close()
    return said, zero, norm


def test_a_norm_after_the_optimizers_step_is_refused(tmp_path, monkeypatch):
    """Ranks that do not take it would wait for nobody, and the one that does for them."""
    with serving(tmp_path, monkeypatch, 1, 2):
        found = run_warm(norms_between_steps, 2)

    for said, zero, norm in found:
        assert "norm of the gradient of even.weight is asked for after the optimizer's" in said
        assert zero == 0.0
        assert norm > 0.0
