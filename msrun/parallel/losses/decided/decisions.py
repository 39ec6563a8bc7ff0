"""Notices a model that decides by values of its part of the batch: `if h.abs().max() > 2`.

Theory of operation.  One process decides once for the whole batch, and each rank and micro-batch
for its own part.  Where parts decide alike nothing is wrong: the maximum of a batch is above 2 if
that of each part is.  Where they do not, some samples take another path than in one process.  So
parts compare what they decided, and all ranks raise.

When they compare: at places that all ranks come to, whatever path they take.  A rank may come to
a decision that others pass by, as behind `if not mask.all():`.  So answers wait, in the order of
each line, until the loss of the last micro-batch; of a plain loop, until the optimizer steps.  The
n-th answer of a line on one rank is compared with the n-th of the others that have one.  Under ZeRO
the ranks of one path would wait for parameters that the others do not gather.  There ranks compare
before each gather of a forward pass, too: one that gathers nothing more meets the others at its
loss.

`DecisionTrace` sees the first forward pass and loss.  It notes which tensors depend on values of
the batch, which are floating point: integers, such as tokens and their masks, say what is there,
and a part in which nothing is padding may well skip a mask.  Whether a value is infinite is not one
either.  A sample that is taken out by a number is by itself.  Whether a tensor is noted follows
from the code alone, and not from sizes, so ranks with batches of other sizes note the same.

Most models decide nothing, and later steps do without it.  In those that do, `DecisionWatch`
notes what the same lines read in later micro-batches and steps.  In a plain loop, hooks of the
model do the same with its calls in training; the script has its micro-batches, so ranks alone are
compared.

A guard (`if mask.any():`) mostly skips what would do nothing, so parts that differ there are a
warning.
A sum over samples grows with them, so that two parts may agree beside the batch; a decision by it
is refused in micro-batches, and between ranks a warning, as other mixtures are in `sample_watch`.
Python numbers (`h.max().item()`) are lost to sight, and may only be shown: they are a warning.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from msrun.errors import ModelError
from msrun.parallel.config import ROOT
from msrun.parallel.exchange import messages
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.losses.call_hook import CallHook, trains
from msrun.parallel.losses.decided.dependences import (
    Dependence,
    bare_name,
    dependence_of,
    takes_one,
)
from msrun.parallel.losses.decided.outside_values import StepValues
from msrun.parallel.losses.notes import grad_fn_of, is_passed, watch_numbers
from msrun.parallel.losses.torch_calls import is_own_call, of_values, script_line, tensors_of
from msrun.parallel.torch_compat import eagerly, is_in_backward, write_count

_DEPENDENCE = "msrun_dependence"
_traces = watch_numbers()
_NUMBERS = frozenset(["item", "tolist", "__float__", "__int__", "__index__"])
_ANSWERS = frozenset(["__bool__", "is_nonzero", "equal", "allclose"])
_YES, _NO = 1, 2
_ANSWERS_MAX = 1000  # of a line in a step, which are compared
_HINT = (
    "decide for each sample, as by torch.where, or by a value of the whole batch that is computed "
    "before the step"
)


class Answers(NamedTuple):
    """What a rank decided at a line.

    Args:
        line: Of the script.
        is_guard: Whether it is a guard.
        is_sum: Whether a sum over samples is refused there.
        found: The first, second, ... answers of all parts: `_YES`, `_NO` or both.
    """

    line: str
    is_guard: bool
    is_sum: bool
    found: list[int]


class Decisions:
    """What a model decides by values of its part of the batch.

    Attributes:
        lines: Of the script, which decide; each with whether it is a guard.  All ranks have the
            same from the end of the first step on.
        is_in_step: Whether calls of the model are those of a step, and not of a plain loop.
        trace: Of the first micro-batch of the first step, until the second begins.
        values: What losses of steps meet that is of no sample.
    """

    def __init__(self) -> None:
        self.lines: dict[str, bool] = {}
        self._group: dist.ProcessGroup | None = None
        self._device = torch.device("cpu")
        self._parts = 1
        self._found: dict[str, list[int]] = {}
        self._sums: set[str] = set()
        self._counts: Counter[str] = Counter()  # answers of each line in this part
        # Whether answers of this step are compared, and whether a part of it runs.
        self._is_followed = self._is_running = False
        self.is_in_step = self._is_traced = False
        self._has_calls = False  # whose answers are not compared yet
        self._warned: set[str] = set()
        self._calls: list[contextlib.ExitStack] = []
        self.trace: DecisionTrace | None = None
        self.values = StepValues()

    def begin(self, group: dist.ProcessGroup | None, device: torch.device, parts: int) -> None:
        """Begin a step.

        Args:
            group: The data-parallel ranks; None for one.
            device: Of this rank.
            parts: Micro-batches of a rank.
        """
        self._group, self._device, self._parts = group, device, parts
        self._is_followed = self._has_calls = False
        self.trace = None
        self._forget()

    def _forget(self) -> None:
        self._found.clear()
        self._sums.clear()
        self._counts.clear()

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Let calls of the model inside be those of a step, and not of a plain loop."""
        self.is_in_step = True
        try:
            yield
        finally:
            self.is_in_step = False

    @contextlib.contextmanager
    def in_part(self, *, is_traced: bool = False) -> Iterator[None]:
        """Note what known lines decide for a micro-batch, inside, unless it is traced."""
        self._counts.clear()
        self._is_followed |= is_traced or bool(self.lines)
        self._is_running = True
        try:
            with contextlib.nullcontext() if is_traced else self._watched():
                yield
        finally:
            self._is_running = False

    def watch_calls(self, model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        """Note what `model` decides in a plain loop, too, for `settle_calls`.

        Args:
            model: Of `rt.shard`.
            group: The data-parallel ranks.
            device: Of this rank.
        """
        watched = weakref.ref(model)

        def begin_call(own: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            self._calls.append(stack := contextlib.ExitStack())
            # A copy has the same hooks, and may be called on one rank.
            if not self.is_in_step and trains(own) and own is watched():
                self._group, self._device, self._parts = group, device, 1
                self._begin_call(stack, tensors_in([args, kwargs]))

        nn.Module.register_forward_pre_hook(model, CallHook(begin_call), with_kwargs=True)
        # Modes end in turn: those of hooks that begin earlier end later.
        end = CallHook(self._end_call)
        nn.Module.register_forward_hook(model, end, prepend=True, always_call=True)

    def _begin_call(self, stack: contextlib.ExitStack, batch: Sequence[Tensor]) -> None:
        if self._is_traced and not self.lines:
            return
        self._has_calls = self._is_followed = self._is_running = True
        if self._is_traced:
            stack.enter_context(self._watched())
            return
        self._is_traced = True
        stack.enter_context(eagerly())
        trace = DecisionTrace(self, batch)
        stack.enter_context(trace)
        stack.enter_context(trace.in_model())

    def _end_call(self, *_: Any) -> None:
        if self._calls:  # else a hook before ours raised
            self._calls.pop().close()
            self._is_running = self.is_in_step

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        if not self.lines:
            yield
            return
        with eagerly(), DecisionWatch(self):
            yield

    def note(self, answer: bool, line: str, *, is_sum: bool = False) -> None:  # noqa: FBT001
        """Note what this part decides at a line."""
        if is_sum:
            self._note_sum(line)
        at, found = self._counts[line], self._found.setdefault(line, [])
        self._counts[line] += 1
        bit = _YES if answer else _NO
        if at < len(found):
            found[at] |= bit
        elif at < _ANSWERS_MAX:
            found.append(bit)

    def settle(self) -> None:
        """Compare what all micro-batches of a step decided; all ranks call it.

        Raises:
            ModelError: Parts decide otherwise, on all ranks.
        """
        if self._is_followed:
            self._compare()

    def settle_calls(self) -> None:
        """Compare what calls of a plain loop decided, before an optimizer steps.

        Raises:
            ModelError: Ranks decide otherwise, on all of them.
        """
        if self._has_calls:
            self._has_calls = False
            try:
                self._compare()
            finally:
                self._forget()

    def before_gather(self) -> None:
        """Compare what was decided so far, where ranks of other paths would not gather.

        Raises:
            ModelError: Parts decide otherwise, on all ranks.
        """
        if self._is_running and self._is_followed and not is_in_backward():
            self._compare()

    def _compare(self) -> None:
        own = [
            Answers(line, self.lines[line], line in self._sums, found)
            for line, found in self._found.items()
        ]
        every = [own]
        if self._group is not None:
            every = messages.gather_all(own, list[Answers], self._group, self._device)
        joined: dict[str, list[int]] = {}
        sums: set[str] = set()
        for line, is_guard, is_sum, found in itertools.chain(*every):
            self.lines[line] = self.lines.get(line, True) and is_guard
            pairs = itertools.zip_longest(joined.get(line, []), found, fillvalue=0)
            joined[line] = [one | other for one, other in pairs]
            sums |= {line} if is_sum else set()
        for line, found in joined.items():
            if line in sums:
                text, hint = _sum_problem(line)
                raise ModelError(text, hint=hint)
            if _YES | _NO in found:
                self._refuse(line)

    def _refuse(self, line: str) -> None:
        if not self.lines[line]:
            raise ModelError(
                f"the model decides by values of a part of the batch, and parts differ{line}; one "
                "process decides once for the whole batch",
                hint=_HINT,
            )
        if line not in self._warned:
            self._warned.add(line)
            warnings.warn(
                f"msrun: some parts of the batch have elements for which the model decides{line}, "
                "and others have none: right if what it decides changes these elements alone; "
                f"`{ROOT}: {{verify: first_step}}` compares the step with one process",
                stacklevel=3,
            )

    def _note_sum(self, line: str) -> None:
        if self._parts > 1:
            self._sums.add(line)
        else:
            text, hint = _sum_problem(line)
            warnings.warn(f"msrun: {text}: {hint}", stacklevel=2)


def _sum_problem(line: str) -> tuple[str, str]:
    """Return what is wrong with a decision by a sum over samples, and a hint."""
    problem = (
        "the model decides by a sum over the samples of a part of the batch, which is another "
        f"number for the whole batch{line}"
    )
    hint = f"{_HINT}; `{ROOT}: {{verify: first_step}}` compares the step with one process"
    return problem, hint


class DecisionWatch(TorchFunctionMode):
    """While it is active, what known lines decide is noted.

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
        is_answer = isinstance(result, bool) and bare_name(func) in _ANSWERS | _NUMBERS
        if is_answer and not is_in_backward():  # where a block computes again what it decided
            line = "" if is_own_call(bare_name(func)) else script_line()
            if line in self._decisions.lines:
                self._decisions.note(result, line)
        return result


class DecisionTrace(TorchFunctionMode):
    """While it is active, in the first forward pass and loss, decisions are found and noted.

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
        given = tensors_of(of_values(bare_name(func), args, kwargs))
        # Before the call, which may write them.
        dependences = [dependence for tensor in given if (dependence := self._dependence(tensor))]
        result = func(*args, **kwargs)
        if not dependences:
            return result
        name = bare_name(func)
        if not isinstance(result, Tensor | tuple | list):
            if any(dependence.is_value for dependence in dependences):
                self._read(name, result, dependences)
            return result
        if takes_one(name, args, kwargs):
            return result
        for tensor in tensors_of((result,)):
            self._leave(tensor, dependence_of(name, args, kwargs, dependences, tensor))
        return result

    def _read(self, name: str, result: Any, dependences: Sequence[Dependence]) -> None:
        """Note an answer; say of a number that it is read."""
        if name not in _ANSWERS | _NUMBERS or is_own_call(name):
            return
        if isinstance(result, bool):
            line = script_line()
            is_sum = any(each.is_sum for each in dependences) and self._is_in_model
            is_guard = any(each.is_guard for each in dependences)
            self._decisions.lines[line] = self._decisions.lines.get(line, True) and is_guard
            self._decisions.note(result, line, is_sum=is_sum)
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
        return Dependence(is_value=True) if is_passed(grad_fn_of(tensor)) else None
