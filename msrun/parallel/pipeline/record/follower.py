"""What follows a model through its stages, such as the tokens of sequences or parts of images."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from msrun.parallel.pipeline.microbatch import MicrobatchSplit

Values = Sequence[Sequence[Any]]
Run = Callable[[int, Sequence[Any]], Sequence[Any]]


class Follower:
    """Follows nothing: a base, and what a pipeline has without more.

    A forward is recorded once, on tensors without values, and then runs in chunks on other ranks.
    What is known of a tensor there, its note, goes from the recording to each rank that receives
    such a tensor.

    Attributes:
        can_wait: Whether gradients of weights may be computed after those of inputs.
    """

    can_wait = True

    @property
    def batch_kind(self) -> Hashable:
        """What of the batch decides about the steps of a forward, beside shapes."""
        return None

    def around_recording(self, inputs: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Return the context of a recording of `inputs`: it sees functions after the recorder."""
        del inputs
        return nullcontext()

    def in_recording(self) -> AbstractContextManager[None]:
        """Return the context of the model's own code in a recording: it sees functions first."""
        return nullcontext()

    def end_recording(self, values: Values, run: Run) -> tuple[Any, Values]:
        """Return the notes of the recording that has ended, and what travels between ranks.

        Args:
            values: What each chunk but the last yields.
            run: Returns what a chunk yields for what it receives, in tensors without values.
        """
        del run
        return None, values

    def own_program(self, program: Callable[..., Any]) -> None:
        """Note that functions which `program` calls were seen in the recording."""

    def begin_part(self, split: MicrobatchSplit, part: int) -> None:
        """Begin the forward or backward pass of a micro-batch in a chunk."""

    def begin_backward(self, values: Sequence[Tensor], split: MicrobatchSplit, part: int) -> None:
        """Have the backward pass of `values`, which a chunk sends, begin that of its part."""

    def receive(self, notes: Any, chunk: int, values: Sequence[Any]) -> Sequence[Any]:
        """Note what is known of `values`, which `chunk` received; return what its steps take."""
        del notes, chunk
        return values

    def send(self, notes: Any, chunk: int, values: Any) -> Any:
        """Compare what is known of `values` with the recording; return what `chunk` sends."""
        del notes, chunk
        return values

    def followed(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a loss function that is followed."""
        return loss_fn
