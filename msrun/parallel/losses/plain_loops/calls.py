"""What data-parallel ranks compare of a plain loop: what a model decides, and what its loss weighs.

A plain loop calls the model and differentiates a loss by itself.  Hooks of the model see its calls
in training, and the runtime calls `settle` before an optimizer steps.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from msrun.parallel.config import DATA_AXIS, ParallelConfig
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.losses.call_hook import CallHook, trains
from msrun.parallel.losses.calls.counted_samples import SampleCounts
from msrun.parallel.losses.decided.decisions import Decisions
from msrun.parallel.losses.plain_loops.weights import PlainLosses
from msrun.parallel.rank_context import RankContext
from msrun.parallel.torch_compat import is_differentiated


class _ModelState(Protocol):
    """The state of a model of `rt.shard`."""

    decisions: Decisions
    has_fixed_shapes: bool

    @property
    def replicas(self) -> Any: ...


class PlainLoop:
    """Watches calls of one model.

    Args:
        model: Of `rt.shard`.
        state: Its state.
        losses: Of all models of the job.
        config: The configuration.
        context: This rank.
    """

    def __init__(
        self,
        model: nn.Module,
        state: _ModelState,
        losses: PlainLosses,
        config: ParallelConfig,
        context: RankContext,
    ) -> None:
        self._decisions, self._losses = state.decisions, losses
        self._group, self._device = context.of_samples.group(DATA_AXIS), context.device
        self._op = config.reduce.op
        self._is_of_step = False  # what was called since an optimizer stepped
        self._is_paused = False
        self._following: list[contextlib.ExitStack] = []  # of calls that run
        self._counts: SampleCounts | None = None
        self._has_counted = False  # what the model counts, in its first call
        is_verified = bool(config.verify)
        own, watched = weakref.ref(self), weakref.ref(model)

        def calls(called: nn.Module) -> bool:
            # A copy has the same hooks, and may be called on one rank.
            loop = own()
            return loop is not None and loop.sees(called) and called is watched()

        def begin(called: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            self._following.append(stack := contextlib.ExitStack())
            if calls(called):
                self._begin_count(called)
                batch = tensors_in([args, kwargs])
                if not losses.begin_call(called, batch, mixes=not is_verified):
                    following = self._decisions.values.following_model(called, batch)
                    stack.enter_context(following)
            elif called is watched() and is_differentiated(called):
                losses.warn_of_transforms()

        def end(called: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
            if calls(called):
                batch = tensors_in([args, kwargs])
                losses.end_call(called, batch, output)
                self._end_count(called, batch)

        nn.Module.register_forward_pre_hook(model, CallHook(begin), with_kwargs=True)
        # Modes end in turn: that of the hooks below begins later.
        left = CallHook(self._end_following)
        nn.Module.register_forward_hook(model, left, prepend=True, always_call=True)
        if not state.has_fixed_shapes:  # a plan of mode auto decides for all ranks
            self._decisions.watch_calls(model, self._group, self._device)
        nn.Module.register_forward_hook(model, CallHook(end), with_kwargs=True)

    def sees(self, model: nn.Module) -> bool:
        """Return whether a call of `model` is one of a plain loop."""
        return trains(model) and not (self._decisions.is_in_step or self._is_paused)

    def _end_following(self, *_: Any) -> None:
        if self._following:  # else a hook before ours raised
            self._following.pop().close()

    def _begin_count(self, model: nn.Module) -> None:
        if not self._has_counted:
            self._has_counted, self._counts = True, SampleCounts(model)

    def _end_count(self, model: nn.Module, batch: Sequence[Tensor]) -> None:
        counts, self._counts = self._counts, None
        if counts:
            counts.warn(model, batch)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Look at nothing inside, where calls and backward passes are those of `verify`."""
        self._is_paused = True
        try:
            with self._losses.paused():
                yield
        finally:
            self._is_paused = False

    def leave(self) -> None:
        """Leave what is called until the next optimizer step to `rt.step`."""
        self._is_of_step = True
        self._losses.drop()

    def settle(self) -> None:
        """Compare what calls decided and what losses weigh; all ranks call it.

        Raises:
            ModelError: Ranks differ, on all of them.
        """
        if self._is_of_step:
            self._is_of_step = False
            return
        self._decisions.settle_calls()
        self._decisions.values.settle_calls(self._group, self._device)
        self._losses.settle(self._group, self._device, self._op)


def watch_plain_loop(
    model: nn.Module,
    state: _ModelState,
    losses: PlainLosses,
    config: ParallelConfig,
    context: RankContext,
) -> PlainLoop | None:
    """Return what watches plain loops of `model`; None where ranks have nothing to compare."""
    is_ours = config.mode != "manual" and config.batch_norm != "local"
    waits = state.replicas is None or state.replicas.has_turns
    if is_ours and waits and context.of_samples.layout.size(DATA_AXIS) > 1:
        return PlainLoop(model, state, losses, config, context)
    return None
