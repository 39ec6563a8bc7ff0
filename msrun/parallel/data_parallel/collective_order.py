"""Whether data-parallel ranks gathered and reduced the same modules in one order.

Optimizer parallel gathers a module when its rank comes to it.  Ranks that come to different ones
take each other's weights for their own, and if those are as many nothing else would tell.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from msrun.errors import RanksDisagreeError, UsageError
from msrun.parallel import torch_compat
from msrun.parallel.config import ROOT

_BITS = 32
_EVENTS_MAX = 100_000
_RANKS_SHOWN = 8
_NAMES_SHOWN = 4

# What was done, and to what.
Event = tuple[str, ...]
_END: Event = ("did nothing more",)


class CollectiveOrder:
    """What this rank gathered and reduced since all ranks compared it.

    They do so at the end of each backward pass, or when a step sums its loss anyway.

    Args:
        divided: The outermost module of `fully_shard`.
        group: Data-parallel ranks.
        device: Of this rank.
        level: `zero` of the configuration.
        kept: How much is remembered by name; evaluation may go on for ever.
    """

    def __init__(
        self,
        model: FSDPModule,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        level: int,
        events_max: int = _EVENTS_MAX,
    ) -> None:
        self._group = group
        self._device = device
        self._level = level
        self._events_max = events_max
        self._name = type(model).__name__
        self._events: list[Event] = []
        self._digest = 0
        self._is_planned = False
        torch_compat.watch_units(
            model, self._on_gather, self._on_reduce, _on_sparse, _on_second_gradient
        )

    @contextlib.contextmanager
    def compared_later(self) -> Iterator[None]:
        """Leave it to the caller to compare what happens inside."""
        self._is_planned = True
        try:
            yield
        finally:
            self._is_planned = False

    def sum_and_compare(self, value: Tensor) -> Tensor:
        """Return the sum of `value`, one number, over the ranks, and compare them by the way.

        Each bit of a digest is summed too: where ranks are alike, all of them have it or none.

        Raises:
            RanksDisagreeError: They differ; gradients are wrong.
        """
        events, digest = self._events, self._digest
        self._events, self._digest = [], 0
        bits = [float(digest >> bit & 1) for bit in range(_BITS)]
        dtype = torch.promote_types(value.dtype, torch.float32)
        own = torch.tensor(bits, dtype=dtype, device=value.device)
        flat = torch.cat([value.reshape(1).to(dtype), own])
        dist.all_reduce(flat, group=self._group)
        if any(0 < count < self._group.size() for count in flat[1:].tolist()):
            is_full = len(events) == self._events_max
            last = f"did other things after {self._events_max} alike ({digest:08x})"
            self._refuse([*events, (last,)] if is_full else events)
        return flat[0].to(value.dtype).view_as(value)

    def check_trains(self, loss: Tensor) -> None:
        """Refuse a loss with which this rank would take no part in what the others reduce.

        They wait for it in a collective of their own, so it is refused here alone.

        Raises:
            RanksDisagreeError: It depends on no parameter that is trained.
        """
        if self._group.size() > 1 and not loss.requires_grad:
            problem = f"the loss of rank {dist.get_rank()} depends on no parameter that is trained"
            raise self._refusal(problem)

    def _on_gather(self, name: str) -> None:
        self._add("gathered", name or self._name)

    def _on_reduce(self, names: Sequence[str]) -> None:
        if names:
            self._add("reduced gradients of", *names)
        if not self._is_planned:
            torch_compat.after_backward(self._compare)

    def _add(self, *event: str) -> None:
        self._digest = zlib.crc32("\n".join((*event, "\n")).encode(), self._digest)
        if len(self._events) < self._events_max:
            self._events.append(event)

    def _compare(self) -> None:
        if self._events:  # the first call of a backward pass has seen them all
            self.sum_and_compare(torch.zeros((), device=self._device))

    def _refuse(self, events: list[Event]) -> None:
        """Name the first difference, on all ranks alike."""
        of_ranks: list[list[Event]] = [[] for _ in range(self._group.size())]
        dist.all_gather_object(of_ranks, events, group=self._group)
        ranks = dist.get_process_group_ranks(self._group)
        positions = itertools.zip_longest(*of_ranks, fillvalue=_END)
        problem = _difference(
            ranks, next(step_events for step_events in positions if len(set(step_events)) > 1)
        )
        raise self._refusal(problem)

    def _refusal(self, problem: str) -> UsageError:
        return RanksDisagreeError(
            f"{ROOT}.optimizer.zero: level {self._level} needs all ranks to use the same modules "
            f"in one order, and {problem}; no weight was changed",
            hint="choose zero 0, or have every rank call them all, times 0 where it has no use",
        )


def _on_sparse(name: str) -> None:
    raise RanksDisagreeError(
        f"{ROOT}.optimizer.zero: {name} has a sparse gradient, which is for tables that stay whole",
        hint="pass sparse=False, or use nn.Embedding(sparse=True) with a threshold above its size",
    )


def _on_second_gradient() -> None:
    raise RanksDisagreeError(
        f"{ROOT}.optimizer.zero: gradients of gradients (create_graph=True) need parameters that "
        "stay whole",
        hint="choose zero 0",
    )


def _difference(ranks: Sequence[int], events: Sequence[Event]) -> str:
    """Say who did what, of the names only those that not all have."""
    common = set.intersection(*(set(names) for _, *names in events))
    ranks_of: dict[Event, list[str]] = {}
    for rank, event in zip(ranks, events, strict=True):
        ranks_of.setdefault(event, []).append(str(rank))
    parts = []
    for (action, *names), members in ranks_of.items():
        others = [name for name in names if name not in common] or ["nothing else"]
        what = f"{action} {_some(others, _NAMES_SHOWN)}" if names else action
        parts.append(f"rank{'s' * (len(members) > 1)} {_some(members, _RANKS_SHOWN)} {what}")
    return "; ".join(parts)


def _some(values: Sequence[str], count: int) -> str:
    more = f" and {len(values) - count} more" if len(values) > count else ""
    return f"{', '.join(values[:count])}{more}"
