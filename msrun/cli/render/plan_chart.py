"""A picture of a plan: where its time goes, what memory it takes, and every tensor's placement.

It is SVG that nothing but this file makes, so the same plan always gives the same bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from xml.sax.saxutils import escape

from msrun.cli.output import escaped
from msrun.parallel.search.plan.plan import SavedPlan

_GIB = 2**30
# In pixels.  A letter is what a sans-serif one is wide on average.
_WIDTH, _MARGIN, _LABEL, _ROW, _LETTER = 960, 16, 300, 16, 6.0
_BAR = _WIDTH - 2 * _MARGIN - _LABEL - 130
_GAP = 8
_ROWS_MAX = 200
_LABEL_MAX = 50

# Okabe and Ito's colors, which people who see few colors can tell apart.
_COLORS = {
    "R": "#e8e8e8",
    "R, state cut": "#bdbdbd",
    "P": "#f0b48f",
    "S(0)": "#8fcdf0",
    "S(1)": "#7fceb8",
    "S(2)": "#f2cf7f",
    "S(3)": "#e4b9cf",
}
_OTHER = "#f5ec99"
_MEANINGS = {
    "S(0)": "cut by dim 0, and so on",
    "R": "whole",
    "R, state cut": "whole; gradient and optimizer state cut",
    "P": "a pending sum",
}

# The first number in a name, such as `3` in `blocks.3.up.weight`.
_BLOCK = re.compile(r"(\w+(?:\.\w+)*?)\.(\d{1,6})(?=[.:])")


def picture(plan: SavedPlan) -> str:
    """Return the SVG of `plan`."""
    page = _Page()
    mesh = " x ".join(f"{name} {size}" for name, size in plan.axes().items())
    recompute = ", recompute" if plan.recompute else ""
    gap = "" if plan.gap is None else f", at most {plan.gap:.2%} slower than the best on this mesh"
    page.title(plan.model)
    page.line(
        f"{plan.world} ranks ({plan.topology}) as {mesh}; batch {plan.batch} in "
        f"{plan.microbatches} micro-batches{recompute}"
    )
    page.title(f"step: {plan.seconds:.4g} s predicted{gap}")
    for name, seconds in plan.costs.items():
        share = seconds / plan.seconds
        page.bar(name, share / max(1.0, share), f"{seconds:.4g} s  {share:.1%}")
    _draw_memory(page, plan)
    _draw_rows(page, "parameters", plan, _rows(plan.params.items()))
    _draw_rows(page, "what operators make", plan, _rows(_made(plan)))
    _draw_legend(page)
    return page.text()


def _draw_memory(page: _Page, plan: SavedPlan) -> None:
    """Draw what each kind of stage takes, against what a rank has."""
    of = "" if plan.limit is None else f" of {plan.limit / _GIB:.3g} GiB that it has"
    page.title(f"memory of a rank: {plan.memory / _GIB:.3g} GiB{of}")
    most = max(plan.memory, plan.limit or 0.0)
    limit = plan.limit / most if plan.limit else None
    for name, nbytes in (plan.stage_memory or {"each": plan.memory}).items():
        label = f"{name} stage" if plan.stages > 1 else "each rank"
        page.bar(label, nbytes / most, f"{nbytes / _GIB:.3g} GiB", limit)


def _draw_rows(page: _Page, heading: str, plan: SavedPlan, rows: Sequence[_Row]) -> None:
    """Draw how things lie: a row for each, a panel for each axis, in it the blocks in order."""
    if not rows:
        return
    page.title(f"{heading}, blocks from left to right")
    width = (_WIDTH - 2 * _MARGIN - _LABEL - _GAP * (len(plan.mesh) - 1)) / len(plan.mesh)
    panels = [_MARGIN + _LABEL + at * (width + _GAP) for at in range(len(plan.mesh))]
    names = [f"{name} {size}" for name, size in plan.mesh.items()]
    page.words(zip(panels, names, strict=True))
    for row in rows[:_ROWS_MAX]:
        strips = [
            (x + at * width / row.blocks, count * width / row.blocks, text)
            for axis, x in enumerate(panels)
            for at, count, text in row.runs(axis)
        ]
        page.strip(row.label, strips)
    if len(rows) > _ROWS_MAX:
        page.line(f"and {len(rows) - _ROWS_MAX} more rows, which `--json` has")


def _draw_legend(page: _Page) -> None:
    page.title("placements")
    for text, meaning in _MEANINGS.items():
        page.strip(meaning, [(_MARGIN + _LABEL, 90.0, text)])


@dataclass(frozen=True, slots=True)
class _Row:
    """The placements of one parameter or output in each block of the model.

    Args:
        label: Its name, with `*` for the number of the block.
        blocks: Number of blocks; 1 for a tensor outside of all blocks.
        placed: Block -> its placement on each axis.
    """

    label: str
    blocks: int
    placed: dict[int, list[str]]

    def runs(self, axis: int) -> Iterator[tuple[int, int, str]]:
        """Yield first block, number of blocks and placement of each run of equal blocks."""
        placement = {block: placed[axis] for block, placed in self.placed.items()}
        for text, run in groupby(range(self.blocks), placement.get):
            blocks = list(run)
            if text is not None:
                yield blocks[0], len(blocks), text


def _rows(named: Iterable[tuple[str, list[str]]]) -> list[_Row]:
    """Return one row for all names that differ only in the number of the block."""
    placed_by_block: dict[tuple[str, str], dict[int, list[str]]] = {}
    blocks: Counter[str] = Counter()
    for name, placed in named:
        block = _BLOCK.match(name)
        group, number = (block[1], int(block[2])) if block else ("", 0)
        form = f"{group}.*{name[block.end() :]}" if block else name
        blocks[group] = max(blocks[group], number + 1)
        placed_by_block.setdefault((group, form), {})[number] = placed
    return [_Row(form, blocks[group], placed) for (group, form), placed in placed_by_block.items()]


def _made(plan: SavedPlan) -> Iterator[tuple[str, list[str]]]:
    """Yield each operator's name, made of its module, and the placement of its first output."""
    seen: Counter[tuple[str, str]] = Counter()
    for operator in plan.operators.values():
        seen[operator.module, operator.op] += 1
        again = seen[operator.module, operator.op]
        name = f"{operator.module}: {operator.op}" if operator.module else operator.op
        if operator.outs:
            yield (f"{name} {again}" if again > 1 else name), operator.outs[0]


