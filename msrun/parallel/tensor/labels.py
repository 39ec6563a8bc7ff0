"""Functions whose dims have letters, as in `torch.einsum`, run on each rank's shard.

A letter stands for one index that operands and output share.  Over a mesh axis that shards one
letter, a rank has a range of that index: of the operands that have the letter it takes the same
range, the others it takes whole, and their gradients are then summands.  If the output has the
letter, ranks have parts of it; if not, the index is summed over, and ranks have summands.

Elementwise functions are the case without a sum: a dim has the letter of its place from the right.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from msrun.parallel.tensor.placements import on_mesh
from msrun.parallel.tensor.shard_functions import (
    ShardFunction,
    is_even,
    is_packed,
    sharded_dims,
    wrapped,
)

# Compute each element for itself, from the elements at its place in all tensors.
_ELEMENTWISE = """
    atan2 ceil clamp clamp_max clamp_min cosh eq exp2 expm1 floor fmod ge gt isfinite isinf isnan
    le lerp log10 log2 logaddexp logical_and logical_not logical_or lt maximum minimum nan_to_num
    ne remainder round sign sinh tan trunc xlogy
    __and__ __eq__ __floordiv__ __ge__ __gt__ __invert__ __le__ __lt__ __mod__ __ne__ __or__
    __rdiv__ __xor__
