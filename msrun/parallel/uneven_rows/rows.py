"""Rows of one table on several ranks, in runs of any length.

torch's DTensor knows parts of one size alone, so the rows of a rank are a plain parameter, a
`TablePart`, which knows which rows of which table it has.  Reductions and optimizers see a plain
parameter.  What reads or writes whole tensors asks `rows_of` here: checkpoints, weights, norms.

A model that computes with the table itself, and not by its lookup, would compute with a part and
not notice.  `TablePart` refuses that, for each function that autograd or the guard may see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel import torch_compat

# Getters that are no values of the table, and methods that are none either.
_VALUES = frozenset(["H", "T", "data", "imag", "mH", "mT", "real", "shape"])
_SHAPES = frozenset(["shape", "size", "numel", "nelement", "__len__"])
_NO_VALUES = """
    __format__ __hash__ __repr__ __set__ __delete__ _has_compatible_shallow_copy_type backward
    data_ptr detach dim element_size
    get_device has_names is_complex is_contiguous is_floating_point is_inference is_shared
    ndimension register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad
"""
_ALLOWED = frozenset(_NO_VALUES.split())


@dataclass(slots=True, eq=False)
class RowRange:
    """Which rows of a table this rank has.

    Args:
        name: Of the table's parameter, for messages.
        counts: Rows of each rank.
        index: Of this rank among them.
        group: These ranks.
        axis: Their mesh axis.
        is_guarded: Whether the model runs now.

    Attributes:
        is_read: Whether the lookup of the table runs now.
    """

    name: str
    counts: tuple[int, ...]
    index: int
    group: dist.ProcessGroup
    axis: str
    is_guarded: Callable[[], bool]
    is_read: bool = field(default=False, init=False)

    @property
    def first(self) -> int:
        """First row of this rank."""
        return sum(self.counts[: self.index])

    @property
    def count(self) -> int:
        """Rows of this rank."""
        return self.counts[self.index]

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a whole table."""
        return whole.narrow(0, self.first, self.count)

    def shape(self, part: Tensor) -> torch.Size:
        """Return the shape of the whole table."""
        return torch.Size((sum(self.counts), *part.shape[1:]))

    def gather(self, part: Tensor) -> Tensor:
        """Return the whole table; its ranks call it together."""
        most = max(self.counts)
        room = part.new_zeros(most, *part.shape[1:])
        room[: self.count] = part
        parts = [torch.empty_like(room) for _ in self.counts]
        dist.all_gather(parts, room, group=self.group)
        rows = zip(parts, self.counts, strict=True)
        return torch.cat([every[:count] for every, count in rows])


class TablePart(Parameter):
    """The rows of this rank, as a parameter; `rows` says which."""

    rows: RowRange

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` as on a plain tensor, unless a model computes with part of a table."""
        del types
        name = getattr(func, "__name__", "")
        is_value = name == "__get__" and func.__self__.__name__ in _VALUES
        if is_value or (name != "__get__" and name not in _ALLOWED):
            for part in _parts((*args, *(kwargs or {}).values())):
                part.refuse_values(func.__self__.__name__ if is_value else name)
        with torch_compat.as_plain_tensors():
            return func(*args, **(kwargs or {}))

    def refuse_values(self, name: str) -> None:
        """Refuse the function `name` of the table, where a model would compute with it.

        Raises:
            ModelError: Autograd or the guard is on.
        """
        rows = self.rows
        # The runtime and optimizers ask for the shape of what they have; a model wants the table's.
        is_seen = torch.is_grad_enabled() and name not in _SHAPES
        if rows.is_read or not (is_seen or rows.is_guarded()):
            return
        if torch_compat.is_in_backward():  # a reduction; what recomputes was seen in forward
            return
        raise ModelError(
            f"{rows.name}: this rank has rows {rows.first} to {rows.first + rows.count - 1} of "
            f"{sum(rows.counts)}, and {name} of them is not that of the table",
            hint="look rows up by the module, or leave its rule with rows out of the plan",
        )


def _parts(values: Iterable[Any]) -> Iterable[TablePart]:
    for value in values:
        if isinstance(value, TablePart):
            yield value
        elif isinstance(value, list | tuple):
            yield from _parts(value)


def rows_of(tensor: object) -> RowRange | None:
    """Return which rows of a table `tensor` has; None of any other tensor."""
    return tensor.rows if isinstance(tensor, TablePart) else None


def whole_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of `tensor` in the unmodified model."""
    rows = rows_of(tensor)
    return torch.Size(plain(tensor).shape) if rows is None else rows.shape(plain(tensor))


def plain(tensor: Tensor) -> Tensor:
    """Return `tensor` without its rows' refusals, in the same memory."""
    return tensor.detach() if isinstance(tensor, TablePart) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all rows of a table of which `tensor` has some; the ranks call it together."""
    rows = rows_of(tensor)
    return tensor if rows is None else rows.gather(plain(tensor))


def tensors_of_rows(param: Tensor, kept: Mapping[str, object]) -> list[str]:
    """Return the keys of state of an optimizer that has an element for each of the rows."""
    shape = plain(param).shape
    return [key for key, each in kept.items() if isinstance(each, Tensor) and each.shape == shape]