class _Page:
    """Puts one thing below the other."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._y = _MARGIN

    def text(self) -> str:
        """Return the whole picture."""
        height = self._y + _MARGIN
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}">',
            "<style>text {font: 11px sans-serif} .title {font: bold 12px sans-serif}</style>",
            '<rect width="100%" height="100%" fill="white"/>',
        )
        return "\n".join([*head, *self._parts, "</svg>", ""])

    def title(self, text: str) -> None:
        """Add a heading, with room above it."""
        self._y += _GAP * bool(self._parts)
        self._write(_MARGIN, text, 'class="title"')
        self._y += _ROW + 4

    def line(self, text: str) -> None:
        """Add a line of text."""
        self.words([(_MARGIN, text)])

    def words(self, texts: Iterable[tuple[float, str]]) -> None:
        """Add a line with texts at some places."""
        for x, text in texts:
            self._write(x, text)
        self._y += _ROW

    def bar(self, label: str, share: float, text: str, limit: float | None = None) -> None:
        """Add a bar of a share of the width, and a line at a limit."""
        left = _MARGIN + _LABEL
        self._write(_MARGIN, label[:_LABEL_MAX])
        self._rect(left, share * _BAR, "#0072b2")
        x = share * _BAR
        if limit is not None:
            x = max(x, limit * _BAR)
            place = f'x1="{left + limit * _BAR:.1f}" x2="{left + limit * _BAR:.1f}"'
            ends = f'y1="{self._y - 1}" y2="{self._y + _ROW - 1}"'
            self._parts.append(f'<line {place} {ends} stroke="#d55e00" stroke-width="2"/>')
        self._write(left + x + 6, text)
        self._y += _ROW

    def strip(self, label: str, runs: Iterable[tuple[float, float, str]]) -> None:
        """Add a row of placements: left end, width and text of each."""
        short = label if len(label) <= _LABEL_MAX else f"...{label[3 - _LABEL_MAX :]}"
        self._write(_MARGIN, short)
        for x, width, text in runs:
            self._rect(x, width, _COLORS.get(text, _OTHER))
            if width > _LETTER * len(text):
                self._write(x + 3, text)
        self._y += _ROW

    def _rect(self, x: float, width: float, color: str) -> None:
        place = f'x="{x:.1f}" y="{self._y}" width="{width:.1f}" height="{_ROW - 2}"'
        self._parts.append(f'<rect {place} fill="{color}"/>')

    def _write(self, x: float, text: str, more: str = "") -> None:
        place = f'x="{x:.1f}" y="{self._y + _ROW - 5}"'
        self._parts.append(f"<text {' '.join(filter(None, (place, more)))}>{_xml(text)}</text>")


def _xml(text: str) -> str:
    return escape(escaped(text))