"""
# For softplus and elu torch's layout of a gradient has the strides of the input, where the gradient
# has those that it came with: it cannot be viewed then.
_ELEMENTWISE_IN_NN = (
    functional.celu,
    functional.elu,
    functional.hardsigmoid,
    functional.hardswish,
    functional.hardtanh,
    functional.logsigmoid,
    functional.mish,
    functional.relu6,
    functional.selu,
    functional.softplus,
    functional.softsign,
    functional.tanhshrink,
    torch.celu,
    torch.selu,
)
# The same value at each place, whatever the tensor holds.
_FILLED = ("full_like", "ones_like", "zeros_like")


def _einsum(equation: Any, *operands: Any) -> Any:
    given = operands[0] if len(operands) == 1 and not isinstance(operands[0], Tensor) else operands
    if not isinstance(equation, str) or not all(isinstance(x, DTensor) for x in given):
        return None
    terms, out = _terms(equation, [x.dim() for x in given])
    call = f"{','.join(terms)}->{out}"
    return _run(lambda *shards: torch.einsum(call, *shards), list(given), terms, out)


def _terms(equation: str, ndims: Sequence[int]) -> tuple[list[str], str]:
    """Return the letters of each operand and of the output, with some for the dims of `...`."""
    written, arrow, out = equation.replace(" ", "").partition("->")
    terms = written.split(",")
    free = [letter for letter in string.ascii_letters if letter not in equation]
    leading = [ndim - len(term.replace("...", "")) for term, ndim in zip(terms, ndims, strict=True)]
    longest = max((n for n, term in zip(leading, terms, strict=True) if "..." in term), default=0)
    rest = "".join(free[:longest])
    if not arrow:
        counts = Counter("".join(terms).replace(".", ""))
        out = "..." + "".join(sorted(letter for letter, count in counts.items() if count == 1))
    of_operands = [
        term.replace("...", rest[longest - n :]) for n, term in zip(leading, terms, strict=True)
    ]
    return of_operands, out.replace("...", rest)


def _elementwise(func: ShardFunction, *args: Any, **options: Any) -> Any:
    tensors = [value for value in (*args, *options.values()) if isinstance(value, DTensor)]
    if options.get("out") is not None:
        return None
    first = tensors[0]
    if all(x.placements == first.placements and x.shape == first.shape for x in tensors):
        return wrapped(first, func(*map(_local, args), **_local_options(options)))
    ndim = max(x.dim() for x in tensors)
    letters = string.ascii_letters[:ndim]

    def run(*shards: Tensor) -> Tensor:
        left = iter(shards)
        own = [next(left) if isinstance(value, DTensor) else value for value in args]
        named = {
            key: next(left) if isinstance(value, DTensor) else value
            for key, value in options.items()
        }
        result: Tensor = func(*own, **named)
        return result

    return _run(run, tensors, [letters[ndim - x.dim() :] for x in tensors], letters)


def _filled(func: ShardFunction, x: DTensor, *args: Any, **options: Any) -> Any:
    if set(options) - {"dtype", "fill_value"}:
        return None
    return wrapped(x, func(x.to_local().detach(), *args, **options))


def _gather(func: ShardFunction, x: Any, dim: Any, index: Any, *src: Any, **options: Any) -> Any:
    """Run `gather` or `scatter` along a dim that nobody divides."""
    tensors = [value for value in (x, index, *src) if isinstance(value, DTensor)]
    if options or not isinstance(dim, int) or any(value.dim() != x.dim() for value in tensors):
        return None
    along = dim % x.dim()
    letters = string.ascii_letters[: x.dim()]
    # Where an index is shorter than what it selects from, shards do not match.
    divided = {at for value in tensors for at in sharded_dims(value)}
    if along in divided or any(len({v.shape[at] for v in tensors}) > 1 for at in divided):
        return None
    # Each tensor has a length of its own along the dim.
    terms = [letters[:along] + letter + letters[along + 1 :] for letter in "XYZ"[: len(tensors)]]

    def run(*shards: Tensor) -> Tensor:
        numbers = [value for value in src if not isinstance(value, DTensor)]
        result: Tensor = func(shards[0], dim, *shards[1:], *numbers)
        return result

    out = terms[1] if func in (torch.gather, Tensor.gather) else terms[0]
    return _run(run, tensors, terms, out)


def _take_along(func: ShardFunction, x: Any, indices: Any, dim: Any = None) -> Any:
    del func
    gather: ShardFunction = torch.gather
    return None if dim is None else _gather(gather, x, dim, indices)


def _index_select(func: ShardFunction, x: Any, dim: Any, index: Any) -> Any:
    if not isinstance(dim, int) or not isinstance(index, DTensor) or sharded_dims(index):
        return None
    if dim % x.dim() in sharded_dims(x):
        return None
    return wrapped(x, func(x.to_local(), dim, index.to_local()))


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _local_options(options: dict[str, Any]) -> dict[str, Any]:
    return {key: _local(value) for key, value in options.items()}


def _run(func: ShardFunction, tensors: list[DTensor], terms: Sequence[str], out: str) -> Any:
    """Run `func` on shards of `tensors`; None if they are sharded over different letters.

    Args:
        func: Gets the shard of each tensor.
        tensors: The operands.
        terms: Letter of each dim of each operand.
        out: Letter of each dim of the output.
    """
    if any(map(is_packed, tensors)):
        return None
    mesh = tensors[0].device_mesh
    sizes: dict[str, int] = {}
    for x, term in zip(tensors, terms, strict=True):
        for letter, size in zip(term, x.shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    wanted: list[list[Placement]] = [[] for _ in tensors]
    gradients: list[list[Placement]] = [[] for _ in tensors]
    placed: list[Placement] = []
    for axis in range(mesh.ndim):
        letters = {
            term[_dim(x.placements[axis])]
            for x, term in zip(tensors, terms, strict=True)
            if not x.placements[axis].is_replicate()
        }
        if len(letters) > 1 or any(term.count(letter) > 1 for letter in letters for term in terms):
            return None  # two letters over one axis, or a diagonal
        letter = next(iter(letters), "")
        for at, (x, term) in enumerate(zip(tensors, terms, strict=True)):
            is_cut = (
                bool(letter) and letter in term and x.shape[term.index(letter)] == sizes[letter]
            )
            part: Placement = Shard(term.index(letter)) if is_cut else Replicate()
            wanted[at].append(part)
            gradients[at].append(part if is_cut or not letter else Partial())
        if not letter:
            placed.append(Replicate())
        else:
            placed.append(Shard(out.index(letter)) if letter in out else Partial())
    cut = [x.redistribute(mesh, want) for x, want in zip(tensors, wanted, strict=True)]
    if not all(map(is_even, cut)):
        return None
    shards = [x.to_local(grad_placements=grad) for x, grad in zip(cut, gradients, strict=True)]
    return summed(func(*shards), tensors[0], placed)


def summed(local: Tensor, like: DTensor, placed: Sequence[Placement]) -> DTensor:
    """Return the tensor of which `local` is this rank's part, or its summand over some axes."""
    mesh = like.device_mesh
    if not any(p.is_partial() for p in placed):
        return on_mesh(local, mesh, placed)
    # `on_mesh` takes no summands: they are rows of one tensor, which are added.
    rows = [_row(p) for p in placed]
    total: DTensor = on_mesh(local.unsqueeze(0), mesh, rows).sum(0)  # type: ignore[assignment]
    return total


def _row(placement: Placement) -> Placement:
    if placement.is_partial():
        return Shard(0)
    return Shard(_dim(placement) + 1) if placement.is_shard() else placement


def _dim(placement: Placement) -> int:
    return int(placement.dim)  # type: ignore[attr-defined]


def _functions() -> dict[ShardFunction, ShardFunction]:
    found: dict[ShardFunction, ShardFunction] = {
        torch.einsum: _einsum,
    }
    for name in _ELEMENTWISE.split():
        for owner in (torch, Tensor):
            if hasattr(owner, name):
                func = getattr(owner, name)
                found[func] = partial(_elementwise, func)
    for func in _ELEMENTWISE_IN_NN:
        found[func] = partial(_elementwise, func)
    for name in _FILLED:
        func = getattr(torch, name)
        found[func] = partial(_filled, func)
    by_name: dict[str, ShardFunction] = {
        "gather": _gather,
        "scatter": _gather,
        "scatter_add": _gather,
    }
    by_name |= {"take_along_dim": _take_along, "index_select": _index_select}
    for name, run in by_name.items():
        for owner in (torch, Tensor):
            func = getattr(owner, name)
            found[func] = partial(run, func)
    return found


FUNCTIONS: dict[ShardFunction, ShardFunction] = _functions()
