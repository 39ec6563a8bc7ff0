"""Notices a model that decides by values of its part of the batch: `if h.abs().max() > 2`.

Theory of operation.  One process decides once for the whole batch, and each rank and micro-batch
for its own part.  Where parts decide alike nothing is wrong: the maximum of a batch is above 2 if
that of each part is.  Where they do not, some samples take another path than in one process, and
under ZeRO the ranks of one path wait for parameters that the others do not gather.  So parts
compare what they decide, when they do: all ranks get there by the same path, and all raise.

`DecisionTrace` sees the first forward pass and loss.  It notes which tensors depend on values of
the batch, which are floating point: integers, such as tokens and their masks, say what is there,
and a part in which nothing is padding may well skip a mask.  Whether a value is infinite is not one
either.  A sample that is taken out by a number is by itself.  Whether a tensor is noted follows
from the code alone, and not from sizes, so ranks with batches of other sizes note the same.

Most models decide nothing, and later steps do without it.  In those that do, `DecisionWatch`
compares what the same lines read in later micro-batches and steps.  In a plain loop, hooks of the
model do the same with its calls in training; the script has its micro-batches, so ranks alone are
compared.

A guard (`if mask.any():`) mostly skips what would do nothing, so parts that differ there are a
warning, and go on without being compared until their next forward, as their paths may differ.
A sum over samples grows with them, so that two parts may agree beside the batch; a decision by it
is refused in micro-batches, and between ranks a warning, as other mixtures are in `sample_watch`.
Python numbers (`h.max().item()`) are lost to sight, and may only be shown: they are a warning.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from msrun.errors import ModelError
from msrun.parallel.config import ROOT
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.losses.call_hook import CallHook, trains
from msrun.parallel.losses.mixing import dims_of
from msrun.parallel.losses.notes import PASSING, watch_numbers
from msrun.parallel.losses.torch_calls import DIVIDING, of_values, script_line, tensors_of
from msrun.parallel.torch_compat import eagerly, is_in_backward, write_count

_DEPENDENCE = "msrun_dependence"
_traces = watch_numbers()
_NUMBERS = frozenset(["item", "tolist", "__float__", "__int__", "__index__"])
_ANSWERS = frozenset(["__bool__", "is_nonzero", "equal", "allclose"])
_COMPARISONS = frozenset(["gt", "lt", "ge", "le", "eq", "ne", "isclose", "greater", "less"])
_COMPARISONS |= {"greater_equal", "less_equal", "not_equal"}
_GUARDS = frozenset(["any", "all"])
_OF_NO_VALUE = frozenset(["isnan", "isinf", "isfinite", "isposinf", "isneginf"])
_SUMS = frozenset(["sum", "nansum", "count_nonzero", "norm", "vector_norm", "prod", "logsumexp"])
_SUMS |= {"std", "var"}
_CUTTING = frozenset(["__getitem__", "__iter__", "unbind", "select", "chunk", "split", "narrow"])
_HINT = (
    "decide for each sample, as by torch.where, or by a value of the whole batch that is computed "
    "before the step"
)


class Dependence(NamedTuple):
    """How a tensor depends on the batch.

    Args:
        is_value: Whether it depends on floating-point values, and not on tokens or masks alone.
        is_sum: Whether it is a sum over samples, which grows with them.
        is_guard: Whether it says that some element has a property, or that all have.
    """

    is_value: bool
    is_sum: bool = False
    is_guard: bool = False


class Decisions:
    """What a model decides by values of its part of the batch.

    Attributes:
        lines: Of the script, which decide; each with whether it is a guard.
        trace: Of the first micro-batch of the first step, until the second begins.
    """

    def __init__(self) -> None:
        self.lines: dict[str, bool] = {}
        self._group: dist.ProcessGroup | None = None
        self._device = torch.device("cpu")
        self._parts = 1
        self._first: list[bool] = []  # what the first micro-batch decided
        self._part = self._next = 0
        self._is_step = self._is_traced = self._is_apart = False
        self._warned: set[str] = set()
        self._calls: list[contextlib.ExitStack] = []
        self.trace: DecisionTrace | None = None

    def begin(self, group: dist.ProcessGroup | None, device: torch.device, parts: int) -> None:
        """Begin a step.

        Args:
            group: The data-parallel ranks; None for one.
            device: Of this rank.
            parts: Micro-batches of a rank.
        """
        self._group, self._device, self._parts = group, device, parts
        self._first, self._part, self.trace = [], 0, None

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Let calls of the model inside be those of a step, and not of a plain loop."""
        self._is_step = True
        try:
            yield
        finally:
            self._is_step = False

    @contextlib.contextmanager
    def in_part(self, part: int, *, is_traced: bool = False) -> Iterator[None]:
        """Compare what known lines decide for a micro-batch, inside, unless it is traced."""
        self._part, self._next, self._is_apart = part, 0, False
        with contextlib.nullcontext() if is_traced else self._watched():
            yield

    def watch_calls(self, model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        """Compare what `model` decides in a plain loop, too.

        Args:
            model: Of `rt.shard`.
            group: The data-parallel ranks.
            device: Of this rank.
        """
        begin = CallHook(functools.partial(self._begin_call, group, device))
        end = CallHook(self._end_call)
        nn.Module.register_forward_pre_hook(model, begin, with_kwargs=True)
        # Modes end in turn: those of hooks that begin earlier end later.
        nn.Module.register_forward_hook(model, end, prepend=True, always_call=True)

    def _begin_call(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        if self._is_step or not trains(model):
            self._calls.append(contextlib.ExitStack())
            return
        self.begin(group, device, 1)
        self._next, self._is_apart = 0, False
        self._calls.append(stack := contextlib.ExitStack())
        if self._is_traced:
            stack.enter_context(self._watched())
            return
        self._is_traced = True
        stack.enter_context(eagerly())
        trace = DecisionTrace(self, tensors_in([args, kwargs]))
        stack.enter_context(trace)
        stack.enter_context(trace.in_model())

    def _end_call(self, *_: Any) -> None:
        if self._calls:  # else a hook before ours raised
            self._calls.pop().close()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        if not self.lines:
            yield
            return
        with eagerly(), DecisionWatch(self):
            yield

    def compare(self, answer: bool, line: str, *, is_sum: bool = False) -> None:  # noqa: FBT001
        """Compare what this part decides; all parts do.

        Raises:
            ModelError: Parts decide otherwise, on all ranks.
        """
        if self._is_apart:
            return
        if is_sum:
            self._note_sum(line)
        if self._part == 0:
            self._first.append(answer)
        at = self._next
        self._next += 1
        is_alike = at >= len(self._first) or self._first[at] == answer
        if self._group is not None:
            found = torch.tensor([answer, not answer], dtype=torch.int32, device=self._device)
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
            is_alike &= found.tolist() != [1, 1]
        if is_alike:
            return
        if self.lines.get(line):
            self._is_apart = True
            self._warn_of_guard(line)
        else:
            raise ModelError(
                f"the model decides by values of a part of the batch, and parts differ{line}; one "
                "process decides once for the whole batch",
                hint=_HINT,
            )

    def _warn_of_guard(self, line: str) -> None:
        if line not in self._warned:
            self._warned.add(line)
            warnings.warn(
                f"msrun: some parts of the batch have elements for which the model decides{line}, "
                "and others have none: right if what it decides changes these elements alone; "
                f"`{ROOT}: {{verify: first_step}}` compares the step with one process",
                stacklevel=3,
            )

    def _note_sum(self, line: str) -> None:
        text = (
            "the model decides by a sum over the samples of a part of the batch, which is another "
            f"number for the whole batch{line}"
        )
        hint = f"{_HINT}; `{ROOT}: {{verify: first_step}}` compares the step with one process"
        if self._parts > 1:
            raise ModelError(text, hint=hint)
        warnings.warn(f"msrun: {text}: {hint}", stacklevel=2)


class DecisionWatch(TorchFunctionMode):
    """While it is active, what known lines decide is compared.

    Args:
        decisions: Those of the model.
    """

    is_watch = True

    def __init__(self, decisions: Decisions) -> None:
        super().__init__()
        self._decisions = decisions

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`; see the class."""
        del types
        result = func(*args, **(kwargs or {}))
        is_answer = isinstance(result, bool) and _name(func) in _ANSWERS | _NUMBERS
        if is_answer and not is_in_backward():  # where a block computes again what it decided
            line = script_line()
            if line in self._decisions.lines:
                self._decisions.compare(result, line)
        return result


class DecisionTrace(TorchFunctionMode):
    """While it is active, in the first forward pass and loss, decisions are found and compared.

    Args:
        decisions: Gets them.
        batch: Tensors of this part of the batch.
    """

    is_watch = True

    def __init__(self, decisions: Decisions, batch: Sequence[Tensor]) -> None:
        super().__init__()
        self._decisions = decisions
        self._number = next(_traces)
        self._is_in_model = False
        self._shown: set[str] = set()
        for tensor in batch:
            self._leave(tensor, Dependence(tensor.is_floating_point()))

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Look inside at numbers, too; of a loss, scripts like to show some."""
        self._is_in_model = True
        try:
            yield
        finally:
            self._is_in_model = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`; see the class."""
        del types
        kwargs = kwargs or {}
        given = tensors_of(of_values(_name(func), args, kwargs))
        # Before the call, which may write them.
        dependences = [dependence for tensor in given if (dependence := self._dependence(tensor))]
        result = func(*args, **kwargs)
        if not dependences:
            return result
        name = _name(func)
        if not isinstance(result, Tensor | tuple | list):
            if any(dependence.is_value for dependence in dependences):
                self._read(name, result, dependences)
            return result
        if _takes_one(name, args, kwargs):
            return result
        for tensor in tensors_of((result,)):
            self._leave(tensor, _dependence_of(name, args, kwargs, dependences, tensor))
        return result

    def _read(self, name: str, result: Any, dependences: Sequence[Dependence]) -> None:
        """Compare an answer; say of a number that it is read."""
        if isinstance(result, bool) and name in _ANSWERS | _NUMBERS:
            line = script_line()
            is_sum = any(each.is_sum for each in dependences) and self._is_in_model
            is_guard = any(each.is_guard for each in dependences)
            self._decisions.lines[line] = self._decisions.lines.get(line, True) and is_guard
            self._decisions.compare(result, line, is_sum=is_sum)
        elif name in _NUMBERS and self._is_in_model:
            line = script_line()
            if line not in self._shown:
                self._shown.add(line)
                warnings.warn(
                    f"msrun: the model reads a number of a part of the batch{line}: what it "
                    "computes with it differs from one process; to show it alone is right, and "
                    f"`{ROOT}: {{verify: first_step}}` compares",
                    stacklevel=3,
                )

    def forget(self, tensor: Tensor) -> None:
        """Let `tensor` be none that was computed here."""
        vars(tensor).pop(_DEPENDENCE, None)

    def extend(self, tensor: Tensor) -> None:
        """Let `tensor` be one that was computed here."""
        self._leave(tensor, Dependence(is_value=True))

    def made(self, tensor: Tensor) -> bool:
        """Return whether `tensor` was computed here, and not written since."""
        number, *noted = getattr(tensor, _DEPENDENCE, (None,))
        return number == self._number and noted[0] == write_count(tensor)

    def _leave(self, tensor: Tensor, dependence: Dependence) -> None:
        if not tensor.is_inference():
            setattr(tensor, _DEPENDENCE, (self._number, write_count(tensor), *dependence))

    def _dependence(self, tensor: Tensor) -> Dependence | None:
        if isinstance(tensor, Parameter) or tensor.is_inference():
            return None
        number, *noted = getattr(tensor, _DEPENDENCE, (None,))
        if number == self._number:
            return Dependence(*noted[1:]) if noted[0] == write_count(tensor) else None
        node = tensor.grad_fn
        return Dependence(is_value=True) if node and node.name() in PASSING else None


def _dependence_of(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dependences: Sequence[Dependence],
    result: Tensor,
) -> Dependence:
    """Return how a result depends on the batch, by what the arguments do."""
    is_value = any(dependence.is_value for dependence in dependences)
    is_sum = any(dependence.is_sum for dependence in dependences)
    is_guard = name in _GUARDS or any(dependence.is_guard for dependence in dependences)
    if result.is_floating_point():
        is_value |= result.requires_grad  # weights that tokens chose
    elif result.dtype != torch.bool:
        is_value &= name in _SUMS  # how many there are; others are places
    elif name in _OF_NO_VALUE:
        is_value = False
    if name in _SUMS and args and isinstance(args[0], Tensor):
        dims = dims_of(name, args, kwargs, args[0].dim())
        is_sum |= not dims or 0 in dims
    elif name in DIVIDING:
        is_sum = False  # a mean by hand
    elif name in _COMPARISONS and any(type(arg) in (int, float) and not arg for arg in args):
        is_guard |= is_sum  # whether there is any
        is_sum = False
    return Dependence(is_value, is_sum, is_guard and result.dtype == torch.bool)


def _takes_one(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function takes some samples by their place, in the first dim."""
    if name not in _CUTTING:
        return False
    if name == "__getitem__":
        first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        is_part = isinstance(first, slice) and first != slice(None)
        return is_part or (isinstance(first, int) and not isinstance(first, bool))
    at = 2 if name in ("chunk", "split") else 1
    dim = kwargs.get("dim", args[at] if len(args) > at else 0)
    return bool(dim == 0)


def _name(func: Callable[..., Any]) -> str:
    """Return the name of a function of torch, without what says that it is an operator."""
    name: str = getattr(func, "__name__", "")
    bare = name.removeprefix("__").removesuffix("__")
    return bare if bare in _COMPARISONS else name if name.endswith("__") else name.removesuffix("_")
