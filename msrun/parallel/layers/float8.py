"""`float8`: linear layers whose products torchao computes in eight bits.

torchao makes a new module of a layer.  Here the layer itself becomes one of that class, so names,
hooks, attributes and parameters stay, and everything that divides or gathers weights goes on as
with other layers: parameters, gradients and what is sent keep their types.

A scale is that of the part of a batch that a rank sees, as with torchao under other libraries.
Where the device has no such products, which is so on a CPU, torchao rounds to float8 and multiplies
in a wider type.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from msrun.errors import ModelError
from msrun.parallel.config import ROOT, ParallelConfig
from msrun.parallel.match import matching
from msrun.parallel.settings.float8 import Float8

_KEY = f"{ROOT}.float8"
# As the instructions of devices have it.
_MULTIPLE = 16
_CAPABILITY = (8, 9)


def find(config: ParallelConfig, model: nn.Module, plans: Collection[str]) -> list[str]:
    """Return the linear layers that multiply in float8.

    Args:
        config: The configuration.
        model: The model.
        plans: Names of modules with a rule of `plan`.

    Raises:
        ModelError: A layer has other sizes, or a rule of `plan`; or torchao is not installed.
    """
    if not config.float8:
        return []
    modules = dict(model.named_modules())
    chosen = matching(config.float8.modules, list(modules), "float8.modules")
    names = [
        name
        for name, module in modules.items()
        if type(module) is nn.Linear and any(_is_inside(name, other) for other in chosen)
    ]
    if not names:
        raise ModelError(f"{_KEY}.modules: no nn.Linear is in what the patterns match")
    for name in names:
        sizes = modules[name].in_features, modules[name].out_features
        if any(size % _MULTIPLE for size in sizes):
            raise ModelError(
                f"{_KEY}.modules: {name} is Linear{sizes}, and products in float8 take multiples "
                f"of {_MULTIPLE}",
                hint="name other modules, or pad it",
            )
        if name in plans:
            raise ModelError(
                f"{_KEY}.modules: {name} has a rule of {ROOT}.plan, which divides its product",
                hint="leave it out of one of the two",
            )
    _import()
    return names


def _is_inside(name: str, other: str) -> bool:
    """Return whether the module `name` is `other` or inside of it."""
    return not other or f"{name}.".startswith(f"{other}.")


def _import() -> Any:
    """Return torchao's module.

    Raises:
        ModelError: It is not installed, or does not work with this torch.
    """
    try:
        with _quietly():
            return importlib.import_module("torchao.float8")
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        raise ModelError(
            f"{_KEY} is computed by torchao, which cannot be imported: {error}",
            hint="pip install torchao, in the release for this torch",
        ) from None


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Leave out what torchao says of its libraries for other devices while it is imported."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def apply(model: nn.Module, names: Sequence[str], settings: Float8, device: torch.device) -> None:
    """Have the linear layers called `names` multiply in float8, in place."""
    torchao = _import()
    options = torchao.Float8LinearConfig.from_recipe_name(settings.recipe)
    if not _has_products(device):
        options = dataclasses.replace(options, emulate=True)
    for name in names:
        module: Any = model.get_submodule(name)
        holder = nn.ModuleList([nn.Linear(module.in_features, module.out_features, device="meta")])
        (made,) = torchao.convert_to_float8_training(holder, config=options)
        vars(module).update({key: at for key, at in vars(made).items() if key not in vars(module)})
        module.__class__ = type(made)


def _has_products(device: torch.device) -> bool:
    """Return whether `device` multiplies float8.

    Raises:
        ModelError: It is one that does not, and computes in place of a CPU.
    """
    if device.type == "cpu":
        return False
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if found < _CAPABILITY and not torch.version.hip:
            raise ModelError(
                f"{_KEY}: the device has compute capability {found[0]}.{found[1]}, and products "
                f"in float8 need {_CAPABILITY[0]}.{_CAPABILITY[1]} (leave out float8)"
            )
    return True
