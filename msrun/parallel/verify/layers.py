"""The layers that are compared where a copy of the whole model does not fit.

Layers are the members of the outermost lists of modules, and outside of lists the outermost modules
that have no list inside: together they have nearly all parameters.  Of layers alike, of one class
with tensors of the same shapes, the first and the last are compared.

A layer is kept as it was before `rt.shard`, with tensors that have no memory.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from msrun.parallel.match import matching

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer to compare.

    Args:
        name: Of the module in the model.
        kind: Name of its class.
        module: A copy, with tensors on the meta device.
        shared: Names inside of it of parameters that modules outside of it have too.
    """

    name: str
    kind: str
    module: nn.Module
    shared: Collection[str]

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})" if self.name else self.kind


@dataclass(frozen=True, kw_only=True)
class LayerSample:
    """The layers of a model to compare.

    Args:
        layers: By their order in the model.
        left_out: Layer -> why it is not compared.
        others: Layers like those that are compared.
        reason: Why not the whole model.
        limit: Bytes that the largest layer and what is recorded of all of them may take.
    """

    layers: list[Layer]
    left_out: Mapping[str, str]
    others: int
    reason: str
    limit: int


def sample(model: nn.Module, patterns: Collection[str], limit: int, reason: str) -> LayerSample:
    """Return the layers of `model` to compare.

    Args:
        model: The model before `rt.shard`.
        patterns: Of names of layers; empty compares the first and the last of each kind.
        limit: Bytes that a comparison may take.
        reason: Why not the whole model.
    """
    modules = dict(model.named_modules())
    if patterns:
        found = matching(patterns, list(modules), "verify.modules")
        called = [name for name in found if type(modules[name]).forward is not nn.Module.forward]
        # A pattern such as `*` also matches lists, which nothing calls, and the model itself.
        found = set(called) - {""} or set(called) or found
        chosen = [name for name in modules if name in found]
        others = 0
    else:
        every = [name for name in _layers("", model) if name in modules]
        chosen = _first_and_last(modules, every)
        others = len(every) - len(chosen)
    memo = _without_memory(model)
    layers, left_out = [], {}
    for name in chosen:
        module = modules[name]
        size = comparison_size(module)
        if type(module).forward is nn.Module.forward:
            left_out[name] = "has no forward"
        elif size > limit:
            left_out[name] = f"its weights and gradients take {size} bytes of {limit}"
        else:
            try:
                skeleton = copy.deepcopy(module, dict(memo))
            except Exception as error:  # noqa: BLE001 - whatever a module does when it is copied
                text = str(error).strip().partition("\n")[0]
                left_out[name] = f"it cannot be copied: {type(error).__name__}: {text}"
                continue
            shared = _shared(model, module)
            layers.append(
                Layer(name=name, kind=type(module).__name__, module=skeleton, shared=shared)
            )
    return LayerSample(layers=layers, left_out=left_out, others=others, reason=reason, limit=limit)


def comparison_size(module: nn.Module) -> int:
    """Return the bytes of all tensors of `module`, and of gradients of its parameters."""
    tensors = {id(t): t.nbytes for t in (*module.parameters(), *module.buffers())}
    return sum(tensors.values()) + sum(param.nbytes for param in module.parameters())


def _layers(name: str, module: nn.Module) -> Iterator[str]:
    """Yield the names of the layers of `module`, called `name`."""
    children = list(module.named_children())
    has_list = any(isinstance(part, _LISTS) for part in module.modules())
    if not children or (name and not has_list):
        if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
            yield name
        return
    prefix = f"{name}." if name else ""
    for child, part in children:
        if isinstance(module, _LISTS) and not isinstance(part, _LISTS):
            if any(True for _ in part.parameters()):
                yield prefix + child
        else:
            yield from _layers(prefix + child, part)


def _first_and_last(modules: Mapping[str, nn.Module], names: Collection[str]) -> list[str]:
    """Return of those `names` whose modules are alike the first and the last."""
    alike: dict[object, list[str]] = {}
    for name in names:
        module = modules[name]
        shapes = tuple((key, param.shape, param.dtype) for key, param in module.named_parameters())
        alike.setdefault((type(module), shapes), []).append(name)
    chosen = {name for group in alike.values() for name in (group[0], group[-1])}
    return [name for name in names if name in chosen]


def _without_memory(model: nn.Module) -> dict[int, Tensor]:
    """Return what `copy.deepcopy` is to take for each tensor of `model`: one without memory."""
    memo: dict[int, Tensor] = {}
    for param in model.parameters():
        empty = Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        vars(empty).update(vars(param))
        memo[id(param)] = empty
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return memo


def _shared(model: nn.Module, layer: nn.Module) -> set[str]:
    own = set(map(id, layer.modules()))
    outside = {
        id(param)
        for module in model.modules()
        if id(module) not in own
        for param in module.parameters(recurse=False)
    }
    named = layer.named_parameters(remove_duplicate=False)
    return {name for name, param in named if id(param) in outside}
