"""Agreement of all ranks while they save or load, over a process group on the host.

Saving and loading alternate between work that each rank does alone and collectives.  A rank that
failed alone and left would have its peers wait in the next collective.  So all work runs in
`together`: at its end every rank learns whether any rank failed, and all raise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MsrunError,
    RanksDisagreeError,
)
from msrun.parallel.exchange import messages

# A rank that takes longer for its part of one checkpoint counts as lost.
DEADLINE = timedelta(minutes=30)
_TEXT_BYTES = 1000
# First character of the text of a damaged checkpoint.
_DAMAGE = "\x01"

_T = TypeVar("_T")


class HostGroup:
    """All ranks of a job in a gloo group of their own.

    A background thread may use it while training uses the other groups.  Making one is collective,
    and so is every call.
    """

    def __init__(self) -> None:
        # gloo on every device, since the values are on the host.
        self._group = dist.new_group(backend="gloo", timeout=DEADLINE)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def meet(self, within: timedelta) -> None:
        """Wait until all ranks have called this.

        Raises:
            RanksDisagreeError: Some ranks did not call it in that time; the message names them.
        """
        try:
            dist.monitored_barrier(self._group, timeout=within, wait_all_ranks=True)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise RanksDisagreeError(f"not all ranks came within {within}: {reason}") from None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a block without collectives; if it fails on any rank, it raises on all.

        Raises:
            CheckpointError: The block failed on another rank.
        """
        own: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the peers wait for it
            own = error
        # Texts of a fixed size need one all-gather, without a round for the sizes.
        texts = self._gather_texts("" if own is None else _marked(own))
        problems = {rank: text for rank, text in enumerate(texts) if text}
        # All ranks raise the same kind, since all of them or none then try an older checkpoint.
        is_damage = all(text.startswith(_DAMAGE) for text in problems.values())
        if own is not None:
            raise _shown(own, is_damage=is_damage) from None
        for rank, text in problems.items():
            kind = DamagedCheckpointError if is_damage else CheckpointError
            raise kind(f"rank {rank}: {text.removeprefix(_DAMAGE)}")

    def from_first(self, text: str) -> str:
        """Return the `text` of rank 0."""
        return messages.broadcast(text, str, 0, self._group)

    def gather(self, value: _T, kind: type[_T]) -> list[_T]:
        """Return the values of all ranks on rank 0, and an empty list elsewhere."""
        return messages.gather_to_first(value, kind, self._group)

    def scatter(self, values: list[_T], kind: type[_T]) -> _T:
        """Return this rank's entry of the `values` of rank 0."""
        return messages.scatter_from_first(values, kind, self._group)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a contiguous tensor of the host to `rank`, which calls `receive`."""
        if tensor.numel():
            dist.send(tensor.reshape(-1).view(torch.uint8), rank, group=self._group)

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fill a contiguous tensor of the host with what `rank` sends."""
        if tensor.numel():
            dist.recv(tensor.view(-1).view(torch.uint8), rank, group=self._group)

    def any_of(self, flags: list[bool]) -> list[bool]:
        """Return for each flag whether any rank has set it; all ranks pass equally many."""
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


def _marked(error: Exception) -> str:
    """Return the sentence that the other ranks get."""
    return _DAMAGE * isinstance(error, DamagedCheckpointError) + _sentence(error)


def _shown(error: Exception, *, is_damage: bool) -> Exception:
    """Return `error`, or for an `OSError` such as a full disk an error without a traceback."""
    is_other = isinstance(error, DamagedCheckpointError) and not is_damage
    return CheckpointError(_sentence(error)) if isinstance(error, OSError) or is_other else error


def _sentence(error: Exception) -> str:
    match error:
        case MsrunError():
            return error.message
        case OSError():
            where = f"{error.filename}: " if error.filename else ""
            return f"{where}{error.strerror or error}"
        case _:
            return f"{type(error).__name__}: {error}"
