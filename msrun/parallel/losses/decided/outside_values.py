"""Values that a script keeps from its rank's samples and computes a later loss with.

A baseline of rewards, a queue of keys or a bank of features is made of the samples of earlier
steps.  If each rank makes it of its own, the loss of every rank has another one, and one process
has one for the whole batch.  No graph leads to it, so ranks compare what meets their samples and
does not come from these: numbers in arithmetic, and matrices by which features are multiplied.
They do in a few steps, and `rt.step` compares its micro-batches too.

A model may keep such values too, as a statistic in an attribute that is no buffer.  Of what its
forward meets, only what was there before the step is looked at: it may draw what it likes.

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
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from msrun.parallel.exchange import messages
from msrun.parallel.local import is_sharded
from msrun.parallel.losses.batch import samples_of, tensors_in
from msrun.parallel.losses.call_hook import has_compiled
from msrun.parallel.losses.calls.marks import Mixture
from msrun.parallel.losses.notes import watch_numbers
from msrun.parallel.losses.torch_calls import SIZES, name_of, of_values, script_line, tensors_of
from msrun.parallel.torch_compat import eagerly, is_transforming

_ARITHMETIC = frozenset(["add", "sub", "mul", "div", "true_divide", "pow"])
_ARITHMETIC |= {f"{kind}{name}" for kind in "ri" for name in ("add", "sub", "mul", "truediv")}
_ARITHMETIC |= {"truediv"}
_PRODUCTS = frozenset(["matmul", "mm", "linear", "rmatmul", "einsum", "tensordot", "inner"])
_PRODUCTS |= {"cdist", "cosine_similarity"}
# They fill a tensor with what is of no sample.
_FILLING = frozenset(["zero_", "fill_", "normal_", "uniform_", "bernoulli_", "random_"])
_FILLING |= {"exponential_", "log_normal_", "cauchy_", "geometric_"}
_PICKING = frozenset(["__getitem__", "__iter__", "unbind", "select", "take"])
# Attributes of tensors: the number of the step, where they come from samples of it, or are some.
_OWN, _PICKED = "msrun_of_own_samples", "msrun_picked_samples"
# Or where they were made in it, of no sample; as if it were so, inputs and buffers.
_MADE = "msrun_made_in_step"
_DIMS = 2
_STEPS, _EVERY = (1, 2, 3, 10, 100), 1000
# Those in which a model is looked at: compiled functions in it take more memory meanwhile.
_STEPS_OF_MODEL = (2, 3, 10)
_NUMBERS_HINT = "take that of all ranks, rt.mean_over_data(value)"
_PAIRS_HINT = "rt.gather has the rows of all ranks"
_PARTS_HINT = "change it behind rt.step, once for all samples"
_MATRIX_HINT = "make it of the samples of all ranks, which rt.gather(x) has"
_steps = watch_numbers()


class OutsideValue(NamedTuple):
    """A value that was not computed from the samples of a step.

    Args:
        name: Of the function that it met samples in, and its line.
        value: The number, or the sum of a tensor.
        shape: Of the tensor; empty for a number.
        other: Of a pair of inputs, with the sum of one in `value`, that of the other one.
    """

    name: str
    value: float
    shape: tuple[int, ...]
    other: float | None = None


def of_pairs(mixture: Mixture, inputs: Mapping[str, Sequence[Tensor]]) -> OutsideValue:
    """Return sums of the two inputs whose rows a mixture has pairs of, for ranks to compare."""
    sums = [
        sum(float(x.detach().double().sum()) for name in names for x in inputs.get(name, ()))
        for names in mixture.between or ((), ())
    ]
    return OutsideValue(mixture.name, sums[0], (0,), sums[1])


class OutsideValues:
    """What met samples since it was made.

    Args:
        samples: In this rank's part of the batch.
        batch: Tensors of it.
        model: Whose forward is followed, and no loss; its buffers are compared elsewhere.

    Attributes:
        found: In order.
    """

    def __init__(
        self, samples: int, batch: Sequence[Tensor] = (), model: nn.Module | None = None
    ) -> None:
        self.found: list[OutsideValue] = []
        self._samples, self._is_of_loss = samples, model is None
        self._number = next(_steps)  # what was computed in another step is from outside of this one
        # Sequences come first in some models, with their samples in the second dim.
        plain = [x for x in batch if not x.is_nested]
        self._sizes = {samples, *(x.shape[1] for x in plain if x.dim() in (_DIMS, _DIMS + 1))}
        for tensor in (*batch, *(model.buffers() if model else ())):
            setattr(tensor, _MADE, self._number)

    def follow(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Look at a call of `func`, which returned `result`."""
        # Where a script asks for a size, other watches would see us ask for more; and tensors in
        # transforms of functions have no values.
        if func in SIZES or is_transforming():
            return
        name = name_of(func)
        given = tensors_of(of_values(name, args, kwargs))
        if self._samples < _DIMS or any(map(is_sharded, given)):
            return
        results = tensors_of((result,))
        if any(map(self._is_own, given)):
            is_picked = name in _PICKING and not any(map(self._is_whole, results))
            is_picked = is_picked or any(map(self._is_picked, given))
            for tensor in results:
                setattr(tensor, _PICKED if is_picked else _OWN, self._number)
        elif name in _FILLING or all(map(self._is_made, given)):
            for tensor in results:
                setattr(tensor, _MADE, self._number)
        plain = name.strip("_")
        if plain in _ARITHMETIC and results:
            self._note(plain, self._met(args, given, results))
        if plain in _PRODUCTS and given and self._is_whole(given[0]):
            self._note(plain, [x for x in given[1:] if self._is_matrix(x)])

    def _met(
        self, args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
    ) -> Iterator[Any]:
        """Yield what met samples in arithmetic."""
        is_whole = self._is_of_loss and any(map(self._is_whole, given))
        is_own = any(map(self._is_own, given)) and not any(map(self._is_picked, given))
        for value in args:
            is_number = type(value) is float or (self._is_outside(value) and value.dim() == 0)
            if (is_whole and is_number) or (is_own and self._is_kept(value, results[0])):
                yield value

    def _note(self, name: str, values: Iterable[Any]) -> None:
        for value in values:
            is_tensor = isinstance(value, Tensor)
            total = float(value.detach().double().sum()) if is_tensor else value
            shape = tuple(value.shape) if is_tensor else ()
            self.found.append(OutsideValue(f"{name}{script_line()}", total, shape))

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

    def _is_made(self, tensor: Tensor) -> bool:
        return getattr(tensor, _MADE, None) == self._number

    def _is_outside(self, value: Any) -> bool:
        is_plain = isinstance(value, Tensor) and not isinstance(value, Parameter)
        return is_plain and value.is_floating_point() and not self._is_own(value)

    def _is_kept(self, value: Any, result: Tensor) -> bool:
        """Return whether `value` is of another step, and meets all that the first dim has."""
        if not self._is_outside(value) or self._is_made(value) or not result.dim():
            return False
        is_shared = value.dim() < result.dim() or len(value) < len(result)
        return is_shared and self._sizes.isdisjoint(value.shape)

    def _is_matrix(self, value: Any) -> bool:
        is_outside = self._is_outside(value) and value.dim() == _DIMS
        return is_outside and (self._is_of_loss or not self._is_made(value))


