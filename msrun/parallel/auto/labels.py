"""Attributes that tell one layer from the next and change nothing, such as its number.

Whether one changes anything shows where the first layer is followed: a forward that does not read
it does the same whatever it says.  So it is hidden there, and whoever reads or writes it is heard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

_KINDS = (int, str)


class ReadError(Exception):
    """What was hidden has been read, or written."""


@dataclass(slots=True)
class Labels:
    """Which attributes may be labels.

    Args:
        read: Names of those that are none, since somebody has read them.
    """

    read: set[str] = field(default_factory=set)

    def of(self, module: nn.Module) -> list[tuple[str, object]]:
        """Return what may be labels in a module and its parts, in order.

        A name is that of a number or a text in all parts that have it, and of nothing in a class.
        """
        parts = list(module.modules())
        found = [pair for part in parts for pair in vars(part).items()]
        others = self.read | {name for name, item in found if type(item) not in _KINDS}
        names = {name for name, _ in found} - others
        names -= {name for name in names if any(hasattr(type(part), name) for part in parts)}
        return [pair for pair in found if pair[0] in names]

    @contextmanager
    def hidden(self, given: Iterable[tuple[nn.Module, frozenset[str]]]) -> Iterator[None]:
        """Hide labels of modules and their parts, and take note of those that are used.

        Args:
            given: Modules, and the names of their labels.
        """
        parts = [(part, names) for module, names in given for part in module.modules()]
        veils = {(type(part), name) for part, names in parts for name in names}
        items = [(part, name, vars(part).get(name)) for part, names in parts for name in names]
        found = [one for one in items if one[2] is not None]
        try:
            for kind, name in veils:
                setattr(kind, name, _Veil(name, self.read))
            for part, name, _ in found:
                vars(part)[name] = _Cover()
            yield
        finally:
            for kind, name in veils:
                delattr(kind, name)
            for part, name, item in found:
                if not isinstance(vars(part).get(name), _Cover):
                    self.read.add(name)
                vars(part)[name] = item


class _Cover:
    """Stands where a label was, and is of no use."""


@dataclass(frozen=True, slots=True)
class _Veil:
    """A label of all objects of a class: who is not covered has it as before, and keeps it.

    Args:
        name: Of the label.
        read: Takes note of it.
    """

    name: str
    read: set[str]

    def __get__(self, owner: nn.Module | None, kind: type) -> Any:
        if owner is None or self.name not in vars(owner):
            raise AttributeError(f"{kind.__name__} has no attribute {self.name}")
        item = vars(owner)[self.name]
        if isinstance(item, _Cover):
            self._tell()
        return item

    def __set__(self, owner: nn.Module, item: object) -> None:
        self._tell()

    def _tell(self) -> None:
        self.read.add(self.name)
        raise ReadError(self.name)
