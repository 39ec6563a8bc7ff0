"""Maxima over samples, sorts of samples and running sums: of a part of the batch they are others.

A maximum is a `Mark` with a statistic that is an extreme.  Any function of it is a `Mixture`, but
for those that hand it on and for a difference: `x - x.max()` keeps exponentials finite, and their
quotients are the same without it.  Maxima of integers crop padding, and are not followed.
"""

from __future__ import annotations

from dataclasses import replace

from msrun.parallel.losses.calls.marks import Mark, Mixture, Outcome, Rule, TorchCall
from msrun.parallel.losses.mixing import dims_of
from msrun.parallel.losses.torch_calls import over_samples

_SHIFTING = frozenset(["sub", "subtract", "__sub__", "__rsub__", "__isub__", "rsub"])
_HANDING_ON = frozenset(
    ["to", "float", "double", "half", "bfloat16", "type", "type_as", "clone", "contiguous"]
)
_HANDING_ON |= {"detach", "cpu", "cuda", "view", "reshape", "flatten", "unsqueeze", "squeeze"}
_HANDING_ON |= {"expand", "expand_as", "broadcast_to", "__getitem__", "view_as", "reshape_as"}


def extreme(call: TorchCall) -> Mark:
    """Return what is known of a maximum over samples."""
    return Mark(None, over_samples(call.name) + call.line(), is_extreme=True)


def of_extremes(call: TorchCall, rule: Rule) -> Outcome:
    """Return what is known of the result of `call`, of which `rule` knows what others leave."""
    found = next((mark for mark in call.marks.values() if mark.is_extreme), None)
    if found and call.name in _SHIFTING:
        marks = {key: mark for key, mark in call.marks.items() if not mark.is_extreme}
        return rule(replace(call, marks=marks))
    if found and call.name not in _HANDING_ON:
        return Mixture(found.statistic)
    outcome = rule(call)
    return outcome._replace(is_extreme=True) if found and isinstance(outcome, Mark) else outcome


def along(call: TorchCall) -> Outcome:
    """Sorts and running sums: each value depends on others of its dim."""
    mark = call.mark(call.x)
    if mark is None or mark.dim is None or not call.result.is_floating_point():
        return None
    default = 0 if call.name == "msort" else call.x.dim() - 1
    dims = dims_of(call.name, call.args, call.kwargs, call.x.dim()) or {default}
    if mark.dim in dims:
        return call.mixture(call.name)
    return Mixture(mark.statistic) if mark.statistic else mark
