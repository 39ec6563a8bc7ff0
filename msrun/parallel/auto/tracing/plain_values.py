"""Plain values that a forward may read and a trace holds as they were: they must not change.

A trace has no step for `x / self.temperature`: the number is part of the division.  `PlainValues`
notes the numbers, texts and flags that the code of a model can reach: attributes of its modules and
of objects in them such as a configuration, attributes of their classes, and globals that their
functions name.  A comparison costs a Python operation each, a small part of a step.
"""

from __future__ import annotations

import dis
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from msrun.errors import ModelError
from msrun.parallel.auto.tracing.labels import HiddenValue
from msrun.parallel.torch_compat import write_count

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_DEEP = 4
# Of every module; `training` is what `model.train()` and `model.eval()` change.
_OF_MODULES = frozenset(vars(nn.Module()))
_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_TORCH = ("torch.", "torch", "builtins")


class _Missing:
    """Stands for no value."""

    def __repr__(self) -> str:
        """Return how sentences call it."""
        return "nothing"


_MISSING = _Missing()


class _Plain(NamedTuple):
    """One value.

    Args:
        box: Where it is.
        key: Its key there.
        value: What it was.
        name: How sentences call it.
    """

    box: Any
    key: Any
    value: Any
    name: str


class _Unregistered(NamedTuple):
    """One tensor that is an attribute, but neither parameter nor buffer.

    Args:
        box: Where it is.
        key: Its key there.
        tensor: What it was.
        writes: How often it was written in place.
        name: How sentences call it.
    """

    box: Any
    key: Any
    tensor: Tensor
    writes: int
    name: str


class Change(NamedTuple):
    """A value that is no longer what it was.

    Args:
        name: How sentences call it.
        before: What it was.
        now: What it is.
        box: Where it is.
        key: Its key there.
    """

    name: str
    before: Any
    now: Any
    box: Any
    key: Any

    def repeat(self) -> None:
        """Make the change again, where a trace took it back."""
        if isinstance(self.box, dict):
            self.box[self.key] = self.now


