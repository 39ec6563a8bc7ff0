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
        """Return the name of an attribute that was changed, and give all what they had."""
        found = ""
        for (name, kind, key), (value, items) in self._before.items():
            fields = _attributes(self._modules[name], kind)
            if fields.get(key, _MISSING) is value and _items(value) == items:
                continue
            found = f"{name}.{key}".lstrip(".")
            fields[key] = value
        for name, module in self._modules.items():
            for kind in ("", "_buffers", "_parameters"):
                for key in [
                    k for k in _fields(module, kind) if (name, kind, k) not in self._before
                ]:
                    found = f"{name}.{key}".lstrip(".")
                    del _attributes(module, kind)[key]
        return found


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
