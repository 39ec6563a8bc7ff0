"""Embedding tables in the memory of the host: ids travel there, and the rows of a batch come back.

A table of a model of recommendation may be larger than the memory of a device, and a batch uses few
of its rows.  With `place: {"embed*": cpu}` a table and what the optimizer keeps of it stay on the
host.  The lookup runs there, its rows are sent to the device, and their gradients back; the
optimizer's step of the table runs where the table is.  Where the device is the host nothing moves.

Everything else knows nothing of it.  Parameters on the host are parameters with another device:
buckets of gradients have one device each, and the process groups of msrun reduce tensors on the
host with gloo.  ZeRO leaves the tables whole, since it gathers on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.config import ROOT, ParallelConfig
from msrun.parallel.match import matching

_TABLES = (nn.Embedding, nn.EmbeddingBag)
_HOST = torch.device("cpu")


def find(
    config: ParallelConfig,
    model: nn.Module,
    planned: Mapping[str, Any],
    remote: Collection[str] = (),
) -> list[str]:
    """Return the modules of `model` that stay on the host.

    Args:
        config: The configuration.
        model: The model.
        planned: Modules with a rule of `plan`.
        remote: Parameters that live on servers.

    Raises:
        ModelError: A module is no table, or the device needs its table too.
    """
    modules = dict(model.named_modules())
    found: list[str] = []
    for pattern in config.place:
        names = matching([pattern], [name for name in modules if name], "place")
        found += [name for name in modules if name in names and name not in found]
    for name in found:
        key, module = f"{ROOT}.place: {name}", modules[name]
        if not isinstance(module, _TABLES):
            kind = type(module).__name__
            raise ModelError(
                f"{key} is a {kind}, and only tables (Embedding, EmbeddingBag) have a place on the "
                "host",
                hint=f"{ROOT}.optimizer.offload keeps other parameters there between steps",
            )
        others = _others(model, module, found)
        if others:
            raise ModelError(
                f"{key}.weight is {others[0]} too, which computes with the whole table",
                hint="make two parameters of them, or leave it out",
            )
        if name in planned:
            raise ModelError(f"{key} has a rule of {ROOT}.plan, whose ranks exchange its rows")
        if f"{name}.weight" in remote:
            raise ModelError(f"{key} lives on servers already ({ROOT}.servers)")
        if config.optimizer.dtype:
            raise ModelError(
                f"{key} stays whole and in its own type, and {ROOT}.optimizer.dtype is "
                f"{config.optimizer.dtype} (leave out one of the two)"
            )
    return found


def _others(model: nn.Module, table: nn.Module, placed: Collection[str]) -> list[str]:
    """Return other names of the weight of `table`, beside those of tables that are `placed` too."""
    own = {id(param) for param in table.parameters()}
    return [
        f"{name}.{param}".lstrip(".")
        for name, module in model.named_modules()
        if module is not table and not (name in placed and isinstance(module, _TABLES))
        for param, tensor in module.named_parameters(recurse=False)
        if id(tensor) in own
    ]


def move(model: nn.Module, names: Collection[str], device: torch.device) -> None:
    """Bring everything of `model` to `device` but the tables `names`, which go to the host."""
    on_host = {id(param) for param in parameters(model, names)}
    torch_compat.replace_tensors(model, lambda t: t.to(_HOST if id(t) in on_host else device))


def attach(model: nn.Module, names: Collection[str], device: torch.device) -> None:
    """Have ids come to those of the tables `names` that `model` has, and rows go to `device`.

    It comes after the cut into stages, whose copy of the model without values has one device.
    """
    modules = dict(model.named_modules())
    for name in names:
        if isinstance(table := modules.get(name), _TABLES):
            table.register_forward_pre_hook(partial(_to, _HOST), with_kwargs=True)
            table.register_forward_hook(partial(_back, device))


def _to(
    device: torch.device, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    moved = [_moved(value, device) for value in args]
    return tuple(moved), {key: _moved(value, device) for key, value in kwargs.items()}


def _back(device: torch.device, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
    return _moved(output, device)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def parameters(model: nn.Module, names: Collection[str]) -> set[Parameter]:
    """Return the parameters of the tables `names` that `model` has."""
    modules = dict(model.named_modules())
    return {param for name in names if name in modules for param in modules[name].parameters()}
