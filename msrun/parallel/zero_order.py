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

from msrun.errors import UsageError
from msrun.parallel import torch_compat
from msrun.parallel.config import ROOT

_BITS = 32
_RANKS_SHOWN = 8
_NAMES_SHOWN = 4


class UnitOrder:
    """What this rank gathered and reduced since all ranks compared it.

    They do so at the end of each backward pass, or when a step sums its loss anyway.

    Args:
        divided: The outermost module of `fully_shard`.
        group: Data-parallel ranks.
        device: Of this rank.
        level: `zero` of the configuration.
    """

    def __init__(
        self, divided: FSDPModule, group: dist.ProcessGroup, device: torch.device, level: int
    ) -> None:
        self._group = group
        self._device = device
        self._level = level
        self._name = type(divided).__name__
        self._events: list[str] = []
        self._is_planned = False
        torch_compat.watch_units(divided, self._on_gather, self._on_reduce)

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
            UsageError: They differ; gradients are wrong.
        """
        events, self._events = self._events, []
        digest = zlib.crc32("\n".join(events).encode())
        bits = [float(digest >> bit & 1) for bit in range(_BITS)]
        dtype = torch.promote_types(value.dtype, torch.float32)
        own = torch.tensor(bits, dtype=dtype, device=value.device)
        flat = torch.cat([value.reshape(1).to(dtype), own])
        dist.all_reduce(flat, group=self._group)
        if any(0 < count < self._group.size() for count in flat[1:].tolist()):
            self._refuse(events)
        return flat[0].to(value.dtype).view_as(value)

    def _on_gather(self, name: str) -> None:
        self._events.append(f"gathered {name or self._name}")

    def _on_reduce(self, names: Sequence[str]) -> None:
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            shown = f"{', '.join(names[:_NAMES_SHOWN])}{more}"
            self._events.append(f"reduced gradients of {shown}")
        if not self._is_planned:
            torch_compat.after_backward(self._compare)

    def _compare(self) -> None:
        if self._events:  # the first call of a backward pass has seen them all
            self.sum_and_compare(torch.zeros((), device=self._device))

    def _refuse(self, own: list[str]) -> None:
        """Name the first difference, on all ranks alike."""
        found: list[list[str]] = [[] for _ in range(self._group.size())]
        dist.all_gather_object(found, own, group=self._group)
        ranks = dist.get_process_group_ranks(self._group)
        for events in itertools.zip_longest(*found, fillvalue="did nothing more"):
            if len(set(events)) > 1:
                of_event: dict[str, list[int]] = {}
                for rank, event in zip(ranks, events, strict=True):
                    of_event.setdefault(event, []).append(rank)
                break
        told = "; ".join(f"{_named(ranks)} {event}" for event, ranks in of_event.items())
        raise UsageError(
            f"{ROOT}.optimizer.zero: level {self._level} needs all ranks to use the same modules "
            f"in one order, and {told}; no weight was changed",
            hint="choose zero 0, or have every rank call them all, times 0 where it has no use",
        )


def _named(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _RANKS_SHOWN} more" if len(ranks) > _RANKS_SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_RANKS_SHOWN]))}{more}"
