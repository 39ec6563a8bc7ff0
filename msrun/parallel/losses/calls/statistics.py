"""Means, sums and other statistics over dims of a tensor."""

from __future__ import annotations

from typing import Literal

from msrun.parallel.losses.calls.extremes import extreme
from msrun.parallel.losses.calls.marks import Mark, Mixture, Outcome, TorchCall
from msrun.parallel.losses.calls.torch_losses import reduction_of
from msrun.parallel.losses.mixing import dims_of
from msrun.parallel.losses.torch_calls import is_own_call, over_samples
from msrun.parallel.torch_compat import is_fake, unwatched

_BY_CLASS = frozenset(["cross_entropy", "nll_loss"])
Kind = Literal["mean", "sum", "extreme", "opaque"]


def reduced(call: TorchCall, kind: Kind) -> Outcome:
    """Return what a reduction leaves of real numbers."""
    mark = call.mark(call.x)
    if mark is None or not call.result.is_floating_point():
        return None
    count = call.x.dim()
    dims = dims_of(call.name, call.args, call.kwargs, count) or set(range(count))
    if mark.is_chosen and 0 in dims:
        if kind == "sum":
            return _statistic(call)
        return of_statistic(call, f"the {call.name} of chosen samples{call.line()}")
    if mark.dim is None or mark.dim not in dims:
        return _of_each(call, kind, mark, dims)
    if kind in ("opaque", "extreme"):
        return call.mixture(call.name) if kind == "opaque" else extreme(call)
    return Mark(None, mark.statistic) if mark.statistic else _statistic(call)


def of_statistic(call: TorchCall, statistic: str) -> Mixture:
    """Return that `call` computes what is not linear in a statistic."""
    return Mixture(statistic, of_number=not call.result.dim())


def of_targets(call: TorchCall, mark: Mark) -> Outcome:
    """Return what is known of a loss of samples, one number: a sum, or a mean over targets."""
    how = reduction_of(dict(call.kwargs))
    if how == "sum" and not is_own_call(call.name, call.kwargs):
        return _statistic(call)
    if how != "mean":
        return None
    if mark.is_chosen:
        return Mixture(f"the {call.name} of chosen samples{call.line()}", of_number=True)
    target = call.value(1, "target")
    counts = call.name in _BY_CLASS and not is_fake(target) and not target.is_floating_point()
    if not counts:
        return None
    with unwatched():  # a watch of sequences would take it for a decision of the model
        ignored = bool((target == call.kwargs.get("ignore_index", -100)).any())
    if not ignored and call.kwargs.get("weight") is None:
        return None
    return Mixture(f"the mean over targets that count{call.line()}", of_number=True)


def _statistic(call: TorchCall) -> Mark:
    return Mark(None, over_samples(call.name) + call.line())


def _of_each(call: TorchCall, kind: Kind, mark: Mark, dims: set[int]) -> Outcome:
    """Return what is left of a tensor that has its samples in none of the `dims`."""
    if mark.statistic and kind in ("opaque", "extreme"):
        return of_statistic(call, mark.statistic)
    keeps = call.result.dim() == call.x.dim()
    before = 0 if keeps or mark.dim is None else sum(dim < mark.dim for dim in dims)
    return Mark(None if mark.dim is None else mark.dim - before, mark.statistic)
