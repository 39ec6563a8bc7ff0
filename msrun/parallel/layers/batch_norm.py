"""Which modules normalize over a batch, and how they get the statistics of the global batch.

`norm_functions` replaces the functions that normalize; here is where.  The whole model runs inside
of the replacement, by hooks of its root.  Batch norms, and modules whose own code names such a
function, enter it by themselves as well: a script may call a part of the model, and
`torch.utils.checkpoint` runs a part again in the backward pass, where the root is not entered.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import CodeType
from typing import Any, Self

import torch.distributed as dist
from torch import nn

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.config import DATA_AXIS, ROOT, ParallelConfig
from msrun.parallel.layers.norm_functions import ANY_REGION, NormFunctions
from msrun.parallel.rank_context import RankContext

_BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
_InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
_NAMES = frozenset(["batch_norm", "instance_norm"])


def check(config: ParallelConfig, model: nn.Module) -> None:
    """Refuse batch norms that would see one micro-batch at a time.

    A frozen one, in evaluation mode, is refused only if it is used in training mode later.

    Raises:
        ModelError: The model has one, a step has several micro-batches, and the configuration
            does not say `batch_norm: local`.
    """
    refusal = _refusal(config)
    if refusal is None:
        return
    for name, module in _norms(model):
        if module.training:
            raise ModelError(
                f"{refusal} {name} sees one of them at a time",
                hint="say `batch_norm: local` if that is meant",
            )


def synchronize(
    config: ParallelConfig,
    model: nn.Module,
    group: dist.ProcessGroup | None,
    samples: dist.ProcessGroup | None,
) -> NormFunctions | None:
    """Have `model` use the statistics of all samples of `group` wherever it normalizes a batch.

    Args:
        config: The configuration.
        model: The model.
        group: Ranks that share the batch; None for one rank.
        samples: Those of them that have other samples; all but where ranks share images.

    Returns:
        What a recomputation must enter; None if torch's own functions are right.
    """
    functions = NormFunctions(group, _refusal(config), samples)
    if config.batch_norm == "local" or functions.is_plain:
        return None
    named = {name: module for name, module in model.named_modules() if _is_norm_like(module)}
    for name, module in named.items():
        own = vars(module).get("forward")  # a script may have replaced it, too
        entered = partial(_forward, functions, name or type(module).__name__, module, own)
        module.forward = entered
    # Hooks, and not another forward: scripts read the signature of the model's own.
    hooks = _RootHooks(functions)
    model.register_forward_pre_hook(hooks.enter, prepend=True)
    model.register_forward_hook(hooks.leave, always_call=True)
    return functions


def group_of_samples(context: RankContext) -> dist.ProcessGroup | None:
    """Return the ranks that have other samples; None for one."""
    context = context.of_samples
    return context.group(DATA_AXIS) if context.layout.size(DATA_AXIS) > 1 else None


def _refusal(config: ParallelConfig) -> str | None:
    parts = config.parts
    key = "pipeline.microbatches" if config.pipeline else "accumulate"
    key = "copies" if config.copies > 1 else key
    if parts == 1 or config.batch_norm == "local":
        return None
    return f"{ROOT}.{key}: with {parts} micro-batches"


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of torch, and their subclasses, that take statistics of a batch."""
    for name, module in model.named_modules():
        tracks = isinstance(module, _InstanceNorm) and module.track_running_stats
        if isinstance(module, _BatchNorm) or tracks:
            yield name or type(module).__name__, module


def _is_norm_like(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm | _InstanceNorm) or _names_norm(type(module))  # type: ignore[arg-type]  # a class can be hashed


@cache
def _names_norm(kind: type[nn.Module]) -> bool:
    """Return whether the code of a class outside of torch calls such a function by its name."""
    members = [
        getattr(member, "__func__", member)  # of a static method
        for owner in kind.__mro__
        if not owner.__module__.startswith("torch.")
        for member in vars(owner).values()
    ]
    codes = [member.__code__ for member in members if hasattr(member, "__code__")]
    return any(not _NAMES.isdisjoint(_names(code)) for code in codes)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _forward(
    functions: NormFunctions,
    name: str,
    module: nn.Module,
    own: Callable[..., Any] | None,
    /,  # names of arguments are the module's
    *args: Any,
    **kwargs: Any,
) -> Any:
    is_own = not isinstance(module, _BatchNorm | _InstanceNorm)
    region = torch_compat.checkpointed() if is_own else ANY_REGION
    with functions.active(name, region):
        # Looked up inside, since that of torch's SyncBatchNorm is replaced there.
        return (
            type(module).forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)
        )


class _RootHooks(threading.local):
    """Hooks of a model that have its forward run inside of `NormFunctions.active`.

    Each thread has contexts of its own.  A copy of the model shares this object.
    """

    def __init__(self, functions: NormFunctions) -> None:
        self._functions = functions
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[type[_RootHooks], tuple[NormFunctions]]:
        return _RootHooks, (self._functions,)

    def enter(self, model: nn.Module, _args: object) -> None:
        active = self._functions.active(type(model).__name__, region=None)
        active.__enter__()
        self._entered.append(active)

    def leave(self, _model: nn.Module, _args: object, _output: object) -> None:
        if self._entered:  # else a hook before `enter` raised
            self._entered.pop().__exit__(None, None, None)
