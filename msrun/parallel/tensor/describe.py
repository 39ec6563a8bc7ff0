"""Describes the modules of a model as plain values, from which an operator plan is resolved.

The class of a module says little: models have subclasses of `Linear` and `Embedding`, and modules
that act as one.  Under the guard any forward computes what one process does, so a subclass takes
the styles of its base if it owns the weight.  What computes its weight, and layers of LoRA, are
described as such.
"""

from __future__ import annotations

from collections import defaultdict

from torch import nn
from torch.nn.utils import parametrize

from msrun.parallel.plans.module_shape import ModuleShape

_BASES = (nn.Linear, nn.Embedding)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_KNOWN_FORWARDS = ("torch.nn.modules.", "transformers.pytorch_utils")
_WEIGHT = "weight"
_MATRIX_DIMS = 2
_EXPERTS_DIMS = 3


def describe_modules(model: nn.Module) -> dict[str, ModuleShape]:
    """Return kind and parameters of each module of `model`, by name."""
    names: dict[int, list[str]] = defaultdict(list)
    shapes = {}
    for name, module in model.named_modules():  # a module with several names counts by its first
        for param, tensor in module.named_parameters(name, recurse=False, remove_duplicate=False):
            names[id(tensor)].append(param)
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        prefix = f"{name}." if name else ""
        params = {param: tuple(tensor.shape) for param, tensor in own.items()}
        computed = _computed(module)
        shapes[name] = ModuleShape(
            kind=type(module).__name__,
            base=_base(module, params | computed),
            params=params,
            shared={
                param: tuple(other for other in names[id(tensor)] if other != prefix + param)
                for param, tensor in own.items()
                if len(names[id(tensor)]) > 1
            },
            adapters=_adapters(module),
            computed=computed,
            has_own_forward=_has_own_forward(module),
            members=len(module) if isinstance(module, nn.ModuleList | nn.ModuleDict) else 0,
        )
    return shapes


def _base(module: nn.Module, params: dict[str, tuple[int, ...]]) -> str:
    """Return the class whose styles `module` takes, see `ModuleShape`."""
    weight = params.get(_WEIGHT, ())
    for base in _BASES:
        if isinstance(module, base):
            return base.__name__ if len(weight) == _MATRIX_DIMS else ""
    if weight and isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED)):
        if module.groups > 1:
            return "GroupedConv"
        return "ConvTranspose" if isinstance(module, _TRANSPOSED) else "Conv"
    # Linear with the weight as (in, out), of transformers.
    columns = getattr(module, "nf", None)
    if type(module).__name__ == "Conv1D" and len(weight) == _MATRIX_DIMS and columns == weight[1]:
        return "Conv1D"
    return "Experts" if _has_experts(params) else ""


def _has_own_forward(module: nn.Module) -> bool:
    """Return whether `module` computes otherwise than the classes of this name that we know.

    Those of torch, and `Conv1D` of transformers; models have classes of the same names.
    """
    if "forward" in vars(module):
        return True
    origin = getattr(type(module).forward, "__module__", None) or ""
    return not origin.startswith(_KNOWN_FORWARDS)


def _has_experts(params: dict[str, tuple[int, ...]]) -> bool:
    """Return whether `params` are gate and up, and down, of experts as transformers keeps them."""
    if set(params) != {"gate_up_proj", "down_proj"}:
        return False
    up, down = params["gate_up_proj"], params["down_proj"]
    return len(up) == len(down) == _EXPERTS_DIMS and (up[0], up[2], up[1]) == (
        down[0],
        down[1],
        2 * down[2],
    )


def _adapters(module: nn.Module) -> tuple[str, tuple[str, ...], tuple[str, ...]] | None:
    """Return the parts of a LoRA layer of peft, see `ModuleShape`; None for any other module."""
    parts = dict(module.named_children())
    base, first, second = (parts.get(name) for name in ("base_layer", "lora_A", "lora_B"))
    if (
        base is None
        or not isinstance(first, nn.ModuleDict)
        or not isinstance(second, nn.ModuleDict)
    ):
        return None
    return (
        "base_layer",
        tuple(f"lora_A.{name}" for name in first),
        tuple(f"lora_B.{name}" for name in second),
    )


def _computed(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the parameters of its class that `module` computes from others, see `ModuleShape`."""
    if parametrize.is_parametrized(module):
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(module.parametrizations, ())  # type: ignore[arg-type]
        if _WEIGHT in shapes:
            shapes[_WEIGHT] = _weight_shape(module)
        return shapes
    # Of the older `weight_norm` and `spectral_norm`: a plain tensor that a hook sets.
    kinds = (*_BASES, *_CONVOLUTIONS, *_TRANSPOSED)
    if isinstance(module, kinds) and _WEIGHT not in dict(module.named_parameters(recurse=False)):
        return {_WEIGHT: ()}
    return {}


def _weight_shape(module: nn.Module) -> tuple[int, ...]:
    """Return the shape of a weight by what `module` was made with; empty if that is not known.

    The weight itself is not asked: a spectral norm takes a step whenever it is computed.
    """
    if isinstance(module, nn.Linear):
        return (module.out_features, module.in_features)
    if isinstance(module, nn.Embedding):
        return (module.num_embeddings, module.embedding_dim)
    if isinstance(module, _TRANSPOSED):
        return (module.in_channels, module.out_channels // module.groups, *module.kernel_size)
    if isinstance(module, _CONVOLUTIONS):
        return (module.out_channels, module.in_channels // module.groups, *module.kernel_size)
    return ()