class PlainValues:
    """The plain values that the forward of a model may read, as they are now.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._plain: list[_Plain] = []
        self._tensors: list[_Unregistered] = []
        self._seen: set[int] = {id(vars(module)) for module in model.modules()}
        self._codes: set[CodeType] = set()
        # Attributes that the functions of a module name, and those that it has.
        self._named: dict[str, frozenset[str]] = {}
        self._owned: list[tuple[str, dict[str, Any], frozenset[str]]] = []
        self._model, root = model, type(model).__name__
        for name, module in model.named_modules():
            own = {key: x for key, x in vars(module).items() if key not in _OF_MODULES}
            self._note_items(vars(module), own, name or root, 0)
            self._note_classes(module, name or root)
            self._named[name] = _names_in(type(module).__mro__) - _OF_MODULES
            self._owned.append((name, vars(module), frozenset(vars(module))))
        boxes = {id(vars(module)): name for name, module in model.named_modules()}
        self._keys: dict[str, set[str]] = {}
        for one in self._plain:
            if id(one.box) in boxes:
                self._keys.setdefault(boxes[id(one.box)], set()).add(one.key)

    def changes(self) -> list[Change]:
        """Return what changed; values that are equal count as the same."""
        found = []
        for box, key, value, name in self._plain:
            now = _read(box, key)
            if now is not value and now != value and not isinstance(now, HiddenValue):
                found.append(Change(name, value, now, box, key))
        for name, box, keys in self._owned:
            if len(box) != len(keys):
                for key in (set(box) - keys) & self._named[name]:
                    if isinstance(box[key], _PLAIN):
                        shown = f"{name}.{key}".lstrip(".")
                        found.append(Change(shown, _MISSING, box[key], box, key))
        for box, key, tensor, writes, name in self._tensors:
            now = _read(box, key)
            if now is not tensor or write_count(tensor) != writes:
                found.append(Change(name, "a tensor", "another tensor", (), key))
        return found

    def check(self, stage: nn.Module) -> None:
        """Refuse a value that changed.

        Args:
            stage: The model, or what stands for it; attributes that are set on it change nothing.

        Raises:
            ModelError: One did.
        """
        if stage is not self._model:
            for name, part in stage.named_modules():
                read = self._keys.get(name, set()) | self._named.get(name, set())
                for key in read.intersection(vars(part)):
                    raise ModelError(
                        f"{f'{name}.{key}'.lstrip('.')} was set on a stage, which has no forward "
                        "that reads it",
                        hint="set plain values before rt.shard",
                    )
        for change in self.changes():
            raise ModelError(
                f"{change.name} changed from {change.before} to {change.now} after rt.shard; mode "
                "auto traced the forward with the first",
                hint="register a tensor as a buffer and change that, pass it to forward, or choose "
                "a configuration without mode: auto",
            )

    def restore(self) -> None:
        """Give plain values of modules and their objects back what they were."""
        for box, key, value, _ in self._plain:
            if isinstance(box, dict):
                if value is _MISSING:
                    box.pop(key, None)
                else:
                    box[key] = value

    def _note_items(self, box: Any, items: Mapping[Any, Any], name: str, deep: int) -> None:
        for key, item in items.items():
            self._note(box, key, item, f"{name}.{key}" if isinstance(key, str) else name, deep)

    def _note(self, box: Any, key: Any, item: Any, name: str, deep: int) -> None:
        """Note a value, or what is in it."""
        if isinstance(item, _PLAIN):
            self._plain.append(_Plain(box, key, item, name))
        elif isinstance(item, Tensor):
            self._tensors.append(_Unregistered(box, key, item, write_count(item), name))
        elif id(item) not in self._seen and deep < _DEEP:
            self._seen.add(id(item))
            self._note_inside(item, name, deep + 1)

    def _note_inside(self, item: Any, name: str, deep: int) -> None:
        if isinstance(item, dict):
            self._note_items(item, item, name, deep)
        elif isinstance(item, list | tuple):
            self._note_items(item, dict(enumerate(item)), name, deep)
        elif not isinstance(item, nn.Module | type | FunctionType | ModuleType):
            content = getattr(item, "__dict__", None)
            if isinstance(content, dict) and not type(item).__module__.startswith(_TORCH):
                self._note_items(content, content, name, deep)

    def _note_classes(self, module: nn.Module, name: str) -> None:
        """Note the attributes of the classes of a module, and the globals of their functions."""
        own = vars(module)
        for kind in type(module).__mro__:
            if kind.__module__.startswith(_TORCH):
                continue
            for key, item in vars(kind).items():
                if isinstance(item, FunctionType):
                    self._note_globals(item, 0)
                elif isinstance(item, _PLAIN) and not key.startswith("__") and key not in own:
                    # An attribute of the object would hide it.
                    self._plain.append(_Plain(own, key, _MISSING, f"{name}.{key}"))
                    self._plain.append(_Plain(vars(kind), key, item, f"{kind.__name__}.{key}"))

    def _note_globals(self, function: FunctionType, deep: int) -> None:
        """Note the globals that a function names, and those of the functions beside it."""
        code = function.__code__
        if code in self._codes or deep > _DEEP:
            return
        self._codes.add(code)
        around = function.__globals__
        for key in code.co_names:
            item = around.get(key, _MISSING)
            if isinstance(item, FunctionType) and item.__globals__ is around:
                self._note_globals(item, deep + 1)
            elif item is not _MISSING and not key.startswith("__"):
                name = f"{around.get('__name__', '')}.{key}"
                self._note(around, key, item, name, 1)


@cache
def _names_in(kinds: tuple[type, ...]) -> frozenset[str]:
    """Return the attributes that functions of classes read, and their texts, as of `getattr`."""
    found: set[str] = set()
    for each in kinds:
        functions = [] if each.__module__.startswith(_TORCH) else vars(each).values()
        for function in functions:
            if isinstance(function, FunctionType):
                found.update(text for text in function.__code__.co_consts if isinstance(text, str))
                steps = dis.get_instructions(function)
                found.update(step.argval for step in steps if step.opname in _LOADS)
    return frozenset(found)


def _read(box: Any, key: Any) -> Any:
    try:
        return box[key]
    except (KeyError, IndexError):
        return _MISSING


class DrawnNumbers:
    """Whether random numbers were drawn from Python's or numpy's generators.

    Attributes:
        source: The generator that was used; empty if none was.
    """

    source = ""


@contextmanager
def without_draws() -> Iterator[DrawnNumbers]:
    """Inside, note draws of random numbers that a trace does not show; then take them back."""
    python, numpy, draws = random.getstate(), np.random.get_state(legacy=False), DrawnNumbers()  # noqa: NPY002
    try:
        yield draws
        if random.getstate() != python:
            draws.source = "Python's random"
        elif repr(np.random.get_state(legacy=False)) != repr(numpy):  # noqa: NPY002
            draws.source = "numpy.random"
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
