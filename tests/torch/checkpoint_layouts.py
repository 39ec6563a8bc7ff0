"""One small model in many layouts, made with torch alone, for tests of checkpoints."""

import functools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from ranks import batches, build, run_warm
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

import msrun
import msrun.parallel.checkpoint.api

# Divisible by every number of data-parallel ranks below.
BATCH = 12
# What the optimizer remembers of the first step shows in the last loss.
STEPS = 3
SAVED_AFTER = 1


@dataclass(frozen=True)
class Layout:
    """Axes, level of optimizer parallel, and ends of names that it leaves alone."""

    mesh: dict
    zero: int = 0
    ignored: tuple = ()

    @property
    def world_size(self):
        return functools.reduce(int.__mul__, self.mesh.values(), 1)


LAYOUTS = {
    "single": Layout({"dp": 1}),
    "dp2": Layout({"dp": 2}),
    "dp4": Layout({"dp": 4}),
    "zero1 but biases": Layout({"dp": 4}, zero=1, ignored=("bias",)),
    "zero3": Layout({"dp": 4}, zero=3),
    "zero3 on 3": Layout({"dp": 3}, zero=3),
    "tp2": Layout({"tp": 2}),
    "tp4": Layout({"tp": 4}),
    "zero3 x tp": Layout({"dp": 2, "tp": 2}, zero=3),
    "pp2": Layout({"pp": 2}),
}


def from_few_and_from_all(layouts):
    """Return rows of a layout and those that it goes on from: three each in CI, at night all.

    Every layout is the source of three others, and none of itself.
    """
    names = list(layouts)
    rows = [
        pytest.param(target, [names[(at + step) % len(names)] for step in (1, 3, 6)], id=target)
        for at, target in enumerate(names)
    ]
    all_rows = (
        pytest.param(target, names, id=f"{target} from all", marks=pytest.mark.slow)
        for target in names
    )
    return [*rows, *all_rows]


STAGES = (("fc1", "fc2"), ("fc3",))
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


def start(layout, **checkpoint):
    """Return the runtime of this rank."""
    config = {"mesh": dict(layout.mesh), "mode": None if "tp" not in layout.mesh else "manual"}
    if "pp" in layout.mesh:
        config["mesh"] = {"stage": layout.mesh["pp"]}
        config["mode"] = "manual"
    if checkpoint:
        config["checkpoint"] = checkpoint
    return msrun.init(config)


def arrange(runtime, layout, model):
    """Return `model` as `layout` has it, as a list of modules."""
    if "pp" in layout.mesh:
        return _stage(model, STAGES[runtime.rank])
    if "tp" in layout.mesh:
        # The 10 rows of the last one are divided unevenly where there are more than 2 parts.
        parallelize_module(
            model,
            runtime.mesh["tp"],
            {
                "fc1": ColwiseParallel(),
                "fc2": RowwiseParallel(),
                "fc3": ColwiseParallel(output_layouts=Replicate()),
            },
        )
    if layout.zero:
        ignored = {
            param for name, param in model.named_parameters() if name.endswith(layout.ignored)
        }
        options = {"reshard_after_forward": layout.zero == 3}
        mesh = runtime.mesh["dp"] if "tp" in layout.mesh else runtime.mesh
        fully_shard(model, mesh=mesh, ignored_params=ignored if layout.ignored else None, **options)
    return [model]


def _stage(model, names):
    """Return one module for each of `names`, in which it has the name that it has in `model`."""
    found = []
    for name in names:
        holder = torch.nn.Module()
        holder.add_module(name, getattr(model, name))
        found.append(holder)
    return found


def parameters(models):
    return [param for model in models for param in model.parameters()]


def train(runtime, layout, models, optimizer, steps):
    """Return the losses over `steps` of the same global batches."""
    count = layout.mesh.get("dp", 1)
    index = runtime.coordinate.get("dp", 0)
    losses = []
    for batch in batches("mlp", size=BATCH, steps=STEPS)[steps]:
        x, y = (t.chunk(count)[index] for t in batch)
        optimizer.zero_grad()
        loss = _pipelined(runtime, models, x, y) if "pp" in layout.mesh else _whole(models, x, y)
        for param in parameters(models):
            if not isinstance(param, DTensor):
                _average(param.grad, count)
        optimizer.step()
        losses.append(_average(loss, count).item())
    return losses


def _whole(models, x, y):
    loss = functional.cross_entropy(models[0](x), y)
    loss.backward()
    return loss.detach()


def _average(tensor, count):
    if count > 1:
        dist.all_reduce(tensor)  # in these layouts the other axes have no plain tensors
        tensor /= dist.get_world_size()
    return tensor


def _pipelined(runtime, models, x, y):
    """Two stages, one batch: forward there, gradient back."""
    if runtime.rank == 0:
        hidden = functional.relu(models[1].fc2(functional.relu(models[0].fc1(x))))
        dist.send(hidden.detach(), 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
        loss = torch.empty(())
    else:
        hidden = torch.empty(len(x), 32)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        loss = functional.cross_entropy(models[0].fc3(hidden), y)
        loss.backward()
        dist.send(hidden.grad, 0)
        loss = loss.detach()
    dist.broadcast(loss, 1)
    return loss


def prepare(name, **checkpoint):
    """Return runtime, layout, models and optimizer of this rank, and its checkpoints."""
    layout = LAYOUTS[name]
    runtime = start(layout, **checkpoint)
    models = arrange(runtime, layout, build("mlp"))
    optimizer = ADAMW(parameters(models))
    checkpoints = msrun.parallel.checkpoint.api.Checkpoints(runtime.config, runtime.context)
    return runtime, layout, models, optimizer, checkpoints


def save_early(name, folder):
    """Train the first steps and save; return all losses of that time."""
    runtime, layout, models, optimizer, checkpoints = prepare(name)
    losses = train(runtime, layout, models, optimizer, slice(SAVED_AFTER))
    checkpoints.save(folder / name, models, optimizer, step=SAVED_AFTER)
    return losses


def resume_all(name, folder, sources):
    """Return source -> losses of the other steps after loading what it saved."""
    found = {}
    for source in sources:
        runtime, layout, models, optimizer, checkpoints = prepare(name)
        if source:
            assert checkpoints.load(folder / source, models, optimizer).step == SAVED_AFTER
        found[source] = train(runtime, layout, models, optimizer, slice(SAVED_AFTER, STEPS))
    return found


@functools.cache
def expected_losses():
    """Return the losses of all steps in one process, without a checkpoint."""
    return run_warm(_uninterrupted, 1)[0]


def _uninterrupted():
    runtime, layout, models, optimizer, _ = prepare("single")
    return train(runtime, layout, models, optimizer, slice(STEPS))
