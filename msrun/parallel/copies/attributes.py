"""Finds what forwards of copies would disturb each other in: attributes, and numbers they draw.

Copies take turns inside of a forward.  A module that leaves something in an attribute of its own,
to read it later in the same forward, would read what another copy left there.  In the first step
copies run one after the other, and what a second one changes again is refused.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from msrun.errors import ModelError
from msrun.parallel.config import ROOT

_OF_TORCH = frozenset(vars(nn.Module()))


class Attributes:
    """Attributes of the modules of a model, and the generators of Python and numpy.

    Args:
        model: The model, to which no reference is kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._values = {
            f"{name}.{key}".lstrip("."): value
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if key not in _OF_TORCH
        }
        self._drawn = _drawn()

    def check_unchanged(self, later: Attributes) -> None:
        """Refuse a second copy that changed something again.

        Raises:
            ModelError: It did.
        """
        for name, value in later._values.items():
            if name in self._values and not _is_same(self._values[name], value):
                raise ModelError(
                    f"{ROOT}.copies: each copy sets {name} in its forward, and copies take turns "
                    "inside of it",
                    hint="pass the value on as an argument, or leave out copies",
                )
        for library, state in later._drawn.items():
            if library in self._drawn and self._drawn[library] != state:
                raise ModelError(
                    f"{ROOT}.copies: the model draws numbers of {library} in its forward, which "
                    "copies have in common",
                    hint="draw them with torch, or leave out copies",
                )


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    is_plain = isinstance(one, int | float | str | bool | type(None))
    return is_plain and type(one) is type(other) and bool(one == other)


def _drawn() -> Mapping[str, Any]:
    """Return the states of generators, such as can be compared."""
    found: dict[str, Any] = {"Python": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        state = numpy.random.get_state()
        found["numpy"] = (state[1].tobytes(), *state[2:])
    return found