class StepValues:
    """What losses of `rt.step` met that was of no sample of theirs."""

    def __init__(self) -> None:
        self._steps = 0
        self._of_model: list[OutsideValue] = []  # before its loss
        self._is_in_loss = False
        # Of each micro-batch, and of those of the step that ended last.
        self._found: list[list[OutsideValue]] = []
        self._met: list[list[OutsideValue]] = []
        self._has_told = False

    @property
    def is_due(self) -> bool:
        """Whether ranks look at this step."""
        return is_looked_at(self._steps + 1)

    @contextlib.contextmanager
    def following(self, samples: int, data: Sequence[Tensor] = ()) -> Iterator[None]:
        """Follow the loss of a part, inside, if ranks look at this step.

        Args:
            samples: In the part.
            data: Tensors of it.
        """
        if not self.is_due:
            yield
            return
        values = OutsideValues(samples, data)
        self._is_in_loss = True
        try:
            with _Following(values):
                yield
        finally:
            self._is_in_loss = False
        self._found.append([*self._of_model, *values.found])
        self._of_model = []

    def followed(self, model: nn.Module) -> Callable[..., Any]:
        """Return `model`, or what runs and follows it if ranks look at models in this step."""
        if not self._looks_at(model):
            return model

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.following_model(model, tensors_in([args, kwargs])):
                return model(*args, **kwargs)

        return run

    def _looks_at(self, model: nn.Module) -> bool:
        return self._steps + 1 in _STEPS_OF_MODEL and not has_compiled(model)

    @contextlib.contextmanager
    def following_model(self, model: nn.Module, data: Sequence[Tensor]) -> Iterator[None]:
        """Follow the forward of `model` before a loss, inside, if ranks look at this step.

        Args:
            model: It; one with compiled parts is not looked at.
            data: Tensors that it gets.
        """
        if self._is_in_loss or not self._looks_at(model):
            yield
            return
        values = OutsideValues(samples_of(data), data, model)
        with eagerly(), _Following(values):
            yield
        self._of_model += values.found

    def note(self, pairs: Sequence[OutsideValue]) -> None:
        """Note pairs of rows of two inputs in the only part of a step."""
        for found in self._found:
            found.extend(pairs)

    def end_step(self) -> bool:
        """End the losses of a step; return whether ranks are to compare what they met."""
        self._met, self._found = self._found, []
        self._steps += 1
        return any(self._met)

    def settle_calls(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """End a step of a plain loop, whose calls are one part; all ranks of `group` call it."""
        is_due = self._steps + 1 in _STEPS_OF_MODEL
        self._found, self._of_model = [self._of_model], []
        self.end_step()
        if is_due:
            self.compare(group, device)

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
        self._values.follow(func, args, kwargs or {}, result)
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
    if len({each.shape for each in values}) > 1:
        return ""  # positions of sequences, as long as those of each part
    kinds = {0: ("number", ""), _DIMS: ("matrix", " in sum")}
    what, sums = kinds.get(len(first.shape), ("tensor", " in sum"))
    parts = "micro-batches" if "micro" in places[last] else "ranks"
    shown = f"{of_parts[0]:.6g} on {places[0]} and {of_parts[last]:.6g} on {places[last]}"
    hint = _MATRIX_HINT if what == "matrix" else _NUMBERS_HINT
    hint = hint if parts == "ranks" else _PARTS_HINT
    return (
        f"samples meet a {what} that {parts} have others of, in {first.name}: {shown}{sums}; one "
        f"process has one for the whole batch: {hint}"
    )
