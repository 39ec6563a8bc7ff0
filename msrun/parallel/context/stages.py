"""Parts of sequences in a pipeline.

A pipeline records the forward of a model once for each shape, on tensors without values, and runs
the recorded steps in chunks on other ranks.  So a recording is where tokens are followed through
the whole forward: it tells each rank where the tensors that it receives have their tokens, and
calls in the model's own code that make positions are recorded as steps that make those of the part.
Modules run on their rank as without a pipeline: the first step follows tokens there again, with
values, and compares what it sends with the recording.

Micro-batches take turns, so a backward pass, which may compute attention again, first chooses the
padding and the documents of its own micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function

from msrun.errors import ModelError
from msrun.parallel.config import ROOT
from msrun.parallel.context.attention import attention_arguments
from msrun.parallel.context.documents import FINDERS, OneDocument
from msrun.parallel.context.sequences import ADDING, Sequences
from msrun.parallel.context.sites import site_of_call
from msrun.parallel.context.token_calls import Taint
from msrun.parallel.context.token_watch import Known, TokenWatch
from msrun.parallel.losses.batch import StepBatch, tensors_in
from msrun.parallel.pipeline.microbatch import MicrobatchSplit
from msrun.parallel.pipeline.record.follower import Follower, Run, Values
from msrun.parallel.pipeline.split_model import SplitModel
from msrun.parallel.torch_compat import is_active, is_fake, without_mode


class _Notes(NamedTuple):
    """What a recording found.

    Args:
        sent: What is known of each tensor that each chunk but the last sends.
        has_documents: Whether the model looks for documents by positions.
    """

    sent: list[list[Known | None]]
    has_documents: bool


class _AttentionStep:
    """`scaled_dot_product_attention` as a step of a graph, for masks of whole sequences too."""

    __name__ = "attention_of_part"

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return attention; without values, a tensor of its shape."""
        query, key, value, *_ = attention_arguments(*args, **kwargs)
        if is_fake(query):
            enable_gqa = kwargs.get("enable_gqa", False)
            return functional.scaled_dot_product_attention(query, key, value, enable_gqa=enable_gqa)
        return functional.scaled_dot_product_attention(*args, **kwargs)


_ATTENTION = _AttentionStep()


