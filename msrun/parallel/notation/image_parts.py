"""Which rows of an image a rank has, and which it gets from whom: arithmetic without torch.

A row is an index along a divided dim: of height, width or depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

# First row, and the one behind the last.
Span = tuple[int, int]
Spans = tuple[Span, ...]


class RowPiece(NamedTuple):
    """Consecutive rows that one rank has.

    Args:
        source: Index of that rank on its axis.
        first: First row.
        end: The one behind the last.
    """

    source: int
    first: int
    end: int


@lru_cache(maxsize=1024)
def spans(size: int, ranks: int) -> Spans:
    """Return the rows of each rank: parts that differ by one at most, the larger ones first.

    Fewer rows than ranks are not divided: each rank has all.

    Example: 7 rows on 2 ranks -> ((0, 4), (4, 7)).
    """
    if size < ranks:
        return ((0, size),) * ranks
    least, extra = divmod(size, ranks)
    firsts = [rank * least + min(rank, extra) for rank in range(ranks + 1)]
    return tuple(pairwise(firsts))


@lru_cache(maxsize=1024)
def pieces(have: Spans, needs: tuple[Spans, ...]) -> tuple[tuple[RowPiece, ...], ...]:
    """Return for each rank where the rows come from that it needs, in their order.

    Args:
        have: Rows of each rank, which together are all.
        needs: Rows that each rank needs, in spans that may overlap.
    """
    return tuple(
        tuple(piece for span in needed for piece in _cover(have, rank, span))
        for rank, needed in enumerate(needs)
    )


def _cover(have: Spans, rank: int, span: Span) -> list[RowPiece]:
    """Return pieces that make up `span`; the rows of `rank` are its own, where it has them."""
    found = []
    row, end = span
    own_first, own_end = have[rank]
    while row < end:
        if own_first <= row < own_end:
            source, stop = rank, min(end, own_end)
        else:
            source = next(i for i, (first, last) in enumerate(have) if first <= row < last)
            stop = min(end, have[source][1])
            if row < own_first:
                stop = min(stop, own_first)
        found.append(RowPiece(source, row, stop))
        row = stop
    return found


def scaled(rows: Spans, factor: int) -> Spans:
    """Return `rows` where each row became `factor` rows."""
    return tuple((first * factor, end * factor) for first, end in rows)


def one_each(rows: Sequence[Span]) -> tuple[Spans, ...]:
    """Return needs of one span a rank."""
    return tuple((span,) for span in rows)


def window_rows(out: Span, *, kernel: int, stride: int, padding: int, dilation: int) -> Span:
    """Return the rows that windows read for the rows `out` of their output.

    They may begin before row 0 and end behind the last, in the padding.
    """
    first, end = out
    return first * stride - padding, (end - 1) * stride - padding + dilation * (kernel - 1) + 1
