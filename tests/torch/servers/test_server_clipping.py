"""Gradients on servers are clipped as in one process, or the script is told why not."""

import pytest
import torch
from ranks import run_warm
from server_jobs import serving
from test_remote_parameters import LOSS, OPTIMIZERS, Clicks, batch, check
from torch import nn

import msrun
from msrun.errors import MsrunError

pytestmark = pytest.mark.torch

PARAMS = ["items.weight", "users.weight", "rare.weight", "wide.*"]
STEPS = 4
CLIP = 0.05


class Sometimes(Clicks):
    """Uses one table for some batches only, so that a rank may have no gradient of it."""

    def __init__(self, *, sparse=False):
        super().__init__(sparse=sparse)
        self.rare = nn.Embedding(300, 8, sparse=sparse)

    def forward(self, items, users, friends):
        found = super().forward(items, users, friends)
        is_rare = (users == 7) | (users == 21)
        if is_rare.any():
            found = found + (self.rare(users).sum(1) * is_rare)
        return found


def build(*, sparse=False):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Sometimes(sparse=sparse)


def parts(step, rank, ranks):
    return [each.chunk(ranks)[rank] for each in batch(step)]


def of_all(_rt, model, _update):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def of_each(_rt, model, _update):
    """Clip tables and the rest apart, in two norms, and halve a gradient in between."""
    first = torch.nn.utils.clip_grad_norm_(
        [model.items.weight, model.rare.weight], CLIP, foreach=True
    )
    model.users.weight.grad.mul_(0.5)
    rest = [*model.users.parameters(), *model.wide.parameters(), *model.out.parameters()]
    second = torch.nn.utils.clip_grad_norm_(rest, 2 * CLIP, float("inf"))
    found = [each.grad for each in model.parameters() if each.grad is not None]
    third = torch.nn.utils.get_total_norm(found, 3)
    return torch.stack([first, second, third])


def by_hand(_rt, model, _update):
    """As libraries did before torch had a function for it."""
    norms = [
        each.grad.data.norm(2).item() ** 2 for each in model.parameters() if each.grad is not None
    ]
    total = sum(norms) ** 0.5
    for each in model.parameters():
        if each.grad is not None:
            each.grad.data.mul_(min(1.0, CLIP / total))
    return torch.tensor(total)


def scaled(_rt, model, update):
    """Train with a loss scaler that finds infinity in the second step, of one rank's rows."""
    scaler = update.scaler
    scaler.unscale_(update)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def of_runtime(rt, model, update):
    return rt.clip_grad_norm_(model, CLIP) if rt else of_all(rt, model, update)


def of_parts(_rt, model, update):
    """Clip what two backward passes have added."""
    update.again()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def in_closure(_rt, model, update):
    """Clip in the closure of a step, which computes the gradients."""
    found = []

    def closure():
        update.zero_grad()
        update.again()
        found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        return torch.zeros(())

    update.step(closure)
    update.zero_grad()
    return found[0]


def of_zeros(rt, model, update):
    """Clip where a script has set gradients to zero, with which an optimizer still steps."""
    for each in model.users.parameters():
        each.grad.zero_()
    return of_all(rt, model, update)


WAYS = {
    each.__name__: each
    for each in (of_all, of_each, by_hand, of_runtime, scaled, of_parts, in_closure, of_zeros)
}


def loop(rt, way, optimizer, *, sparse=False):
    """Train in a plain loop; return the losses with the norms, and the weights."""
    model = rt.shard(build(sparse=sparse)) if rt else build(sparse=sparse)
    update = OPTIMIZERS[optimizer](model)
    update.add_param_group({"params": model.rare.parameters()})
    update = rt.optimizer(update) if rt else update
    rank, ranks = (rt.rank, rt.world_size) if rt else (0, 1)
    is_scaled = way == "scaled"
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=is_scaled)
    update.scaler = scaler
    found = []
    for step in range(STEPS):
        update.zero_grad()
        *inputs, labels = parts(step, rank, ranks)
        output = model(*inputs)
        if is_scaled and step == 1:  # infinite in the rows of one sample
            output = output * torch.where(inputs[1] == batch(1)[1][0], torch.inf, 1.0)
        loss = LOSS(output, labels)
        update.again = lambda: LOSS(model(*inputs), labels).backward()  # noqa: B023 - of this step
        scaler.scale(loss).backward()
        norm = WAYS[way](rt, model, update)
        found += [*norm.reshape(-1).tolist()] if norm.isfinite().all() else []
        if way != "in_closure":
            scaler.step(update)
            scaler.update()
    weights = rt.state_dict(model) if rt else model.state_dict()
    return found, {name: each.clone() for name, each in weights.items()}


