"""Refuses wrappers that would reduce the gradients of a model of `rt.shard` once more.

Trainers of others wrap the model of a script by themselves: Lightning and Fabric with
`strategy="ddp"`, and `Accelerator.prepare`.  The wrapper knows neither shards nor stages: it
broadcasts the parts of the first rank to those that have other parts, and its hooks on gradients
run beside ours, which have released these gradients by then.

Torch calls a global hook whenever a module gets a child.  A wrapper gets the model as its child in
its constructor, before it exchanges anything.  So that is where it is refused, on all ranks alike.
Kinds are known by the name of their class: importing them takes seconds, and apex, Megatron and
DeepSpeed have some, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import nn
from torch.nn import Parameter
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from msrun.errors import ModelError
from msrun.parallel.local import is_sharded

_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"})
_HINT = (
    "use the model as rt.shard returned it: give Lightning a strategy of one device, and leave the "
    "model out of Accelerator.prepare (docs/how-to/from_accelerate.md has both loops)"
)


def check_unwrapped(model: nn.Module) -> None:
    """Refuse a model that is wrapped or sharded before `rt.shard`, or has a part that is.

    Raises:
        ModelError: It is.
    """
    for name, module in model.named_modules():
        if kind := _kind(module):
            raise ModelError(
                f"rt.shard got {name and f'{name}, '}a {kind}, which reduces gradients by itself",
                hint="give rt.shard the model inside of it, which it makes data parallel itself",
            )
    for name, param in model.named_parameters():
        if is_sharded(param):
            raise ModelError(
                f"rt.shard got {name} as a DTensor, which something else has sharded already",
                hint="leave out fully_shard and parallelize_module: optimizer.zero and plan of the "
                "configuration do the same",
            )


def watch(models: Callable[[], Iterable[nn.Module]]) -> RemovableHandle:
    """Refuse wrappers from now on that get one of `models`, or a module with parts of it."""

    def look(owner: nn.Module, _: str, module: nn.Module | None) -> None:
        kind = _kind(owner)
        if not kind or module is None:
            return
        # `FullyShardedDataParallel` has replaced the parameters by now.
        held = {id(part) for model in models() for part in _parts(model)}
        if any(id(part) in held for part in _parts(module)):
            raise ModelError(
                f"{kind} got a model of rt.shard, whose gradients are reduced already", hint=_HINT
            )

    return register_module_module_registration_hook(look)


def _parts(model: nn.Module) -> Iterator[nn.Module | Parameter]:
    yield from model.modules()
    yield from model.parameters()


def _kind(module: nn.Module) -> str:
    return next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _WRAPPERS), "")
