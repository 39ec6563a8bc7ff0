"""What a plain loop calls between a call of its model and the step of an optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from msrun.errors import ModelError
from msrun.parallel.config import ROOT
from msrun.parallel.foreach.values import refused_penalties
from msrun.parallel.local import is_sharded
from msrun.parallel.losses.batch import samples_of, tensors_in
from msrun.parallel.losses.decided.outside_values import OutsideValues
from msrun.parallel.losses.linked_terms import forget
from msrun.parallel.losses.own_gradients import is_gradient
from msrun.parallel.losses.plain_loops.sample_watches import SampleWatches
from msrun.parallel.losses.plain_loops.sums import backward_pairs
from msrun.parallel.losses.terms import Term
from msrun.parallel.losses.watch import LossWatch
from msrun.parallel.torch_compat import is_tracing, off_compiler

_COLLECTIVES = dist.all_reduce.__module__
_UNUSED = "not have been used in the graph"  # torch's sentence
_DIVIDED = (
    "torch.autograd.grad is asked for gradients by parameters that ZeRO has divided, and the "
    "forward computed with gathered ones"
)
_DIVIDED_HINT = f"call backward(), or choose `{ROOT}: {{optimizer: {{zero: 0}}}}`"


class LoopWindow(TorchFunctionMode):
    """While it is among the modes of a thread, its watches see functions of torch.

    Args:
        batch: Tensors that the model gets.
        note: Gets each loss that is about to be differentiated.
        note_gradients: Called when gradients by parameters are taken, and when ranks reduce.
        outside: Follows values that are of no sample; None if nobody does.

    Attributes:
        has_ended: Whether a backward pass has begun.
        outside: As given.
    """

    is_watch = reads_graph = True
    has_ended = False

    def __init__(
        self,
        batch: Sequence[Tensor],
        note: Callable[[Tensor, Tensor | None], None],
        note_gradients: Callable[..., None],
        outside: OutsideValues | None,
    ) -> None:
        super().__init__()
        self.outside = outside
        self._note, self._note_gradients = note, note_gradients
        self._samples = samples_of(batch)
        self._losses = LossWatch(samples_of(batch), inputs=batch, is_beside=True)
        self._mixtures = SampleWatches()
        self._problem: ModelError | None = None
        self._outputs: set[Any] = set()  # nodes of autograd

    def look_for_mixtures(self, batch: Sequence[Tensor]) -> None:
        """Look for what mixes samples of `batch`, too."""
        self._mixtures.take(batch)

    @off_compiler
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`; see the class."""
        kwargs = kwargs or {}
        if is_tracing() or not all(issubclass(kind, Tensor) for kind in types):
            return func(*args, **kwargs)  # of a tracer
        if differentiated := backward_pairs(func, args, kwargs):
            self.has_ended = True
            for loss, gradient in differentiated:
                self._note(loss, gradient)
            with refused_penalties():
                return func(*args, **kwargs)
        if getattr(func, "__module__", "") == _COLLECTIVES:
            self._note_gradients(are_averaged=True)
            for tensor in tensors_in([args, kwargs]):
                forget(tensor)
        if is_gradient(func):
            with self._taking_gradients(*args, **kwargs):
                return self._watched(func, types, args, kwargs)
        return self._watched(func, types, args, kwargs)

    def _watched(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        try:
            with self._mixtures if self._mixtures.watches else contextlib.nullcontext():
                # As if it were the mode on top, which takes longer to enter.
                result = self._losses.__torch_function__(func, types, args, kwargs)
        except ModelError as error:  # of a loss over the samples of the part
            self._problem = error
        else:
            if self.outside and not self.has_ended:
                self.outside.follow(func, args, kwargs, result)
            return result
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def _taking_gradients(self, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Iterator[None]:
        """Note gradients inside of what a model returned, if they are by parameters.

        Raises:
            ModelError: The parameters are divided, and the forward computed with gathered ones.
        """
        params = [value for value in tensors_in(inputs) if isinstance(value, Parameter)]
        if params and any(map(self.is_of_outputs, tensors_in(outputs))):
            self._note_gradients(are_averaged=False)
        try:
            yield
        except RuntimeError as error:
            if _UNUSED in str(error) and any(map(is_sharded, params)):
                raise ModelError(_DIVIDED, hint=_DIVIDED_HINT) from None
            raise
        # What was gathered is released behind a backward pass, and reading it ends the process.
        if any(map(_is_released, params)):
            raise ModelError(_DIVIDED, hint=_DIVIDED_HINT)

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Let `tensors`, outputs of the model, be parts of the batch, but for a loss."""
        for tensor in tensors:
            self._outputs.add(tensor.grad_fn)
            if tensor.numel() != 1:
                self._losses.take(tensor)
                self._losses.follow_rows(len(tensor))

    def has_samples(self, loss: Tensor) -> bool:
        """Return whether `loss` has one number for each sample."""
        return loss.numel() == self._samples

    def is_of_outputs(self, loss: Tensor) -> bool:
        """Return whether `loss` depends on an output of a model."""
        seen, waiting = set(), [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            if node in self._outputs:
                return True
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
        return False

    def terms_of(self, loss: Tensor) -> list[Term]:
        """Return the means and sums of which `loss` is made, but for sums of weights alone.

        Raises:
            ModelError: It depends on a number of the part that the batch has another of.
        """
        return [
            term
            for term in self._losses.terms_of(loss)
            if not term.is_sum or self._losses.is_over_rows(term) or self.is_of_outputs(term.total)
        ]

    def mixture(self, loss: Tensor) -> ModelError | None:
        """Return what is wrong with `loss` if it depends on mixed samples; or warn of it."""
        for watch in self._mixtures.watches.values():
            problem = watch.read(loss, is_cut=False)
            if self.outside:
                self.outside.found += watch.pairs
            if problem:
                return problem
        return self._problem


def _is_released(param: Parameter) -> bool:
    is_empty = param.numel() > 0 and not param.untyped_storage().size()
    return is_empty and not is_sharded(param)
