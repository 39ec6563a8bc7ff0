"""What stages raised, also inside of what torch raises, and how all ranks hear of it.

A stage that raised alone in a forward pass without gradients would leave the others waiting.  It
sends zeros until the end of the pass, where all ranks hear of the first failure and raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import torch.distributed as dist

from msrun.errors import ConfigError, DividedModelError, ModelError, PeerRankError, UsageError
from msrun.parallel.exchange.frame import SentOutput

_T = TypeVar("_T")
_KINDS = {
    kind.__name__: kind for kind in (ConfigError, DividedModelError, ModelError, PeerRankError)
}


class StageFailure(msgspec.Struct, frozen=True, order=True):
    """An exception of one stage; that of the earliest chunk is the cause of the others.

    Args:
        chunk: Of the model.
        part: The micro-batch.
        rank: In the job.
        kind: Name of the class of what other ranks raise.
        message: What it says.
        hint: What to do; may be empty.
    """

    chunk: int
    part: int
    rank: int
    kind: str
    message: str
    hint: str


class StageEnd(msgspec.Struct, frozen=True):
    """What a stage says at the end of a pass.

    Args:
        output: Of the model, from the stage that has it.
        failure: What it raised first; None without an exception.
    """

    output: SentOutput | None = None
    failure: StageFailure | None = None


class StageStops:
    """What this stage raised in one pass.

    Attributes:
        failure: What others are told of it; None without an exception.
    """

    failure: StageFailure | None = None

    def __init__(self) -> None:
        self._raised: Exception | None = None

    def run(self, call: Callable[[], _T], chunk: int, part: int) -> _T | None:
        """Return what `call` returns; None if it raised, or was not called as an earlier one did.

        Args:
            call: Runs code of the script.
            chunk: Of the model.
            part: The micro-batch.
        """
        if self.failure is not None:
            return None
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - other stages wait for what this one sends
            self._raised, self.failure = error, _failure(error, chunk, part)
            return None

    def check(self, failures: Sequence[StageFailure]) -> None:
        """Raise the first of the `failures` of all stages, if there is one.

        Raises:
            UsageError: A stage raised; or what this one raised, if it was the first.
        """
        if not failures:
            return
        first = min(failures)
        if self._raised is not None and first.rank == dist.get_rank():
            raise self._raised
        raise _KINDS.get(first.kind, UsageError)(first.message, hint=first.hint or None)


def _failure(error: Exception, chunk: int, part: int) -> StageFailure:
    rank = dist.get_rank()
    if isinstance(error, UsageError):
        kind, message, hint = type(error).__name__, error.message, error.hint or ""
    else:
        text = str(error).strip().partition("\n")[0]
        kind, hint = PeerRankError.__name__, "see the log of that rank"
        message = f"the forward of the model raised {type(error).__name__} on rank {rank}"
        message = f"{message}: {text}" if text else message
    return StageFailure(chunk, part, rank, kind, message, hint)


def is_of_written(error: BaseException) -> bool:
    """Return whether torch found a tensor written that a backward pass needs as it was."""
    cause: BaseException | None = error
    while cause is not None and "modified by an inplace operation" not in str(cause):
        cause = cause.__cause__
    return cause is not None


def usage_error_in(error: BaseException) -> UsageError | None:
    """Return the `UsageError` that torch wrapped in `error`, if there is one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, UsageError):
        cause = cause.__cause__
    return cause
