"""State of a module beside tensors: numbers in its attributes, and the generators it draws from.

A module that counts its calls, or draws a number of Python, does so once a step in one process.
Recomputation runs it again, and micro-batches run it for each of them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

_PLAIN = (int, float, bool, str, type(None))

# Module and key -> value.
Attributes = dict[tuple[nn.Module, str], Any]


class PlainState:
    """Whether a module changes plain values, as its first run shows.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = tuple(module.modules())
        self.is_changing: bool | None = None

    def of_call(self) -> PlainCall:
        """Return the state of one forward and its recomputations."""
        return PlainCall(self)

    def attributes(self) -> Attributes:
        """Return the plain values in attributes of all modules."""
        return {
            (module, key): value
            for module in self._modules
            for key, value in vars(module).items()
            if type(value) in _PLAIN
        }


class PlainCall:
    """Plain values of a module in one forward and its recomputations.

    Args:
        state: Of the module.
    """

    def __init__(self, state: PlainState) -> None:
        self._state = state
        self._before: tuple[Attributes, Mapping[str, Any]] | None = None

    @contextmanager
    def changed_once(self) -> Iterator[None]:
        """Run on the present values first; later on those from before the first run."""
        state = self._state
        if state.is_changing is False:
            yield
        elif self._before is None:
            self._before = state.attributes(), _generators()
            yield
            if state.is_changing is None:
                state.is_changing = (state.attributes(), _generators()) != self._before
        else:
            now = state.attributes(), _generators()
            _restore(*self._before, over=now[0])
            # torch stops a recomputation early by an exception, once it has what it needs.
            try:
                yield
            finally:
                _restore(*now, over=state.attributes())


def _restore(attributes: Attributes, generators: Mapping[str, Any], *, over: Attributes) -> None:
    for (module, key), value in attributes.items():
        if over.get((module, key), module) is not value:
            vars(module)[key] = value
    for module, key in set(over).difference(attributes):
        vars(module).pop(key, None)
    for name, setter in _SETTERS.items():
        if name in generators:
            setter(generators[name])


def _generators() -> dict[str, Any]:
    """Return the states of Python's and numpy's generators, which compare by value."""
    states: dict[str, Any] = {"random": random.getstate()}
    if np := sys.modules.get("numpy"):
        name, keys, *others = np.random.get_state()
        states["numpy"] = (name, keys.tobytes(), *others)
    return states


def _set_numpy(state: Any) -> None:
    import numpy as np

    name, keys, *others = state
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *others))  # noqa: NPY002


_SETTERS: dict[str, Callable[[Any], None]] = {"random": random.setstate, "numpy": _set_numpy}
