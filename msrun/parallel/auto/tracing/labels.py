"""Attributes that differ from layer to layer and change nothing, such as `layer_idx`.

Whether one changes anything shows when the first layer is traced: a forward that does not read it
does the same whatever its value.  So labels are hidden there, and any access is noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

_KINDS = (int, str)


class ReadError(Exception):
    """A hidden label has been read, or written."""


@dataclass(slots=True)
class Labels:
    """Which attributes may be labels.

    Args:
        read: Names of attributes that a forward has accessed: they are no labels.
    """

    read: set[str] = field(default_factory=set)

    def of(self, module: nn.Module) -> list[tuple[str, object]]:
        """Return the possible labels of a module and its submodules, in order.

        A label is a number or a text in all submodules that have it, and no attribute of a class.
        """
        parts = list(module.modules())
        attributes = [pair for part in parts for pair in vars(part).items()]
        others = self.read | {name for name, item in attributes if type(item) not in _KINDS}
        names = {name for name, _ in attributes} - others
        names -= {name for name in names if any(hasattr(type(part), name) for part in parts)}
        return [pair for pair in attributes if pair[0] in names]

    @contextmanager
    def hidden(self, given: Iterable[tuple[nn.Module, frozenset[str]]]) -> Iterator[None]:
        """Hide labels of modules and their submodules, and note those that are accessed.

        Args:
            given: Modules, and the names of their labels.
        """
        parts = [(part, names) for module, names in given for part in module.modules()]
        descriptors = {(type(part), name) for part, names in parts for name in names}
        items = [(part, name, vars(part).get(name)) for part, names in parts for name in names]
        present = [one for one in items if one[2] is not None]
        try:
            for kind, name in descriptors:
                setattr(kind, name, _HiddenLabel(name, self.read))
            for part, name, _ in present:
                vars(part)[name] = HiddenValue()
            yield
        finally:
            for kind, name in descriptors:
                delattr(kind, name)
            for part, name, item in present:
                if not isinstance(vars(part).get(name), HiddenValue):
                    self.read.add(name)
                vars(part)[name] = item


class HiddenValue:
    """Replaces the value of a hidden label."""


@dataclass(frozen=True, slots=True)
class _HiddenLabel:
    """A label of all objects of a class; objects whose value is not hidden have it as before.

    Args:
        name: Of the label.
        read: Notes it when it is accessed.
    """

    name: str
    read: set[str]

    def __get__(self, owner: nn.Module | None, kind: type) -> Any:
        if owner is None or self.name not in vars(owner):
            raise AttributeError(f"{kind.__name__} has no attribute {self.name}")
        item = vars(owner)[self.name]
        if isinstance(item, HiddenValue):
            self._note()
        return item

    def __set__(self, owner: nn.Module, item: object) -> None:
        self._note()

    def _note(self) -> None:
        self.read.add(self.name)
        raise ReadError(self.name)
