"""What a recorded forward changes by itself, which no run of its steps would change."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

_OWN = ("_buffers", "_parameters", "_modules", "training")
_MISSING = object()


class CopyGuard:
    """What the attributes of modules were before a recording.

    Args:
        modules: By name: those whose own forward is recorded.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._before = {
            (name, kind, key): (value, _items(value))
            for name, module in modules.items()
            for kind in ("", "_buffers", "_parameters")
            for key, value in _fields(module, kind).items()
        }

    def changed(self) -> str:
        """Return the name of an attribute that is another one now; empty if there is none."""
        for (name, kind, key), (value, items) in self._before.items():
            fields = _attributes(self._modules[name], kind)
            if fields.get(key, _MISSING) is not value or _items(value) != items:
                return f"{name}.{key}".lstrip(".")
        return next((f"{name}.{key}".lstrip(".") for name, _, key in self._added()), "")

    def restore(self) -> None:
        """Give all modules the attributes that they had."""
        for (name, kind, key), (value, _) in self._before.items():
            _attributes(self._modules[name], kind)[key] = value
        for name, kind, key in list(self._added()):
            del _attributes(self._modules[name], kind)[key]

    def _added(self) -> Iterator[tuple[str, str, str]]:
        for name, module in self._modules.items():
            for kind in ("", "_buffers", "_parameters"):
                for key in _fields(module, kind):
                    if (name, kind, key) not in self._before:
                        yield name, kind, key


class PythonRandom:
    """Random numbers of Python and numpy, which the recorded code may not draw."""

    def __init__(self) -> None:
        self._before = _states()

    def changed(self) -> str:
        """Return which numbers were drawn, and set all back."""
        now = _states()
        found = next((name for name, state in self._before.items() if now[name] != state), "")
        if found:
            self.restore()
        return found

    def restore(self) -> None:
        """Set all back."""
        random.setstate(self._before["random.random"])
        if "numpy.random" in self._before:
            name, keys, *others = self._before["numpy.random"]
            import numpy as np

            np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *others))  # noqa: NPY002 - the generator of others

    @staticmethod
    @contextmanager
    def unchanged() -> Iterator[None]:
        """Set all back at the end."""
        states = PythonRandom()
        try:
            yield
        finally:
            states.restore()


def _states() -> dict[str, Any]:
    states: dict[str, Any] = {"random.random": random.getstate()}
    if np := sys.modules.get("numpy"):
        name, keys, *others = np.random.get_state()
        states["numpy.random"] = (name, keys.tobytes(), *others)
    return states


def _attributes(module: nn.Module, kind: str) -> dict[str, Any]:
    fields: dict[str, Any] = vars(module)[kind] if kind else vars(module)
    return fields


def _fields(module: nn.Module, kind: str) -> dict[str, Any]:
    fields = _attributes(module, kind)
    return fields if kind else {key: value for key, value in fields.items() if key not in _OWN}


def _items(value: Any) -> list[int] | None:
    """Return the items of what can change, by identity; None for others."""
    if isinstance(value, dict):
        return [id(item) for pair in value.items() for item in pair]
    return [id(item) for item in value] if isinstance(value, list | set) else None
