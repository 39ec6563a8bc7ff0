"""Views: operators that only rename the dims of a tensor, with no work, memory or choice.

They are folded away: a consumer of a view reads its base, with dims translated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from msrun.parallel.search.graph.program import Step
from msrun.parallel.search.graph.rules import Site


class DimMap(msgspec.Struct, frozen=True):
    """Which dim of a view is which of its base.

    Args:
        dims: Dim of the view -> dim of the base, and the number that its shards must divide.
    """

    dims: dict[int, tuple[int, int]]

    def after(self, earlier: DimMap) -> DimMap:
        """Return the map of a view of a view."""
        dims = {}
        for dim, (middle, limit) in self.dims.items():
            if middle in earlier.dims:
                source, other = earlier.dims[middle]
                dims[dim] = (source, math.gcd(limit, other))
        return DimMap(dims)


def dim_map(site: Site) -> DimMap | None:
    """Return the dims of the view at `site`; None for an operator that is not a view."""
    maker = _MAKERS.get(site.packet)
    # A consumer of a view sends its gradient to the base.
    is_cut = site.step.is_detached
    if maker is None or is_cut or len(site.ins) != 1 or len(site.outs) != 1:
        return None
    return maker(site)


def is_reshape(step: Step) -> bool:
    """Return whether a view is a reshape, which runs with the sizes of a shard too."""
    return _MAKERS.get(step.packet) is _reshaped


def _reshaped(site: Site) -> DimMap:
    """Return the first dims of groups of equal product: these may be sharded in any reshape."""
    before, after = site.ins[0].shape, site.out.shape
    dims = {}
    for sources, made in _groups(before, after):
        first = next((dim for dim in sources if before[dim] > 1), None)
        view = next((dim for dim in made if after[dim] > 1), None)
        if first is not None and view is not None:
            dims[view] = (first, math.gcd(before[first], after[view]))
    return DimMap(dims)


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return runs of dims of both shapes with the same product, as short as can be."""
    if 0 in before or 0 in after:
        return []
    groups = []
    i = j = 0
    while i < len(before) and j < len(after):
        left, right = [i], [j]
        a, b = before[i], after[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, left, i = a * before[i], [*left, i], i + 1
            else:
                b, right, j = b * after[j], [*right, j], j + 1
        groups.append((left, right))
    return groups


def _permuted(site: Site) -> DimMap:
    shape = site.ins[0].shape
    ndim = len(shape)
    order = list(range(ndim))
    if site.packet == "permute":
        order = [int(dim) % ndim for dim in site.attr("dims")]
    elif ndim > 1:
        a = int(site.attr("dim0", site.attr("axis0", -2))) % ndim
        b = int(site.attr("dim1", site.attr("axis1", -1))) % ndim
        order[a], order[b] = order[b], order[a]
    return DimMap({dim: (source, shape[source]) for dim, source in enumerate(order)})


def _same(site: Site) -> DimMap:
    return DimMap({dim: (dim, size) for dim, size in enumerate(site.out.shape)})


_MAKERS: dict[str, Callable[[Site], DimMap]] = {
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"),
        _reshaped,
    ),
    **dict.fromkeys(
        ("permute", "transpose", "t", "swapaxes", "swapdims", "numpy_T", "mT", "adjoint"),
        _permuted,
    ),
    **dict.fromkeys(("contiguous", "alias"), _same),
}
