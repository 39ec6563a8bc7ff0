"""Rows for experts of a list on their way to other ranks and back, with their gradients.

Each rank has calls of experts, each with rows of one tensor or more.  `exchange` sorts them by
expert and tells every rank how many rows of each of its experts come, whether an expert was called
at all, and which kinds of tensors come: a rank without a call of its own learns there what to take
part in.  That is one all-to-all of small numbers, and the only wait of the host.  Then rows travel
by one all-to-all for each tensor of a call, the experts compute, and their results travel back.

If no rank has a call, no rank exchanges anything further.  A rank without rows takes part with
tensors of 0 rows, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from msrun.errors import ModelError
from msrun.parallel.autocast.casts import as_factor
from msrun.parallel.experts.travel import travelling
from msrun.parallel.torch_compat import (
    functional_collective,
    without_functions,
)

INPUTS_MAX = 3
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


class ExpertCall(NamedTuple):
    """One call of an expert.

    Args:
        expert: Its number.
        rows: Its tensors, as (rows, width) each.
    """

    expert: int
    rows: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """What all exchanges of a list have in common.

    Args:
        owned: Experts of each rank.
        share: Factor of the gradients that experts get.
        is_kept: Whether recomputation keeps what has come, which the model then must not write.
    """

    owned: Sequence[range]
    share: float
    is_kept: bool = field(kw_only=True)


class _Kind(NamedTuple):
    """What all tensors at one place of a call have in common."""

    width: int
    dtype: int
    is_trained: int


class _Way(NamedTuple):
    """How many rows go to each rank and come from it, and those of each own expert by rank."""

    sent: list[int]
    received: list[int]
    counts: list[list[int]]
    is_called: list[bool]
    kinds: list[_Kind]


class OwnExperts(Protocol):
    """The experts of this rank."""

    device: torch.device

    def is_trained(self) -> bool:
        """Return whether some expert of the list is, on any rank."""

    def empty(self, kinds: Sequence[tuple[int, torch.dtype]]) -> Tensor:
        """Return a result without rows, for tensors of these widths and types."""

    def compute(self, place: int, rows: tuple[Tensor, ...]) -> Tensor:
        """Return what the expert at `place` among those of this rank makes of `rows`."""


def exchange(  # noqa: PLR0917 - each is of another kind
    name: str,
    settings: ExchangeSettings,
    calls: Sequence[ExpertCall],
    group: dist.ProcessGroup,
    experts: OwnExperts,
    beside: Callable[[], None],
) -> tuple[list[Tensor], Tensor | None]:
    """Return the result of each call, and what joins the backward pass of a rank without one.

    Args:
        name: Of the list, for messages.
        settings: Of the list.
        calls: Of this rank.
        group: Ranks that have the experts.
        experts: Of this rank.
        beside: Runs while rows travel to the experts.
    """
    device, share = experts.device, settings.share
    way = _tell(name, calls, settings.owned, group, device)
    if not way.kinds:
        beside()
        return [], None
    order = sorted(range(len(calls)), key=lambda at: calls[at].expert)
    given = [
        _joined([calls[at].rows[place] for at in order], kind, device)
        for place, kind in enumerate(way.kinds)
    ]
    sent = map(_narrow, given)
    wait = travelling((group, way.sent, way.received), 1 / share, *sent)
    beside()
    arrived = wait()
    arrived = tuple(x.to(old.dtype) for x, old in zip(arrived, given, strict=True))
    output = _computed(arrived, way, experts)
    is_joined = torch.is_grad_enabled() and (
        experts.is_trained() or any(kind.is_trained for kind in way.kinds)
    )
    if is_joined and not (output.requires_grad and len(output)):
        output = output + _nothing(arrived, output)
    (back,) = travelling((group, way.received, way.sent), share, _narrow(output))()
    back = (back.clone() if settings.is_kept else back).to(output.dtype)
    if is_joined:
        back = _SavedAfter.apply(back)  # type: ignore[no-untyped-call]
    sizes = [len(calls[at].rows[0]) for at in order]
    # The model may write into a result, which autograd forbids of several views of one tensor.
    parts = torch.unsafe_split_with_sizes(back, sizes) if order else ()
    results = dict(zip(order, parts, strict=True))
    return [results[at] for at in range(len(calls))], back if is_joined else None


def _tell(
    name: str,
    calls: Sequence[ExpertCall],
    owned: Sequence[range],
    group: dist.ProcessGroup,
    device: torch.device,
) -> _Way:
    """Tell the other ranks what goes to their experts, and return what comes here."""
    rows = [0] * sum(map(len, owned))  # and one more each, if it was called
    for call in calls:
        rows[call.expert] = max(rows[call.expert], 1) + len(call.rows[0])
    kinds = _kinds(name, calls)
    own = len(owned[group.rank()])
    told = [number for part in owned for number in (*rows[part.start : part.stop], *kinds)]
    numbers = torch.tensor(told).to(device)
    sizes = [len(part) + len(kinds) for part in owned]
    here = [own + len(kinds)] * group.size()
    answers = functional_collective("all_to_all_single", numbers, here, sizes, group=group)
    by_rank = answers.view(group.size(), -1).tolist()
    said = [numbers[:own] for numbers in by_rank]
    return _Way(
        sent=[sum(max(n - 1, 0) for n in rows[part.start : part.stop]) for part in owned],
        received=[sum(max(n - 1, 0) for n in numbers) for numbers in said],
        counts=[[max(n - 1, 0) for n in numbers] for numbers in said],
        is_called=[any(numbers[at] for numbers in said) for at in range(own)],
        kinds=_agreed(name, [numbers[own:] for numbers in by_rank]),
    )


def _kinds(name: str, calls: Sequence[ExpertCall]) -> list[int]:
    """Return the kinds of the tensors of `calls` as numbers, 0 where there is none."""
    found = {
        tuple((x.size(1), _DTYPES.index(x.dtype)) for x in call.rows)
        for call in calls
        if all(x.dtype in _DTYPES for x in call.rows)
    }
    if len(found) > 1 or (calls and not found):
        raise ModelError(
            f"{name} of style experts over ep: calls of its experts have tensors of several kinds, "
            "and one exchange takes one"
        )
    numbers = [0] * (INPUTS_MAX * len(_Kind._fields))
    if found:
        is_grad = torch.is_grad_enabled()
        for place, (width, dtype) in enumerate(found.pop()):
            trained = is_grad and any(call.rows[place].requires_grad for call in calls)
            first = place * len(_Kind._fields)
            numbers[first : first + len(_Kind._fields)] = width, dtype + 1, int(trained)
    return numbers


def _agreed(name: str, said: Sequence[Sequence[int]]) -> list[_Kind]:
    """Return the kinds of all ranks; none if no rank has a call."""
    size = len(_Kind._fields)
    found = []
    for first in range(0, INPUTS_MAX * size, size):
        kinds = [_Kind(*numbers[first : first + size]) for numbers in said]
        alike = {kind[:2] for kind in kinds if kind.dtype}
        if len(alike) > 1:
            raise ModelError(
                f"{name} of style experts over ep: ranks call its experts with tensors of several "
                "kinds, and one exchange takes one"
            )
        for width, dtype in alike:
            found.append(_Kind(width, dtype - 1, max(kind.is_trained for kind in kinds)))
    return found


def _joined(parts: Sequence[Tensor], kind: _Kind, device: torch.device) -> Tensor:
    """Return the rows of all calls, which have a gradient where another rank's have one."""
    rows = (
        torch.cat(list(parts))
        if parts
        else torch.empty(0, kind.width, dtype=_DTYPES[kind.dtype], device=device)
    )
    return rows.detach().requires_grad_() if kind.is_trained and not rows.requires_grad else rows


