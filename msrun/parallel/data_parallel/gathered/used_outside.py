"""Units whose inside a model uses by itself: `self.blocks[0].norm.embed(t)`, `self.embed.weight`.

`fully_shard` gathers the parameters of a unit before the unit's own forward.  A model that reaches
into one finds shards.  So the code of modules around units is read, as text: where it takes a part
of one, this is no unit, and its parameters belong to the module around it, which has them gathered
all through its forward.

This only chooses units.  A use that the text does not show, such as one through a variable, is
refused when it happens (`zero_errors.named_errors`).
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Collection, Iterator
from functools import cache
from types import FunctionType

from torch import nn
from torch.nn import Parameter

# Names of attributes, and numbers of members, that follow `self`.
_Path = tuple[str | int, ...]
# Functions that make parameters, before they are sharded.
_MAKES = re.compile("init|reset")


def units_used_outside(model: nn.Module, units: Collection[str]) -> set[str]:
    """Return those of `units` that a module around them takes a part of."""
    around = {""}
    for unit in units:
        parts = unit.split(".")
        around.update(".".join(parts[:end]) for end in range(1, len(parts)))
    return {
        unit
        for name in around
        for path in _paths(type(model.get_submodule(name)))  # type: ignore[arg-type]  # a class
        if (unit := _used(model, name, path, units))
    }


def _used(model: nn.Module, name: str, path: _Path, units: Collection[str]) -> str:
    """Return the unit that `path`, from the module `name` on, takes a part of; empty if none."""
    here: object = model.get_submodule(name)
    for part in path:
        if not isinstance(here, nn.Module):
            break
        if name in units and isinstance(part, str) and not hasattr(nn.Module, part):
            inside = getattr(here, part, None)
            if isinstance(inside, nn.Module | Parameter) or callable(inside):
                return name
        if isinstance(part, int):
            members = [*here.children()] if isinstance(here, nn.ModuleList | nn.Sequential) else []
            if not -len(members) <= part < len(members):
                break
            part = part % len(members)  # noqa: PLW2901 - names count from the front
        here = getattr(here, str(part), None)
        name = f"{name}.{part}" if name else str(part)
    return ""


@cache
def _paths(kind: type[nn.Module]) -> frozenset[_Path]:
    """Return what the functions of a class take of members of its lists."""
    functions = [
        member
        for owner in kind.__mro__
        if not owner.__module__.startswith("torch.")
        for member in vars(owner).values()
        if isinstance(member, FunctionType) and not _MAKES.search(member.__name__)
    ]
    return frozenset(path for function in functions for path in _paths_in(function))


def _paths_in(function: FunctionType) -> Iterator[_Path]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, SyntaxError, TypeError):
        return  # a class that was typed in has no text
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and len(path := _path(node)) > 1:
            yield path


def _path(node: ast.expr) -> _Path:
    """Return the path of an expression that starts with `self`; empty if it is no such."""
    parts: list[str | int] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript) and (number := _number(node.slice)) is not None:
            parts.append(number)
            node = node.value
        else:
            return ()
    return tuple(reversed(parts)) if node.id == "self" else ()


def _number(node: ast.expr) -> int | None:
    """Return a whole number that is written out."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if isinstance(value, int) else None
