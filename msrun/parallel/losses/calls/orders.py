"""Samples in another order: shuffled, or sorted by a value that they have.

What a model computes from samples in another order is right for each of them, and is put back or
added up afterwards.  It mixes samples where they meet those in the first order, as in mixup
(`0.7 * x + 0.3 * x[torch.randperm(len(x))]`), and where a part of them is taken, such as the worst.
"""

from __future__ import annotations

from typing import Any

from msrun.parallel.losses.calls.marks import Mark, Mixture, Outcome, TorchCall
from msrun.parallel.losses.torch_calls import tensors_of

# They return indices by which scripts order samples, or draw others.
ORDERING = frozenset(["randperm", "argsort", "sort", "multinomial", "randint", "randint_like"])
_INDEXING = frozenset(["__getitem__", "index_select", "gather", "take_along_dim"])
_NAME = "samples in another order"


def with_order(call: TorchCall, outcome: Outcome) -> Outcome:
    """Return `outcome` with the order of samples, or what this makes of it."""
    if call.orders and call.name in _INDEXING:
        return _ordered(call)
    orders = {mark.order for mark in call.marks.values() if mark.dim is not None}
    if not any(orders):
        return outcome
    if isinstance(outcome, Mark) and outcome.dim is not None:
        return outcome._replace(order=orders.pop()) if len(orders) == 1 else _mixture(call)
    return _mixture(call) if outcome is None and _takes_part(call) else outcome


def _ordered(call: TorchCall) -> Outcome:
    """Return what is known of samples that indices order; of those ordered before, nothing."""
    mark = call.mark(call.x)
    if mark is None or mark.dim != 0 or mark.order:
        return None
    given = call.value(1, "dim")
    if call.name == "__getitem__":
        index = given[0] if isinstance(given, tuple) and given else given
    elif call.name == "take_along_dim":
        index, given = given, call.value(2, "dim")
    else:
        index = call.value(2, "index")
    is_first = call.name == "__getitem__" or given == 0
    order = call.orders.get(id(index)) if is_first else None
    return mark._replace(order=order) if order else None


def _takes_part(call: TorchCall) -> bool:
    index: Any = call.args[1:]
    return call.name in ("__getitem__", "narrow") and not tensors_of((*index, *index[:1]))


def _mixture(call: TorchCall) -> Mixture:
    return Mixture(_NAME + call.line())
