"""What a script changes of a model after `rt.shard`: hooks and plain attributes.

A copy from before has none of it.  Rank 0 hands on to its copy what it has itself.  Of a pipeline
the other ranks have other modules: their plain attributes travel, and their hooks cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from torch import nn
from torch.utils.hooks import RemovableHandle

from msrun.parallel.data_parallel.parameter_hooks import of_script
from msrun.parallel.exchange.messages import gather_all
from msrun.parallel.rank_context import RankContext
from msrun.parallel.torch_compat import ModuleHook, forget_hook, registered_hooks

PLAIN = (bool, int, float, str, type(None))
_Plain = bool | int | float | str | None
_INT_MAX = 1 << 63  # of msgpack


class OfStage(msgspec.Struct, frozen=True):
    """What the script changed in one stage.

    Args:
        hooked: Names of modules and parameters with other hooks.
        values: Module -> changed attributes.
    """

    hooked: list[str] = []
    values: dict[str, dict[str, _Plain]] = {}


class ScriptChanges:
    """What the script has changed of a model since now.

    Args:
        model: The model that `rt.shard` returns.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._hooks = {name: {*registered_hooks(module)} for name, module in modules.items()}
        self._values = {name: dict(plain_attributes(module)) for name, module in modules.items()}
        self._of_params = {name: of_script(param) for name, param in model.named_parameters()}
        self._handed: dict[tuple[str, int], RemovableHandle] = {}

    def hand_on(self, model: nn.Module, copied: nn.Module) -> None:
        """Give the modules of `copied`, made before the changes, the hooks of those of `model`."""
        there = dict(copied.named_modules())
        for name, module in model.named_modules():
            other = there.get(name)
            if other is None or name not in self._hooks:
                continue
            now = registered_hooks(module)
            for key in self._hooks[name] - now.keys():
                forget_hook(other, key)
            for key, handle in self._of(name):
                if key not in now:
                    handle.remove()
            for key, hook in self._added(name, now):
                if (name, key) not in self._handed:
                    self._handed[name, key] = hook.register(other)

    def of_other_stages(self, context: RankContext, model: nn.Module) -> OfStage:
        """Return what the script changed where this rank has no module; all ranks call it."""
        hooks = {name: registered_hooks(module) for name, module in model.named_modules()}
        hooked = [
            name
            for name, now in hooks.items()
            if name in self._hooks and (self._hooks[name] - now.keys() or self._added(name, now))
        ]
        params = dict(model.named_parameters())
        before = self._of_params
        hooked += [
            n for n, param in params.items() if n in before and of_script(param) != before[n]
        ]
        changed = {
            name: dict(plain_attributes(module, self._values.get(name)))
            for name, module in model.named_modules()
        }
        own = OfStage(hooked, {name: values for name, values in changed.items() if values})
        known = hooks.keys() | params.keys()
        every = gather_all(own, OfStage, None, context.device)
        return OfStage(
            sorted({name for each in every for name in each.hooked} - known),
            {n: values for each in every for n, values in each.values.items() if n not in known},
        )

    def _of(self, name: str) -> list[tuple[int, RemovableHandle]]:
        return [(key, handle) for (of, key), handle in self._handed.items() if of == name]

    def _added(self, name: str, now: dict[int, ModuleHook]) -> list[tuple[int, ModuleHook]]:
        new = now.keys() - self._hooks[name]
        return [(key, hook) for key, hook in now.items() if key in new and hook.is_of_script]


def plain_attributes(
    module: nn.Module, before: dict[str, Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the plain attributes of `module` that are not as `before`."""
    known = before or {}
    for key, value in vars(module).items():
        if key.startswith("_") or type(value) not in PLAIN:
            continue
        is_small = type(value) is not int or abs(value) < _INT_MAX
        if is_small and (key not in known or known[key] != value):
            yield key, value
