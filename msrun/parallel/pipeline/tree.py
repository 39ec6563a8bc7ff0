"""The module tree of one stage: its own modules, under the names that they had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel.config import ROOT
from msrun.parallel.pipeline.plan import PipelineCut

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def graft(tree: nn.Module, model: nn.Module, plan: PipelineCut, stage: int) -> None:
    """Put the modules of `stage` into the empty `tree`; nothing is copied."""
    for name in sorted(plan.modules(stage), key=lambda name: name.count(".")):
        parent, _, last = name.rpartition(".")
        holder = _holder(tree, model, parent)
        if last not in dict(holder.named_children()):  # else it came with its parent
            holder.add_module(last, model.get_submodule(name))
    persistent = model.state_dict(keep_vars=True)
    for name in plan.attributes(stage):
        parent, _, last = name.rpartition(".")
        holder = _holder(tree, model, parent)
        if hasattr(holder, last):
            continue
        match _find(model, plan.constants, name):
            case Parameter() as param:
                holder.register_parameter(last, param)
            case Tensor() as buffer if name in dict(model.named_buffers(remove_duplicate=False)):
                holder.register_buffer(last, buffer, persistent=name in persistent)
            case value:
                setattr(holder, last, value)


def check_names(kind: type[nn.Module], model: nn.Module) -> None:
    """Refuse members of `model` whose names `kind` has for something else.

    Raises:
        ModelError: There is one.
    """
    taken = set(dir(kind)) - set(dir(nn.Module))
    members = [
        name for name, _ in (*model.named_children(), *model.named_parameters(recurse=False))
    ]
    for name in taken.intersection(members):
        raise ModelError(
            f"{ROOT}.pipeline: {type(model).__name__}.{name} has a name that the pipeline needs"
        )


def release(model: nn.Module, plan: PipelineCut, stage: int) -> None:
    """Free the memory of other stages' modules, even if something still refers to `model`."""
    ours: set[nn.Module | Parameter] = set(plan.stage_params[stage].values())
    for name in plan.modules(stage):
        ours |= set(model.get_submodule(name).modules())
    for other in range(plan.chunks.stages):
        for name in plan.modules(other):
            module = model.get_submodule(name)
            if ours.isdisjoint([*module.modules(), *module.parameters()]):
                module.to("meta")


def _holder(tree: nn.Module, model: nn.Module, name: str) -> nn.Module:
    """Return the module called `name` in `tree`, which may have to be made."""
    holder, original = tree, model
    for part in filter(None, name.split(".")):
        original = original.get_submodule(part)
        if part not in dict(holder.named_children()):
            kind = type(original) if type(original) in _CONTAINERS else nn.Module
            made = kind()
            holder.add_module(part, made.train(original.training))
        holder = holder.get_submodule(part)
    return holder


def _find(model: nn.Module, constants: Mapping[str, Tensor], name: str) -> Any:
    if name in constants:
        return constants[name]
    parent, _, last = name.rpartition(".")
    return getattr(model.get_submodule(parent), last)
