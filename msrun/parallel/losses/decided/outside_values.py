"""Values that a script keeps from its rank's samples and computes a later loss with.

A baseline of rewards, a queue of keys or a bank of features is made of the samples of earlier
steps.  If each rank makes it of its own, the loss of every rank has another one, and one process
has one for the whole batch.  No graph leads to it, so ranks compare what meets their samples and
does not come from these: numbers in arithmetic, and matrices by which features are multiplied.
They do in a few steps, and `rt.step` compares its micro-batches too.

Pairs of rows of two inputs, in the first step, are compared as well: of samples a rank has a part,
but each sample may meet all rows of an input that all ranks have alike, such as prototypes.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from msrun.parallel.exchange import messages
from msrun.parallel.local import is_sharded
from msrun.parallel.losses.calls.marks import Mixture
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
_STEPS, _EVERY = (1, 2, 3, 10, 100), 1000
_NUMBERS_HINT = "take that of all ranks, rt.mean_over_data(value)"
_PAIRS_HINT = "rt.gather has the rows of all ranks"
_PARTS_HINT = "change it behind rt.step, once for all samples"
_MATRIX_HINT = "make it of the samples of all ranks, which rt.gather(x) has"
_steps = watch_numbers()


class OutsideValue(NamedTuple):
    """A value that was not computed from the samples of a step.

    Args:
        name: Of the function that it met samples in, and its line.
        value: The number, or the sum of a matrix.
        is_number: Whether it is one.
        other: Of a pair of inputs, with the sum of one in `value`, that of the other one.
    """

    name: str
    value: float
    is_number: bool
    other: float | None = None


def of_pairs(mixture: Mixture, inputs: Mapping[str, Sequence[Tensor]]) -> OutsideValue:
    """Return sums of the two inputs whose rows a mixture has pairs of, for ranks to compare."""
    sums = [
        sum(float(x.detach().double().sum()) for name in names for x in inputs.get(name, ()))
        for names in mixture.between or ((), ())
    ]
    return OutsideValue(mixture.name, sums[0], is_number=False, other=sums[1])


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


class StepValues:
    """What losses of `rt.step` met that was of no sample of theirs."""

    def __init__(self) -> None:
        self._steps = 0
        # Of each micro-batch, and of those of the step that ended last.
        self._found: list[list[OutsideValue]] = []
        self._met: list[list[OutsideValue]] = []
        self._has_told = False

    @property
    def is_due(self) -> bool:
        """Whether ranks look at this step."""
        return is_looked_at(self._steps + 1)

    @contextlib.contextmanager
    def following(self, samples: int) -> Iterator[None]:
        """Follow the loss of a part with so many samples, inside, if ranks look at this step."""
        if not self.is_due:
            yield
            return
        values = OutsideValues(samples)
        with _Following(values):
            yield
        self._found.append(values.found)

    def note(self, pairs: Sequence[OutsideValue]) -> None:
        """Note pairs of rows of two inputs in the only part of a step."""
        for found in self._found:
            found.extend(pairs)

    def end_step(self) -> bool:
        """End the losses of a step; return whether ranks are to compare what they met."""
        self._met, self._found = self._found, []
        self._steps += 1
        return any(self._met)

    def compare(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Compare what all parts of a step met, and warn; all ranks of `group` call it."""
        every, ranks = [self._met], [0]
        if group is not None:
            every = messages.gather_all(self._met, list[list[OutsideValue]], group, device)
            ranks = dist.get_process_group_ranks(group)
        parts = [part for of_rank in every for part in of_rank]
        numbered = zip(ranks, map(len, every), strict=True)
        places = [
            f"rank {rank}" if count == 1 else f"micro-batch {index} of rank {rank}"
            for rank, count in numbered
            for index in range(count)
        ]
        if not self._has_told and (told := unlike_outside(parts, places)):
            self._has_told = True
            warnings.warn(f"msrun: {told}", stacklevel=6)


class _Following(TorchFunctionMode):
    is_watch = True

    def __init__(self, values: OutsideValues) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        self._values.follow(func, args, result)
        return result


def is_looked_at(step: int) -> bool:
    """Return whether ranks compare what they met in this step, the first of which is 1."""
    return step in _STEPS or step % _EVERY == 0


def unlike_outside(found: Sequence[Sequence[OutsideValue]], places: Sequence[str]) -> str | None:
    """Return a sentence on a value that parts of the batch have others of, and what to do.

    Args:
        found: What each part met.
        places: What to call each part, "rank 0".

    Returns:
        None if all have the same, or took other paths.
    """
    if len({tuple(value.name for value in of_part) for of_part in found}) > 1:
        return None
    told = (_unlike(values, places) for values in zip(*found, strict=True))
    return next(filter(None, told), None)


def _unlike(values: Sequence[OutsideValue], places: Sequence[str]) -> str:
    """Return the sentence on one value; empty if all parts have the same."""
    first, of_parts = values[0], [each.value for each in values]
    last = next((at for at, x in enumerate(of_parts) if x != of_parts[0]), 0)
    if not last or all(x != x for x in of_parts):  # noqa: PLR0124 - not a number
        return ""
    if first.other is not None:
        if len({each.other for each in values}) == 1:
            return ""  # rows that all ranks have, such as prototypes
        return (
            f"the loss depends on {first.name} of a part of the batch, and ranks have other rows "
            f"of both, of which one process has all pairs: {_PAIRS_HINT}"
        )
    what, sums = ("number", "") if first.is_number else ("matrix", " in sum")
    parts = "micro-batches" if "micro" in places[last] else "ranks"
    shown = f"{of_parts[0]:.6g} on {places[0]} and {of_parts[last]:.6g} on {places[last]}"
    hint = _NUMBERS_HINT if first.is_number else _MATRIX_HINT
    hint = hint if parts == "ranks" else _PARTS_HINT
    return (
        f"samples meet a {what} that {parts} have others of, in {first.name}: {shown}{sums}; one "
        f"process has one for the whole batch: {hint}"
    )
