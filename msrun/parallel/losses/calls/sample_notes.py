"""What a watch notes of tensors of a batch beside where these have samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from msrun.parallel.local import takes_gradients
from msrun.parallel.losses.torch_calls import tensors_of

# Attributes of tensors, with the number of the watch: integers that every micro-batch gets whole,
# or what is computed from these; the order of indices; what is made of nothing that the model or
# its loss gets.
_WHOLE, _ORDER, _MADE = "msrun_whole", "msrun_sample_order", "msrun_made"
_orders = itertools.count(1)


class SampleNotes:
    """The notes of a watch.

    Args:
        number: Of the watch.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def leave_order(self, result: Any, given: Sequence[Tensor]) -> None:
        """Note that indices are an order of their own, or that of the indices they are."""
        order = next(filter(None, map(self.order, given)), 0) or next(_orders)
        for tensor in tensors_of((result,)):
            if not tensor.is_floating_point():
                setattr(tensor, _ORDER, (self._number, order))

    def order(self, tensor: Tensor) -> int:
        """Return the number of the order that indices have; 0 without one."""
        number, order = getattr(tensor, _ORDER, (None, 0))
        return order if number == self._number else 0

    def leave_whole(self, tensors: Iterable[Tensor]) -> None:
        """Note that every micro-batch has all of these integers."""
        for tensor in tensors:
            if not (tensor.is_inference() or takes_gradients(tensor)):
                setattr(tensor, _WHOLE, self._number)

    def is_whole(self, tensor: Tensor) -> bool:
        """Return whether every micro-batch has all of these integers."""
        return getattr(tensor, _WHOLE, None) == self._number

    def leave_made(self, result: Any) -> None:
        """Note that a function made tensors, which are no labels, of nothing that it got."""
        for tensor in tensors_of((result,)):
            setattr(tensor, _MADE, self._number)

    def is_made(self, tensor: Tensor) -> bool:
        """Return whether a function made a tensor of nothing that it got."""
        return getattr(tensor, _MADE, None) == self._number

    @staticmethod
    def copy(tensor: Tensor, copied: Tensor) -> None:
        """Note of `copied`, which has other values, what is noted of `tensor`."""
        for note in (_WHOLE, _ORDER):
            if hasattr(tensor, note) and not copied.is_inference():
                setattr(copied, note, getattr(tensor, note))
