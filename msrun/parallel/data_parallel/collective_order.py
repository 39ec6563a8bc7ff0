"""Checks that data-parallel ranks gathered and reduced the same modules in the same order.

The problem.  `fully_shard` gathers the parameters of a module when the rank runs it.  If the ranks
of a step run different modules, the gather of one meets the gather of another.  With modules of
different sizes the collective fails or waits until its timeout.  With equal sizes nothing fails:
each rank computes with weights of the wrong module, and training continues.

The idea.  Each rank keeps a running CRC-32 of its gathers and reductions, by module and parameter
names.  Ranks are alike if their digests are.  One all-reduce compares them: each of the 32 bits is
summed as a float, and a sum other than 0 or the number of ranks shows a difference.  (A maximum and
a minimum would take two collectives, and a sum of whole digests could hide a difference.)
`rt.step` all-reduces its loss anyway, so the bits travel with it for free; a plain loop pays one
small all-reduce at the end of each backward pass.  Different orders have equal digests with a
chance of about 2**-32.

When ranks compare: before the optimizer step, so a refusal leaves all weights as they were.  If
digests differ, the ranks exchange their events by name, and all of them raise one error that names
the first difference.

Invariants:

- All ranks raise, or none: each computes the same sums, and all join the exchange of events.  The
  exception is `check_trains`: a rank whose loss depends on no trained parameter must raise alone,
  since its peers already wait for it in a collective of the backward pass.
- Names are kept for the error only, at most `events_max` of them: evaluation gathers as well and
  may go on for any time between two comparisons.  The digest covers all events.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from msrun.errors import ModelError, RanksDisagreeError, UsageError
from msrun.parallel import torch_compat
from msrun.parallel.config import ROOT
from msrun.parallel.data_parallel.joined_inputs import JoinNotes
from msrun.parallel.exchange import messages
from msrun.parallel.foreach.whole_values import note_written

_BITS = 32
_EVENTS_MAX = 100_000
_RANKS_SHOWN = 8
_NAMES_SHOWN = 4

# An action, and the names that it applied to.
Event = tuple[str, ...]
_END: Event = ("did nothing more",)


class CollectiveOrder:
    """Record of the gathers and reductions of this rank since the last comparison.

    Args:
        model: The outermost module of `fully_shard`.
        group: Data-parallel ranks.
        device: Device of this rank.
        level: `zero` of the configuration, for messages.
        events_max: Events to remember by name.

    Attributes:
        check: Raises at the end of a backward pass of a plain loop whose gradients are not right.
        before_gather: Called before each gather.
        watch_gather: Called with the name of a module before all that.
        gathering: Module whose gather has begun and not returned; else "".
        joins: Notes about inputs of units that got zeros; of a pipeline the stage has its own.
        fills: Notes about parameters of units that got zeros.
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
        self._model = weakref.ref(model)
        self.check: Callable[[], None] = lambda: None
        self.before_gather: Callable[[], None] = lambda: None
        self.watch_gather: Callable[[str], None] = lambda _: None
        self.gathering = ""
        self.joins = self.fills = JoinNotes()
        torch_compat.watch_units(
            model,
            self._on_gather,
            self._on_reduce,
            _on_sparse,
            _on_second_gradient,
            changed=_on_changed_type,
            completed=self._on_completed,
            written=_on_written,
            kept=note_written,
            gathering=self._on_gathering,
        )

    @contextlib.contextmanager
    def compared_later(self) -> Iterator[None]:
        """Leave the comparison of events inside the context to the caller."""
        self._is_planned = True
        try:
            yield
        finally:
            self._is_planned = False

    def settle(self) -> None:
        """Compare events, and drop gradients that come from zeros alone; ranks call it together.

        Raises:
            RanksDisagreeError: Events of ranks differ, so gradients are wrong.
            ModelError: A plain loop has gradients from zeros alone.
        """
        missing, model = self.sum_and_compare(self.joins.count()), self._model()
        if missing and model is not None:
            self.joins.drop(model, self._group, self._device)  # type: ignore[arg-type]  # it is both
        else:
            self.joins.begin()

    def sum_and_compare(self, value: float) -> float:
        """Return the sum of `value` over the ranks; compare events on the way.

        Raises:
            RanksDisagreeError: Events of ranks differ, so gradients are wrong.
        """
        events, digest = self._events, self._digest
        # Cleared first, so that a refusal that the script catches does not repeat in later steps.
        self._events, self._digest = [], 0
        bits = [float(digest >> bit & 1) for bit in range(_BITS)]
        flat = torch.tensor([value, *bits], device=self._device)
        dist.all_reduce(flat, group=self._group)
        total, *counts = flat.tolist()
        if any(0 < count < self._group.size() for count in counts):
            # Beyond the limit names are gone: the digest at least shows that ranks differ later.
            is_full = len(events) == self._events_max
            last = f"did other things after {self._events_max} alike ({digest:08x})"
            self._refuse([*events, (last,)] if is_full else events)
        return float(total)

    def check_trains(self, loss: Tensor) -> None:
        """Refuse a loss whose backward pass would take no part in the reductions of other ranks.

        The other ranks already wait in a collective, so this rank raises alone.

        Raises:
            RanksDisagreeError: The loss depends on no parameter that is trained.
        """
        if self._group.size() > 1 and not loss.requires_grad:
            problem = f"the loss of rank {dist.get_rank()} depends on no parameter that is trained"
            raise self._refusal(problem)

    def _on_gathering(self, name: str) -> None:
        self.gathering = name or self._name
        self.watch_gather(self.gathering)
        self.before_gather()

    def _on_gather(self, name: str) -> None:
        self.gathering = ""
        self._add("gathered", name or self._name)

    def _on_completed(self, filled: Sequence[str], having: Sequence[str]) -> None:
        self.fills.filled.update(filled)
        self.fills.touched.update(having)

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
        self.check()
        # Every reduction of a backward pass asks for a comparison; the first one clears the events.
        if self._events:
            self.settle()

    def _refuse(self, events: list[Event]) -> None:
        """Raise an error that names the first difference, the same on all ranks."""
        of_ranks = messages.gather_all(events, list[Event], self._group, self._device)
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


def _on_changed_type(name: str) -> None:
    raise ModelError(
        f"{ROOT}.optimizer.zero: the forward changes the type of {name} or of its gradient, which "
        "ZeRO keeps",
        hint="convert the model before rt.shard, and an input in the forward instead",
    )


def _on_written(name: str) -> None:
    raise ModelError(
        f"{ROOT}.optimizer.zero: {name} was written while it is gathered in another type, whose "
        "rounding its shards would get",
        hint="write it between steps, or choose parallel.optimizer.dtype as that of the model",
    )


def _on_sparse(name: str) -> None:
    raise RanksDisagreeError(
        f"{ROOT}.optimizer.zero: {name} has a sparse gradient, and only a replicated table can",
        hint="pass sparse=False, or use nn.Embedding(sparse=True) with a threshold above its size",
    )


def _on_second_gradient() -> None:
    raise RanksDisagreeError(
        f"{ROOT}.optimizer.zero: gradients of gradients (create_graph=True) need "
        "replicated parameters",
        hint="choose zero 0",
    )


def _difference(ranks: Sequence[int], events: Sequence[Event]) -> str:
    """Describe the events of all ranks, with only the names that differ between them."""
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
