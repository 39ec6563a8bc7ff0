"""What all ranks settle with each other while they save or load, over a group on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.errors import CheckpointError, MsrunError, RanksDisagreeError

# A rank that takes longer for its part of one checkpoint does not come back.
DEADLINE = timedelta(minutes=30)
_TEXT_BYTES = 1000

_T = TypeVar("_T")


class HostGroup:
    """The ranks of a job in a process group of their own, so that a background thread may use it.

    Making one is collective, and so is every call.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=DEADLINE)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def meet(self, within: timedelta) -> None:
        """Wait until all ranks are here.

        Raises:
            RanksDisagreeError: Some did not come within that time; the message names them.
        """
        try:
            dist.monitored_barrier(self._group, timeout=within, wait_all_ranks=True)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise RanksDisagreeError(f"not all ranks came within {within}: {reason}") from None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that calls no peers; when it fails on any rank, it fails on all.

        Raises:
            CheckpointError: It failed on another rank.
        """
        own: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the peers wait for it
            own = error
        texts = self._gather_texts("" if own is None else _sentence(own))
        if own is not None:
            raise _shown(own) from None
        for rank, text in enumerate(texts):
            if text:
                raise CheckpointError(f"rank {rank}: {text}")

    def from_first(self, text: str) -> str:
        """Return the `text` of rank 0."""
        return self.scatter([text] * self.world_size)

    def gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks on rank 0, and nothing elsewhere.

        It travels as torch sends objects, pickled, which the ranks of one job may.
        """
        values: list[_T] = [value] * self.world_size if self.rank == 0 else []
        dist.gather_object(value, values or None, dst=0, group=self._group)
        return values

    def scatter(self, values: list[_T]) -> _T:
        """Return the one of rank 0's `values` that is for this rank."""
        received: list[_T | None] = [None]
        is_first = self.rank == 0
        dist.scatter_object_list(received, values if is_first else None, src=0, group=self._group)
        return received[0]  # type: ignore[return-value]  # filled now

    def any_of(self, flags: list[bool]) -> list[bool]:
        """Return for each flag whether any rank has it; all have as many."""
        union = torch.tensor(flags, dtype=torch.uint8)
        if len(flags):
            dist.all_reduce(union, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in union.tolist()]

    def _gather_texts(self, text: str) -> list[str]:
        own = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        data = text.encode(errors="replace")[:_TEXT_BYTES]
        own[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        texts: list[Tensor] = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(texts, own, group=self._group)
        return [bytes(part.tolist()).rstrip(b"\0").decode(errors="ignore") for part in texts]


def _shown(error: Exception) -> Exception:
    """Return what a person reads instead of `error`: no traceback for a full disk."""
    return CheckpointError(_sentence(error)) if isinstance(error, OSError) else error


def _sentence(error: Exception) -> str:
    match error:
        case MsrunError():
            return error.message
        case OSError():
            where = f"{error.filename}: " if error.filename else ""
            return f"{where}{error.strerror or error}"
        case _:
            return f"{type(error).__name__}: {error}"