def _computed(arrived: Sequence[Tensor], way: _Way, experts: OwnExperts) -> Tensor:
    """Return the results of this rank's experts, in the order in which rows have come."""
    sizes = [count for counts in way.counts for count in counts]
    pieces = [x.split(sizes) for x in arrived]
    own, ranks = len(way.is_called), len(way.counts)
    empty = experts.empty([(kind.width, _DTYPES[kind.dtype]) for kind in way.kinds])
    found: list[Tensor] = [empty] * len(sizes)
    for place in range(own):
        if not way.is_called[place]:
            continue
        at = [rank * own + place for rank in range(ranks)]
        rows = tuple(torch.cat([of[n] for n in at]) for of in pieces)
        results = experts.compute(place, rows).split([sizes[n] for n in at])
        for n, result in zip(at, results, strict=True):
            found[n] = result
    return torch.cat(found)


def _narrow(x: Tensor) -> Tensor:
    """Return `x` in the type in which autocast multiplies it; one column is no hidden state."""
    return as_factor(x) if x.size(1) > 1 else x


def _nothing(arrived: Sequence[Tensor], output: Tensor) -> Tensor:
    """Return a 0 that depends on what has arrived, so that the backward pass passes here."""
    with without_functions():  # what looks at the script's sums, for its loss, would find this one
        joined = [x.reshape(-1)[:0].sum() for x in arrived if x.requires_grad]
        zero = sum(joined, torch.zeros((), device=output.device, requires_grad=True))
        return zero.to(output.dtype)


class _SavedAfter(Function):
    """Saves a tensor after the exchanges, and asks for it before their gradients travel.

    A recomputation ends with the last tensor that it has to save, and no rank may end before an
    exchange, such as one that has no call.  It begins when a saved tensor is asked for, and no rank
    may exchange gradients before.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _ = ctx.saved_tensors
        return gradient
