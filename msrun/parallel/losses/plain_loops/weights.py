"""Compares what elements of the batch weigh in the losses of a plain loop, on all ranks.

Theory of operation.  In a plain loop the script computes a loss of its rank's part of the batch,
and gradients are averaged over ranks.  That is right for a mean whose count is equal on all ranks.
A mean over targets that are no padding, or over weights of classes, has another count on each:
targets of a rank with few of them weigh more, and in one process all weigh the same.  `rt.step`
divides by the count of all ranks.  A script has divided already when it calls `backward`, so here
ranks compare and all refuse before the optimizer steps.

From a call of the model in training until an optimizer steps, a `LoopWindow` is among the function
modes of the thread.  It has a `LossWatch`, which leaves a term for each mean and each sum, and sees
`Tensor.backward` and `torch.autograd.backward`: of each loss that these get, the derivative by a
mean, over its count, is what an element weighs.  Outputs of the model are new to the watch, unless
they are one number: a model may return its loss.  A `SampleWatch` looks at the first step for what
mixes samples.

Python between functions of torch costs time, so ranks look at steps 1, 2, 3, 10, 100 and every
1000.  Where counts follow from the data, as with padding, they look at every step; but not at that
of a compiled model, which runs eagerly in a window.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from msrun.errors import ModelError
from msrun.parallel.config import ROOT
from msrun.parallel.exchange import messages
from msrun.parallel.local import full_tensor
from msrun.parallel.losses.batch import samples_of, tensors_in
from msrun.parallel.losses.call_hook import has_compiled
from msrun.parallel.losses.calls.unknown import warn_of_unknown
from msrun.parallel.losses.decided.outside_values import (
    OutsideValue,
    OutsideValues,
    is_looked_at,
    unlike_outside,
)
from msrun.parallel.losses.linearity import derivatives
from msrun.parallel.losses.plain_loops.sums import (
    Weight,
    kind_of,
    unlike_number,
    unlike_ranks,
    weights_by,
)
from msrun.parallel.losses.plain_loops.window import LoopWindow
from msrun.parallel.losses.terms import Term
from msrun.parallel.torch_compat import (
    add_mode_below,
    eagerly,
    remove_mode,
)

_HINT = (
    "rt.step divides by the count of all ranks; a loop may divide the sum by "
    "rt.mean_over_data(count), which all ranks have"
)
_NUMBERS_HINT = "take that of all ranks, rt.mean_over_data(value)"
_GRADIENTS = (
    "gradients that torch.autograd.grad takes by parameters in this loop are those of this rank's "
    "samples, and no rank averages them"
)
_TRANSFORMED = (
    "gradients that torch.func takes by parameters in this loop are those of this rank's samples"
)
_GRADIENTS_HINT = "call backward(), or average them with rt.mean_over_data"


class PlainLosses:
    """What losses of a plain loop are made of, since an optimizer stepped."""

    def __init__(self) -> None:
        self._steps = 0
        self._is_paused = self._has_ended = False
        self._has_gradients = False  # by parameters, which nothing has averaged
        self._follows_data = False
        self._window: LoopWindow | None = None
        self._open = contextlib.ExitStack()
        self._found: list[list[Weight]] = []
        self._outside: list[OutsideValue] = []
        self._warned: set[str] = set()
        self._has_told = False  # of a number that ranks have others of
        self._has_told_outside = False  # of a value from earlier steps
        # Models that return no loss: after a first call, functions inside are left alone.
        self._without_loss: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def begin_call(self, model: nn.Module, batch: Sequence[Tensor], *, mixes: bool) -> bool:
        """Look from now on: a model is called in training.

        Args:
            model: The model.
            batch: Tensors that it gets.
            mixes: Whether to look at the first step for what mixes samples.

        Returns:
            Whether functions of this call are looked at.
        """
        self._tell_gradients()
        looks = self._is_due(model) and (self._steps == 0 or model not in self._without_loss)
        if looks:
            window = self._look(batch)
            if mixes and self._steps == 0:
                window.look_for_mixtures(batch)
        return looks

    def begin_again(self) -> None:
        """Look as at the first step, in which another model is new to a script."""
        self._steps = 0
        self._warned.clear()
        self._has_told = self._has_told_outside = False

    def end_call(self, model: nn.Module, batch: Sequence[Tensor], output: Any) -> None:
        """Take the output of `model` for the batch of what follows, but for a loss."""
        if not self._is_due(model):
            return
        tensors = tensors_in(output)
        if all(tensor.numel() != 1 for tensor in tensors):
            self._without_loss.add(model)
        window = self._window
        if window is None or window.has_ended:
            window = self._look(batch)
        window.take(tensors)

    def _is_due(self, model: nn.Module) -> bool:
        if self._has_ended:
            return False
        return self._is_regular() or (self._follows_data and not has_compiled(model))

    def _is_regular(self) -> bool:
        """Return whether ranks look at this step whatever they found before."""
        return is_looked_at(self._steps + 1)

    def _look(self, batch: Sequence[Tensor]) -> LoopWindow:
        if self._window is None or self._window.has_ended:
            self._close()
            outside = OutsideValues(samples_of(batch), batch) if self._is_regular() else None
            self._window = LoopWindow(batch, self._note, self._note_gradients, outside)
            self._open.enter_context(eagerly())
            self._open.enter_context(_below(self._window))
        return self._window

    def settle(
        self, group: dist.ProcessGroup, device: torch.device, op: Literal["mean", "sum"]
    ) -> None:
        """Compare what was found, before an optimizer steps; all ranks of `group` call it.

        Args:
            group: The data-parallel ranks.
            device: Of this rank.
            op: How gradients are reduced.

        Raises:
            ModelError: Elements weigh otherwise than in one process, on all ranks.
        """
        self._close()
        self._tell_gradients()
        found, self._found = self._found, []
        is_regular = self._is_regular()
        self._steps += 1
        if is_regular:
            self._settle_outside(group, device)
        elif not self._follows_data:
            return
        every = messages.gather_all(found, list[list[Weight]], group, device)
        # Of several optimizers one may step with losses of other kinds.
        self._follows_data |= any(w.follows_data for of in every for loss in of for w in loss)
        if len({len(of_rank) for of_rank in every}) > 1:
            return
        for losses in zip(*every, strict=True):
            ranks = dist.get_process_group_ranks(group)
            _check(losses, ranks, op)
            if not self._has_told and (number := unlike_number(losses, ranks)):
                self._has_told = True
                self._warn(number, _NUMBERS_HINT)
            scaled = [weight for weight in losses[0] if weight.kind == "scaled"]
            if scaled and op == "mean" and self._steps == 1:
                self._warn(_scaled_problem(scaled[0], group.size()), _HINT)

    def _settle_outside(self, group: dist.ProcessGroup, device: torch.device) -> None:
        found, self._outside = self._outside, []
        every = messages.gather_all(found, list[OutsideValue], group, device)
        unlike = unlike_outside(every, [f"rank {x}" for x in dist.get_process_group_ranks(group)])
        if unlike and not self._has_told_outside:
            self._has_told_outside = True
            warnings.warn(f"msrun: {unlike}", stacklevel=5)

    def drop(self) -> None:
        """Look no more until the next call of a model, and forget what was found."""
        self._close()
        self._found.clear()
        self._outside.clear()

    def end(self) -> None:
        """Look no more, whatever a script calls without its runtime."""
        self.drop()
        self._has_ended = True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing inside."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _note(self, loss: Tensor, gradient: Tensor | None = None) -> None:
        """Note what is differentiated, and by which gradient where it is no number."""
        if self._window is None or self._is_paused:
            return
        if not self._window.is_of_outputs(loss):  # of a model that the script trains by itself
            return
        if loss.numel() != 1:
            if gradient is not None and self._window.has_samples(loss):
                self._found.append(weights_by(full_tensor(gradient)))
            return
        try:
            weights = _weights(self._window.terms_of(loss), full_tensor(loss))
            mixture = self._window.mixture(loss)
        except ModelError as error:
            mixture, weights = error, []
        self._found.append(weights)
        if mixture and self._steps == 0:
            self._warn(mixture.message, mixture.hint or _HINT)
        elif self._steps == 0:
            warn_of_unknown(loss)

    def _note_gradients(self, *, are_averaged: bool) -> None:
        """Note that a script takes gradients by parameters, or that ranks reduce something."""
        self._has_gradients = not (are_averaged or self._is_paused)

    def _tell_gradients(self) -> None:
        if self._has_gradients:
            self._has_gradients = False
            self._warn(_GRADIENTS, _GRADIENTS_HINT)

    def warn_of_transforms(self) -> None:
        """Warn that torch.func takes gradients by parameters, which no backward pass reduces."""
        self._warn(_TRANSFORMED, _GRADIENTS_HINT)

    def _warn(self, text: str, hint: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"msrun: {text}: {hint}", stacklevel=6)

    def _close(self) -> None:
        if self._window and self._window.outside:
            self._outside += self._window.outside.found
        self._window = None
        self._open.close()


@contextlib.contextmanager
def _below(mode: TorchFunctionMode) -> Iterator[None]:
    add_mode_below(mode)
    try:
        yield
    finally:
        remove_mode(mode)


def _weights(terms: Sequence[Term], loss: Tensor) -> list[Weight]:
    """Return the weights of `terms` in `loss`.

    Raises:
        ModelError: It is no linear function of them.
    """
    own = [term for term in terms if not term.columns and term.value.requires_grad]
    found = []
    for term, slope in derivatives(loss, own).items() if own else ():
        if slope.requires_grad:  # learned weights of ranks are compared with their replicas
            continue
        count = 1.0 if term.count is None else float(term.limit(term.count))
        weight = float(slope) * term.factor
        is_known = term.is_by_hand or abs(weight) == 1.0
        follows = not is_known if term.is_sum else count != term.elements
        kind = kind_of(term, weight, loss)
        found.append(Weight(term.name, weight, count, kind, follows_data=follows))
    numbers = [term for term in terms if term.mean is not None and not term.mean.requires_grad]
    found += [Weight(term.name, float(term.value), 1.0, "number") for term in numbers]
    return found


def _check(
    losses: Sequence[Sequence[Weight]], ranks: Sequence[int], op: Literal["mean", "sum"]
) -> None:
    """Refuse a loss, given by what it is made of on each of `ranks`, that is not that of a batch.

    Raises:
        ModelError: It is not.
    """
    if len({tuple(weight.name for weight in loss) for loss in losses}) > 1:
        return  # ranks took other paths
    for weights in zip(*losses, strict=True):
        if weights[0].kind == "number":
            continue
        if unlike := unlike_ranks(weights):
            first, last = unlike
            text = _unlike(weights[first], ranks[first], weights[last], ranks[last])
            raise ModelError(text, hint=_HINT)
        if op == "mean" and all(weight.kind == "sum" for weight in weights):
            raise ModelError(
                f"the loss of this loop is a sum over a part of the batch ({weights[0].name}), and "
                f"ranks average their gradients: one process has {len(ranks)} times as much",
                hint=f"`{ROOT}: {{reduce: {{op: sum}}}}` adds gradients up; rt.step adds up sums",
            )


def _scaled_problem(weight: Weight, ranks: int) -> str:
    return (
        f"the loss of this loop is a sum over a part of the batch ({weight.name}) times "
        f"{weight.slope:g}, and ranks average their gradients: right if that number has the factor "
        f"{ranks}, as one over the mean count of a rank has"
    )


def _unlike(one: Weight, rank: int, other: Weight, other_rank: int) -> str:
    end = "; in one process all elements of the batch weigh the same, and no weight was changed"
    if one.slope == other.slope:
        return (
            f"the loss of this loop divides {one.name} by {one.divisor:g} on rank {rank} and by "
            f"{other.divisor:g} on rank {other_rank}{end}"
        )
    return (
        f"an element of {one.name} weighs {one.value:.6g} in the loss of this loop on rank {rank} "
        f"and {other.value:.6g} on rank {other_rank}{end}"
    )