def stepped(rt, optimizer):
    """Train by `rt.step`; return the losses, and the weights."""
    model = build()
    if rt:
        if not rt.config.servers.params:  # the same by marks
            for each in (model.items, model.users, model.rare, model.wide.weight):
                rt.set_param_ps(each)
        model = rt.shard(model)
    update = OPTIMIZERS[optimizer](model)
    update.add_param_group({"params": model.rare.parameters()})
    losses = []
    for step in range(STEPS):
        if rt:
            update = rt.optimizer(update)
            words = parts(step, rt.coordinate.get("dp", 0), rt.context.layout.size("dp"))
            losses.append(rt.step(model, update, LOSS, *words, max_norm=CLIP).item())
            continue
        update.zero_grad()
        *inputs, labels = batch(step)
        loss = LOSS(model(*inputs), labels)
        loss.backward()
        of_all(None, model, update)
        update.step()
        losses.append(loss.item())
    weights = rt.state_dict(model) if rt else model.state_dict()
    return losses, {name: each.clone() for name, each in weights.items()}


LOOPS = [
    ("of_all", "adamw"),
    ("of_each", "momentum"),
    ("by_hand", "adagrad"),
    ("of_runtime", "sgd"),
    ("scaled", "momentum"),
    ("of_all", "sgd", "sparse"),
    ("of_parts", "adamw"),
    ("in_closure", "momentum"),
    ("of_zeros", "adamw"),
]
CACHE = {"servers": {"params": PARAMS, "cache": {"rows": 64, "prefetch": False}}}
ZERO = {"optimizer": {"zero": 2, "threshold": 0}}
PLAN = [{"match": "wide", "style": "colwise"}, {"match": "out", "style": "rowwise"}]
TENSORS = {"servers": {"params": PARAMS[:3]}, "mesh": {"dp": -1, "tp": 2}, "plan": PLAN}
STEPPED = {
    "dp": ("adamw", {"servers": {}}),
    "zero": ("momentum", ZERO),
    "cache": ("adamw", CACHE),
    "tp": ("momentum", TENSORS),
}
GRID = {
    "dp x tp": ("adamw", TENSORS),
    "zero x tp": ("momentum", TENSORS | ZERO),
    "zero 1": ("adagrad", {"optimizer": {"zero": 1, "threshold": 0}}),
    "zero 3": ("adamw", {"optimizer": {"zero": 3, "threshold": 0}, "accumulate": 2}),
    "zero small": ("sgd", {"optimizer": {"zero": 3}}),
    "cache and copies": ("adamw", {"servers": CACHE["servers"] | {"replicas": 1}}),
    "cache and tp": ("adamw", TENSORS | {"servers": {"params": PARAMS[:3], "cache": {"rows": 64}}}),
    "no shared memory": ("momentum", {"servers": {"params": PARAMS, "shared_memory": False}}),
}


def on_servers(loops, configs):
    found = {}
    for words in loops:
        rt = msrun.init({"servers": {"params": PARAMS}})
        found[words] = loop(rt, *words[:2], sparse=len(words) > 2)
        rt.close()
    for name, (optimizer, config) in configs.items():
        rt = msrun.init({"servers": {"params": PARAMS}, **config})
        found[name] = stepped(rt, optimizer)
        rt.close()
    return found


@pytest.mark.slow
def test_clipped_training_is_that_of_one_process(tmp_path, monkeypatch):
    with serving(tmp_path, monkeypatch, 2, 2):
        found = run_warm(on_servers, 2, LOOPS, STEPPED, timeout=100)

    for words in LOOPS:
        # torch takes no norm of sparse gradients; SGD does the same with dense ones.
        check([each[words] for each in found], loop(None, *words[:2]))
    for name, (optimizer, _) in STEPPED.items():
        check([each[name] for each in found], stepped(None, optimizer))


@pytest.mark.slow
@pytest.mark.parametrize("name", GRID)
def test_clipped_training_on_other_axes(name, tmp_path, monkeypatch):
    with serving(tmp_path, monkeypatch, 3, 4):
        found = run_warm(on_servers, 4, LOOPS[:1] + LOOPS[3:4], {name: GRID[name]}, timeout=200)

    for words in LOOPS[:1] + LOOPS[3:4]:
        check([each[words] for each in found], loop(None, *words))
    check([each[name] for each in found], stepped(None, GRID[name][0]))


def alone():
    """Clip on rank 0 alone; return what it is told."""
    rt = msrun.init({"servers": {"params": PARAMS[:3]}})
    model = rt.shard(build())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    *inputs, labels = parts(0, rt.rank, rt.world_size)
    LOSS(model(*inputs), labels).backward()
    text = ""
    if rt.is_main:
        try:
            of_all(rt, model, update)
        except MsrunError as error:
            text = f"{error} {error.hint}"
    update.step()
    rt.close()
    return text


def test_a_norm_that_one_rank_takes_alone_is_refused(tmp_path, monkeypatch):
    with serving(tmp_path, monkeypatch, 2, 2):
        text, _ = run_warm(alone, 2)

    assert "rank 0 takes a norm of gradients, and rank 1 has done this step without it" in text
