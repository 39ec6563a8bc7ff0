"""Layouts of high-dimension tensor parallelism: matrix products on grids of ranks.

A product of x (rows, in) and a weight (out, in) adds up over `in`.  Here no rank has a whole row:

- 2d, axes [x, y].  A rank has columns [x, y] of the input and the block [y, x] of the weight.  It
  gathers the input over y, multiplies, and adds up over x in a reduce-scatter, which leaves
  columns [y, x] of the output.  So the next product has the axes [y, x].
- 2.5d, axes [d, x, y].  The samples are sharded over d besides; each part of d has all weights.
- 3d, axes [x, y, z].  A rank has rows [z, y] and columns x of the input, and the block [y, [x, z]]
  of the weight.  It gathers the rows over y and the weight over z, and the sums over x are
  scattered to rows [z, x]; columns are y.  The next product has the axes [y, x, z].

What a module between two products has, such as a norm, is sharded as the output of the first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from msrun.errors import ConfigError
from msrun.parallel.notation.dims import ModuleDims, shown_dims
from msrun.parallel.settings.grids import GRID_AXES
from msrun.parallel.settings.plan_rules import UNSHARDED_DIMS, Dim, Dims

_MATRIX_DIMS = 2
_LINEAR, _CONV1D = "Linear", "Conv1D"
MATRICES = (_LINEAR, _CONV1D)


class Product(msgspec.Struct, frozen=True, kw_only=True):
    """How a product on a grid is computed, once its input is gathered.

    Args:
        summed: Axis over which the results of ranks are added up.
        columns: Axis that shards the columns of these results.
        scattered_dim: Dim of the output that the sums are scattered to, 0 or -1.
        gathered: Axis over which the weight is gathered; None if the block of a rank does.
        is_transposed: Whether the weight is (in, out).
    """

    summed: str
    columns: str
    scattered_dim: int
    gathered: str | None = None
    is_transposed: bool = False


class GridDims(msgspec.Struct, frozen=True, kw_only=True):
    """How one module on a grid is sharded, by axis names.

    Args:
        params: Of each parameter that modules of its class can have.
        inputs: Of the first input, gathered if the module is a product.
        out: Of the output.
        product: Of a product; None for a module between products.
    """

    params: dict[str, Dims]
    inputs: Dims
    out: Dims
    product: Product | None = None


def grid_dims(style: str, axes: Sequence[str], base: str, params: Sequence[str]) -> GridDims:
    """Return how a module is sharded on a grid.

    Args:
        style: `2d`, `2.5d` or `3d`.
        axes: The axes of the rule, as many as the style takes.
        base: `Linear` or `Conv1D`; any other is a module between products.
        params: Names of its parameters, which have one dim unless it is a product.
    """
    if style == "3d":
        return _of_cube(axes, base, params)
    depth: Dim = axes[0] if style == "2.5d" else None
    x, y = axes[-2:]
    if base not in MATRICES:
        whole = _tensor(depth, [x, y])
        return GridDims(params={name: [[x, y]] for name in params}, inputs=whole, out=whole)
    return GridDims(
        params=_matrix([y, x] if base == _LINEAR else [x, y], [[y, x]]),
        inputs=_tensor(depth, x),
        out=_tensor(depth, [y, x]),
        product=Product(summed=x, columns=y, scattered_dim=-1, is_transposed=base == _CONV1D),
    )


def _of_cube(axes: Sequence[str], base: str, params: Sequence[str]) -> GridDims:
    x, y, z = axes
    if base not in MATRICES:
        whole = _tensor([z, y], x)
        return GridDims(params={name: [x] for name in params}, inputs=whole, out=whole)
    return GridDims(
        params=_matrix([y, [x, z]] if base == _LINEAR else [[x, z], y], [y]),
        inputs=_tensor(z, x),
        out=_tensor([z, x], y),
        product=Product(
            summed=x, columns=y, scattered_dim=0, gathered=z, is_transposed=base == _CONV1D
        ),
    )


def _tensor(first: Dim, last: Dim) -> Dims:
    """Return the dims of an activation whose first and last dim are sharded."""
    return [UNSHARDED_DIMS, last] if first is None else [first, UNSHARDED_DIMS, last]


def _matrix(weight: Dims, bias: Dims) -> dict[str, Dims]:
    return {"weight": weight, "bias": bias}


def grid_of_layout(dims: ModuleDims, base: str, key: str) -> tuple[str, list[str]]:
    """Return the style and the axes of MindSpore's `enable_nd_tp`, from its layouts.

    Args:
        dims: Of the module, as the layouts say.
        base: `Linear` or `Conv1D`.
        key: Path of the layouts in the configuration, for messages.

    Raises:
        ConfigError: They are those of no grid.
    """
    given = dims.params.get("weight", []), _ends(dims.inputs or [])
    weight = given[0] if base != _CONV1D else given[0][::-1]
    for style, count in GRID_AXES.items():
        for axes in itertools.permutations(_named(weight, given[1]), count):
            found = grid_dims(style, axes, base, ["weight", "bias"])
            stored = grid_dims(style, axes, "", [])
            is_so = weight == found.params["weight"][:: -1 if base == _CONV1D else 1]
            is_out = dims.out is None or _ends(dims.out) == _ends(found.out)
            if is_so and given[1] == _ends(stored.out) and is_out:
                return style, list(axes)
    raise ConfigError(
        f"{key}.enable_nd_tp: weight {shown_dims(given[0])} and in {shown_dims(dims.inputs or [])} "
        "are no grid",
        hint="such as weight [y, x] and in [None, [x, y]], or weight [y, [x, z]] and in "
        "[[z, y], x]; `out` is [None, [y, x]] and [[z, x], y], or left out",
    )


def _ends(dims: Dims) -> Dims:
    """Return the first and the last entry of `dims`, if those between are not sharded."""
    inner = [dim for dim in dims[1:-1] if dim not in (None, UNSHARDED_DIMS)]
    first = None if not dims or dims[0] == UNSHARDED_DIMS else dims[0]
    return list(dims) if inner or len(dims) < _MATRIX_DIMS else [first, dims[-1]]


def _named(*tensors: Dims) -> list[str]:
    """Return the axes in `tensors`, each once."""
    entries = [dim for dims in tensors for dim in dims if dim is not None]
    axes = [axis for dim in entries for axis in ([dim] if isinstance(dim, str) else dim)]
    return list(dict.fromkeys(axis for axis in axes if axis != UNSHARDED_DIMS))