class StageSequences(Sequences, Follower):
    """The tokens of this rank in a stage of a pipeline; see `Sequences` for the arguments."""

    # Of the whole model, whose forward is recorded.
    _whole: nn.Module
    _is_recording = False
    _finds_documents = False

    def follow(self, model: SplitModel) -> None:
        """Follow the recordings and chunks of `model`."""
        self._whole = model.whole
        self._programs: set[CodeType] = set()
        model.follow(self)

    def in_recordings(self, names: Collection[str]) -> list[tuple[str, nn.Module]]:
        """Return the modules of these names that run in recordings: those of the whole model."""
        return [(name, self._whole.get_submodule(name)) for name in names]

    # The batch.

    def cut(self, model: nn.Module, batch: StepBatch) -> StepBatch:
        """Return this rank's part of a batch of whole sequences."""
        del model  # of which this rank has a stage
        self._real = self._documents = None
        self._has_documents = False
        return super().cut(self._whole, batch)

    def begin(self, part: StepBatch) -> None:
        """Do nothing: the pipeline splits the batch."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Compute on parts in chunks and loss inside."""
        with super().active():
            if self._watch:
                self._watch.refuses = False
            self._begin_watch(self._watch, tensors_in(self._of_batch.batch))
            yield

    def _around_step(self) -> contextlib.AbstractContextManager[Any]:
        # What the pipeline itself does with tensors is not looked at.
        return contextlib.nullcontext() if is_active(self) else self

    @contextlib.contextmanager
    def inside(self, *, is_all: bool) -> Iterator[None]:
        """Be active inside, in code of the model."""
        self._local.running = getattr(self._local, "running", 0) + 1
        watch = self.watch_now()
        before = watch and watch.refuses
        try:
            if watch:
                watch.refuses = True
            with super().inside(is_all=is_all):
                yield
        except Exception:
            self._has_raised = True
            raise
        finally:
            self._local.running -= 1
            if watch:
                watch.refuses = bool(before)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`, which the model calls or the pipeline."""
        if not getattr(self._local, "running", 0):
            return func(*args, **(kwargs or {}))
        if self._is_recording and getattr(func, "__name__", "") in ADDING:
            args = self._with_rows(args) or args
        return super().__torch_function__(func, types, args, kwargs)

    # Recordings.

    @property
    def batch_kind(self) -> Hashable:
        """Which tensors of the batch were cut."""
        return (self._tokens, tuple(self._of_batch.is_cut)) if self._cut else None

    @contextlib.contextmanager
    def around_recording(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Follow tokens in a recording, also where modules run that are single steps of it."""
        if self._cut is None:
            yield
            return
        before, self._watch = self._watch, TokenWatch(self._key)
        self._begin_watch(self._watch, inputs)
        self._finds_documents = False
        try:
            with without_mode(self), self._watch:
                yield
        finally:
            self._recorded, self._watch = self._watch, before

    @contextlib.contextmanager
    def in_recording(self) -> Iterator[None]:
        """Replace calls that make positions before they are recorded."""
        self._is_recording = True
        try:
            with self.inside(is_all=True):
                yield
        finally:
            self._is_recording = False

    def end_recording(self, values: Values, run: Run) -> tuple[_Notes, Values]:
        """Return where the tensors that chunks send have their tokens, and these tensors."""
        del run
        marks = [[self._recorded.mark(value) for value in sent] for sent in values]
        return _Notes(marks, self._finds_documents), values

    def _called(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if not self._is_recording:
            return super()._called(function, *args, **kwargs)
        found: Tensor = handle_torch_function(function, (), *args, **kwargs)  # for the recorder
        return found

    def _attend(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self._is_recording:
            return super()._attend(func, args, kwargs)
        query, key, value, *_ = attention_arguments(*args, **kwargs)
        self._is_of_others(query, key, value)
        return self._called(_ATTENTION, *args, **kwargs)

    def _find_documents(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        is_found = Path(site_of_call()[0].co_filename).name in FINDERS
        if not self._is_recording or not is_found:
            return func(*args, **kwargs)
        self._finds_documents = True
        return OneDocument()

    # Chunks.

    def own_program(self, program: Callable[..., Any]) -> None:
        """Note that calls in `program` that make positions were replaced."""
        self._programs.add(program.__code__)

    def _is_decided(self, site: tuple[Any, int]) -> bool:
        return site[0] in self._programs

    def begin_part(self, split: MicrobatchSplit, part: int) -> None:
        """Have attention see the padding and the documents of a micro-batch."""
        cut = self._of_batch
        if cut.real is not None or cut.documents is not None:
            self._choose(split.padded(torch.arange(split.samples), part).tolist())

    def begin_backward(self, values: Sequence[Tensor], split: MicrobatchSplit, part: int) -> None:
        """Have the backward pass of `values` choose its micro-batch first."""
        for value in values:
            if value.requires_grad:
                value.register_hook(lambda _: self.begin_part(split, part))

    def receive(self, notes: _Notes, chunk: int, values: Sequence[Any]) -> Sequence[Any]:
        """Note where received tensors have their tokens."""
        self._has_documents = notes.has_documents
        if self._watch and chunk:
            for value, mark in zip(values, notes.sent[chunk - 1], strict=True):
                if mark:
                    self._watch.leave(value, mark)
        return values

    def send(self, notes: _Notes, chunk: int, values: Any) -> Any:
        """Refuse a tensor whose tokens are elsewhere than in the recording."""
        if self._watch is None or chunk == len(notes.sent):
            return values
        for value, mark in zip(values, notes.sent[chunk], strict=True):
            found = self._watch.mark(value)
            is_taint = isinstance(found, Taint) and isinstance(mark, Taint)
            if found and found != mark and not is_taint:
                raise ModelError(
                    f"{self._key}.style: context: a stage sends a tensor of shape "
                    f"{tuple(value.shape)}, where it has its tokens depends on values, and the "
                    "next stage cannot follow them",
                    hint=f"cut the model elsewhere with {ROOT}.pipeline.stages",
                )
        return values

    def followed(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a loss function that computes on parts."""

        def loss(output: Any, target: Any) -> Any:
            with self.inside(is_all=self._all):
                return loss_fn(output, target)

        return loss
