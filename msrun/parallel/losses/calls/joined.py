"""A batch several times over: views of all samples that `cat` puts behind each other."""

from __future__ import annotations

from math import prod

from msrun.parallel.losses.calls.marks import Mark, Outcome, TorchCall

_PARTS = frozenset(["chunk", "split", "tensor_split", "narrow", "__getitem__"])
_VIEWS = frozenset(["view", "reshape", "unflatten", "view_as", "reshape_as"])


def joined(call: TorchCall) -> Outcome:
    """`cat` and `stack`."""
    parts = call.value(0, "tensors")
    if not isinstance(parts, tuple | list):
        return None
    marks = [call.mark(part) for part in parts]
    known = [mark for mark in marks if mark]
    dims = {mark.dim for mark in known}
    at = call.value(1, "dim", call.kwargs.get("axis", 0)) % call.result.dim()
    if len(dims) > 1 or not known:
        return None
    dim, statistic = dims.pop(), next((mark.statistic for mark in known if mark.statistic), "")
    if dim is None:
        return Mark(None, statistic) if len(known) == len(parts) else None
    if call.name == "stack":
        return Mark(dim + (at <= dim), statistic)
    if at != dim:
        return Mark(dim, statistic)
    is_sure = len(known) == len(parts) and not any(mark.is_guess for mark in known)
    has_all = call.samples > 0 and all(part.shape[dim] % call.samples == 0 for part in parts)
    return Mark(dim, statistic, is_joined=True) if is_sure and has_all else None


def is_joined(call: TorchCall, mark: Mark) -> bool:
    """Return whether a result with `mark` has samples several times over, as arguments had."""
    if mark.dim is None or call.result.shape[mark.dim] <= call.samples:
        return False
    return mark.is_joined or any(each.is_joined for each in call.marks.values())


def one_of_joined(call: TorchCall) -> Mark | None:
    """Return what is known of a part or a view with each sample once, of what was joined."""
    if call.name not in _PARTS | _VIEWS:
        return None
    mark, shape = call.mark(call.x), call.result.shape
    if mark is None or mark.dim is None or not mark.is_joined:
        return None
    inside = prod(call.x.shape[mark.dim + 1 :])
    dims = [at for at, n in enumerate(shape) if n == call.samples]
    found = [at for at in dims if prod(shape[at + 1 :]) == inside]
    return Mark(found[0], mark.statistic) if found else None
