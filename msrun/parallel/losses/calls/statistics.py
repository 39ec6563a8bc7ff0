"""Means, sums and other statistics over dims of a tensor."""

from __future__ import annotations

from typing import Literal

from msrun.parallel.losses.calls.extremes import extreme
from msrun.parallel.losses.calls.marks import Mark, Mixture, Outcome, TorchCall
from msrun.parallel.losses.mixing import dims_of
from msrun.parallel.losses.torch_calls import over_samples

Kind = Literal["mean", "sum", "extreme", "opaque"]


def reduced(call: TorchCall, kind: Kind) -> Outcome:
    """Return what a reduction leaves of real numbers."""
    mark = call.mark(call.x)
    if mark is None or not call.result.is_floating_point():
        return None
    count = call.x.dim()
    dims = dims_of(call.name, call.args, call.kwargs, count) or set(range(count))
    if mark.is_chosen and 0 in dims and call.result.dim():
        is_sum = kind == "sum"
        return (
            _statistic(call)
            if is_sum
            else Mixture(f"the {call.name} of chosen samples{call.line()}")
        )
    if mark.dim is None or mark.dim not in dims:
        return _of_each(call, kind, mark, dims)
    if kind in ("opaque", "extreme"):
        return call.mixture(call.name) if kind == "opaque" else extreme(call)
    if not mark.statistic:
        return _statistic(call)
    return Mark(None, mark.statistic) if call.result.dim() else None


def _statistic(call: TorchCall) -> Mark:
    return Mark(None, over_samples(call.name) + call.line())


def _of_each(call: TorchCall, kind: Kind, mark: Mark, dims: set[int]) -> Outcome:
    """Return what is left of a tensor that has its samples in none of the `dims`."""
    if mark.statistic and kind in ("opaque", "extreme"):
        return Mixture(mark.statistic) if call.result.dim() else None
    keeps = call.result.dim() == call.x.dim()
    before = 0 if keeps or mark.dim is None else sum(dim < mark.dim for dim in dims)
    return Mark(None if mark.dim is None else mark.dim - before, mark.statistic)
