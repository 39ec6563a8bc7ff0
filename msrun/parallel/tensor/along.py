"""Functions along some dims, run on each rank's shard where other dims are sharded.

A cumulative sum reads one dim, a pooling the last two: no index of another dim meets a second one.
So a rank computes them on its shard, if no dim that they read is sharded.  torch has no form for
most of them, or gathers.

Each function here returns None where shards alone do not do; the guard then computes it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from msrun.parallel.tensor.shard_functions import ShardFunction, sharded_dims, wrapped

# Reads the dims that a call names: function -> (position of the dims, their keyword, default).
# A default of None reads all of them.
_NAMED: dict[str, tuple[int, str, int | None]] = {
    "all": (1, "dim", None),
    "amax": (1, "dim", None),
    "amin": (1, "dim", None),
    "any": (1, "dim", None),
    "argmax": (1, "dim", None),
    "argmin": (1, "dim", None),
    "argsort": (1, "dim", -1),
    "count_nonzero": (1, "dim", None),
    "cummax": (1, "dim", None),
    "cummin": (1, "dim", None),
    "cumprod": (1, "dim", None),
    "cumsum": (1, "dim", None),
    "diff": (2, "dim", -1),
    "kthvalue": (2, "dim", -1),
    "log_softmax": (1, "dim", None),
    "logcumsumexp": (1, "dim", None),
    "logsumexp": (1, "dim", None),
    "max": (1, "dim", None),
    "median": (1, "dim", None),
    "min": (1, "dim", None),
    "narrow": (1, "dim", None),
    "norm": (2, "dim", None),
    "prod": (1, "dim", None),
    "repeat_interleave": (2, "dim", None),
    "roll": (2, "dims", None),
    "select": (1, "dim", None),
    "sort": (1, "dim", -1),
    "std": (1, "dim", None),
    "topk": (2, "dim", -1),
    "unfold": (1, "dimension", None),
    "var": (1, "dim", None),
}
_NAMED_IN_NN: dict[Callable[..., Any], tuple[int, str, int | None]] = {
    functional.glu: (1, "dim", -1),
    functional.log_softmax: (1, "dim", None),
    functional.normalize: (2, "dim", 1),
    functional.softmin: (1, "dim", None),
    torch.linalg.vector_norm: (2, "dim", None),
}
# Reads the last dims, so many.
_LAST: dict[Callable[..., Any], int] = {
    functional.adaptive_avg_pool1d: 1,
    functional.adaptive_avg_pool2d: 2,
    functional.adaptive_avg_pool3d: 3,
    functional.adaptive_max_pool1d: 1,
    functional.adaptive_max_pool2d: 2,
    functional.adaptive_max_pool3d: 3,
    functional.avg_pool1d: 1,
    functional.avg_pool2d: 2,
    functional.avg_pool3d: 3,
    functional.lp_pool1d: 1,
    functional.lp_pool2d: 2,
    functional.max_pool1d: 1,
    functional.max_pool1d_with_indices: 1,
    functional.max_pool2d: 2,
    functional.max_pool2d_with_indices: 2,
    functional.max_pool3d: 3,
    functional.max_pool3d_with_indices: 3,
    functional.pixel_shuffle: 3,
    functional.pixel_unshuffle: 3,
    torch.tril: 2,
    torch.triu: 2,
    Tensor.tril: 2,
    Tensor.triu: 2,
    torch.view_as_complex: 1,
    torch.view_as_real: 0,
}


def _dims(value: Any, ndim: int) -> set[int] | None:
    """Return the dims that `value`, an argument of a call, names; None if it names none."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    if not values or any(isinstance(dim, bool) or not isinstance(dim, int) for dim in values):
        return None
    return {dim % ndim for dim in values}


def _along_named(
    func: ShardFunction,
    where: tuple[int, str, int | None],
    x: DTensor,
    *args: Any,
    **options: Any,
) -> Any:
    position, keyword, default = where
    named = args[position - 1] if len(args) >= position else options.get(keyword, default)
    dims = _dims(named, x.dim())
    return None if dims is None else _run(func, dims, x, args, options)


def _along_last(func: ShardFunction, count: int, x: DTensor, *args: Any, **options: Any) -> Any:
    return _run(func, set(range(x.dim() - count, x.dim())), x, args, options)


def _pad(x: DTensor, pad: Any, *args: Any, **options: Any) -> Any:
    if not isinstance(pad, (tuple, list)):
        return None
    dims = {x.dim() - 1 - at // 2 for at, size in enumerate(pad) if size}
    return _run(functional.pad, dims, x, (pad, *args), options)


def _interpolate(x: DTensor, *args: Any, **options: Any) -> Any:
    # The first two dims are samples and channels.
    return _run(functional.interpolate, set(range(2, x.dim())), x, args, options)


def _flip(func: ShardFunction, x: DTensor, *dims: Any, **options: Any) -> Any:
    given = dims[0] if len(dims) == 1 else dims or options.get("dims")
    read = _dims(given, x.dim())
    return None if read is None else _run(func, read, x, dims, options)


def _stack(tensors: Any, dim: int = 0) -> Any:
    if not all(isinstance(x, DTensor) for x in tensors):
        return None
    like = next((x for x in tensors if sharded_dims(x)), tensors[0])
    if any(x.shape != like.shape for x in tensors):
        return None
    placed = [x if sharded_dims(x) else x.redistribute(placements=like.placements) for x in tensors]
    if any(x.placements != like.placements for x in placed):
        return None
    at = dim % (like.dim() + 1)
    moved = {other: other + (other >= at) for other in range(like.dim())}
    return wrapped(like, torch.stack([x.to_local() for x in placed], at), moved)


def _run(
    func: ShardFunction,
    read: set[int],
    x: DTensor,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """Run `func` on the shard of `x`, if it has `read` whole and nothing else is sharded."""
    others = (*args, *options.values())
    if options.get("out") is not None or any(isinstance(value, DTensor) for value in others):
        return None
    if read & sharded_dims(x):
        return None
    result = func(x.to_local(), *args, **options)
    if isinstance(result, Tensor):
        return _placed(x, result, read)
    return type(result)([_placed(x, part, read) for part in result])


def _placed(x: DTensor, local: Tensor, read: set[int]) -> DTensor:
    """Return a result of the dims of `x`, without those that were reduced."""
    # A window or a number more stands after the other dims.
    if local.dim() >= x.dim():
        return wrapped(x, local)
    kept = [dim for dim in range(x.dim()) if dim not in read]
    return wrapped(x, local, {dim: at for at, dim in enumerate(kept)})


def _functions() -> Iterator[tuple[ShardFunction, ShardFunction]]:
    for name, where in _NAMED.items():
        for owner in (torch, Tensor):
            func = getattr(owner, name, None)
            if func is not None:
                yield func, partial(_along_named, func, where)
    for func, where in _NAMED_IN_NN.items():
        yield func, partial(_along_named, func, where)
    for func, count in _LAST.items():
        yield func, partial(_along_last, func, count)
    for func in (torch.flip, Tensor.flip):
        yield func, partial(_flip, func)
    yield functional.pad, _pad
    yield functional.interpolate, _interpolate
    yield torch.stack, _stack


FUNCTIONS: dict[ShardFunction, ShardFunction] = dict(_functions())
