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


class Window(NamedTuple):
    """Windows along one dim."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def length(self) -> int:
        """How many rows one spans."""
        return self.dilation * (self.kernel - 1) + 1

    def count(self, rows: int, *, ceil: bool = False) -> int:
        """Return how many there are over so many rows."""
        room = rows + 2 * self.padding - self.length
        found = (-(-room // self.stride) if ceil else room // self.stride) + 1
        # As in torch: the last window must begin inside of the image or the padding before it.
        if ceil and (found - 1) * self.stride >= rows + self.padding:
            found -= 1
        return found

    def rows(self, out: Span) -> Span:
        """Return the rows that windows read for the rows `out` of their output.

        They may begin before row 0 and end behind the last, in the padding.
        """
        first, end = out
        return (
            first * self.stride - self.padding,
            (end - 1) * self.stride - self.padding + self.length,
        )


class HaloWindows(NamedTuple):
    """Windows of a part that read rows of other ranks, on one side of the part.

    Args:
        first: The first row of the part's output that they give.
        rows: How many they give.
        kernel: First row of the kernel that reads rows of others.
        kernels: How many do.
        before: Zeros before the rows of others that these rows of the kernel read; negative if
            they do not read so many of the rows.
        after: And after them.
    """

    first: int
    rows: int
    kernel: int
    kernels: int
    before: int
    after: int


class Split(NamedTuple):
    """Windows over a part as windows over own rows, and over the few that are of other ranks.

    Args:
        padding: Zeros on both sides of own rows that their windows read.
        before: What rows before the part add; None if windows read none.
        after: And after it.
    """

    padding: int
    before: HaloWindows | None
    after: HaloWindows | None


# Of the rows of an output, those that read rows of others; with more, joining all takes less time.
_BORDER_SHARE = 1 / 8


@lru_cache(maxsize=1024)
def split(window: Window, rows: int, own: Span, out: Span) -> Split | None:
    """Return how windows are split between own rows and others; None if they are better not.

    Args:
        window: The windows.
        rows: Of the whole image.
        own: Those of this rank.
        out: The rows of the output that it computes.
    """
    kernel, stride, _, dilation = window
    first, end = window.rows(out)
    lead, over = own[0] - first, end - own[1]
    count, alone = out[1] - out[0], window._replace(padding=lead)
    if lead < 0 or alone.count(own[1] - own[0]) != count:
        return None
    before = after = None
    if max(first, 0) < own[0]:
        reading, kernels = -(-lead // stride), min(kernel, -(-lead // dilation))
        read = (reading - 1) * stride + (kernels - 1) * dilation + 1
        before = HaloWindows(0, reading, 0, kernels, max(-first, 0), read - lead)
    if min(end, rows) > own[1]:
        reading, kernels = -(-over // stride), min(kernel, -(-over // dilation))
        read = (reading - 1) * stride + (kernels - 1) * dilation + 1
        after = HaloWindows(
            count - reading, reading, kernel - kernels, kernels, read - over, max(end - rows, 0)
        )
    reading = sum(border.rows for border in (before, after) if border)
    return Split(lead, before, after) if reading <= _BORDER_SHARE * count else None
