"""Values that a plain loop keeps from its rank's samples and computes a later loss with.

A baseline of rewards, a queue of keys or a bank of features is made of the samples of earlier
steps.  If each rank makes it of its own, the loss of every rank has another one, and one process
has one for the whole batch.  No graph leads to it, so ranks compare what meets their samples and
does not come from these: numbers in arithmetic, and matrices by which features are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from msrun.parallel.local import is_sharded
from msrun.parallel.losses.notes import watch_numbers
from msrun.parallel.losses.torch_calls import name_of, script_line, tensors_of

_ARITHMETIC = frozenset(["add", "sub", "mul", "div", "true_divide", "pow"])
_ARITHMETIC |= {f"{kind}{name}" for kind in "ri" for name in ("add", "sub", "mul", "truediv")}
_ARITHMETIC |= {"truediv"}
_PRODUCTS = frozenset(["matmul", "mm", "linear", "rmatmul"])
_PICKING = frozenset(["__getitem__", "__iter__", "unbind", "select", "take"])
# Attributes of tensors: the number of the step, where they come from samples of it, or are some.
_OWN, _PICKED = "msrun_of_own_samples", "msrun_picked_samples"
_DIMS = 2
_steps = watch_numbers()


class OutsideValue(NamedTuple):
    """A value that was not computed from the samples of a step.

    Args:
        name: Of the function that it met samples in, and its line.
        value: The number, or the sum of a matrix.
        is_number: Whether it is one.
    """

    name: str
    value: float
    is_number: bool


class OutsideValues:
    """What met samples since it was made.

    Args:
        samples: In this rank's part of the batch.

    Attributes:
        found: In order.
    """

    def __init__(self, samples: int) -> None:
        self.found: list[OutsideValue] = []
        self._samples = samples
        self._number = next(_steps)  # what was computed in another step is from outside of this one

    def follow(self, func: Callable[..., Any], args: Sequence[Any], result: Any) -> None:
        """Look at a call of `func`, which returned `result`."""
        given = tensors_of(args)
        if self._samples < _DIMS or not given or any(map(is_sharded, given)):
            return
        name = name_of(func)
        if any(map(self._is_own, given)):
            results = tensors_of((result,))
            is_picked = name in _PICKING and not any(map(self._is_whole, results))
            is_picked = is_picked or any(map(self._is_picked, given))
            for tensor in results:
                setattr(tensor, _PICKED if is_picked else _OWN, self._number)
        plain = name.strip("_")
        if plain in _ARITHMETIC and any(map(self._is_whole, given)):
            numbers = [value for value in args if type(value) is float or self._is_number(value)]
            self._note(plain, numbers, is_number=True)
        if plain in _PRODUCTS and self._is_whole(given[0]):
            self._note(plain, [x for x in given[1:] if self._is_matrix(x)], is_number=False)

    def _note(self, name: str, values: Sequence[Any], *, is_number: bool) -> None:
        for value in values:
            total = float(value.double().sum()) if isinstance(value, Tensor) else value
            self.found.append(OutsideValue(f"{name}{script_line()}", total, is_number))

    def _is_own(self, tensor: Tensor) -> bool:
        is_noted = getattr(tensor, _OWN, None) == self._number
        return (
            is_noted
            or self._is_picked(tensor)
            or tensor.requires_grad
            or tensor.shape[:1] == (self._samples,)
        )

    def _is_whole(self, tensor: Tensor) -> bool:
        return tensor.shape[:1] == (self._samples,) and not self._is_picked(tensor)

    def _is_picked(self, tensor: Tensor) -> bool:
        return getattr(tensor, _PICKED, None) == self._number

    def _is_outside(self, value: Any) -> bool:
        is_plain = isinstance(value, Tensor) and not isinstance(value, Parameter)
        return is_plain and value.is_floating_point() and not self._is_own(value)

    def _is_number(self, value: Any) -> bool:
        return self._is_outside(value) and value.dim() == 0

    def _is_matrix(self, value: Any) -> bool:
        return self._is_outside(value) and value.dim() == _DIMS


def unlike_outside(
    found: Sequence[Sequence[OutsideValue]], ranks: Sequence[int]
) -> tuple[str, bool] | None:
    """Return a sentence on a value that `ranks` have others of, and whether it is a number.

    Returns:
        None if all have the same, or took other paths.
    """
    if len({tuple(value.name for value in of_rank) for of_rank in found}) > 1:
        return None
    for values in zip(*found, strict=True):
        of_ranks = [each.value for each in values]
        last = next((place for place, x in enumerate(of_ranks) if x != of_ranks[0]), 0)
        if last and not all(x != x for x in of_ranks):  # noqa: PLR0124 - not a number
            first = values[0]
            shown = f"{of_ranks[0]:.6g} on rank {ranks[0]} and {of_ranks[last]:.6g} on rank"
            what = "a number" if first.is_number else "a matrix"
            sums = "" if first.is_number else " in sum"
            text = f"samples of this loop meet {what} that ranks have others of, in {first.name}: "
            text += f"{shown} {ranks[last]}{sums}; one process has one for the whole batch"
            return text, first.is_number
    return None
