"""Rows under headings, as aligned text or as rich tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msrun.cli.output import answer, escaped


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSection:
    """Rows under a heading.

    Args:
        heading: What they are.
        columns: Names of the columns; empty writes none.
        rows: Cells, as many a row as there are columns, where these have names.
    """

    heading: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...]


def show(sections: Sequence[TextSection], *, is_terminal: bool) -> None:
    """Print `found`, with colours and lines for a person at a terminal."""
    if is_terminal:
        _show_rich(sections)
    else:
        answer("\n\n".join(_text(section) for section in sections))


def _text(section: TextSection) -> str:
    rows = [tuple(map(escaped, row)) for row in (section.columns, *section.rows) if row]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join([f"{section.heading}:", *(f"  {line}" for line in lines)])


def _show_rich(sections: Sequence[TextSection]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for section in sections:
        # As a title of the table it would be folded to the table's width.
        console.print(Text(section.heading, style="bold"))
        table = Table(show_header=bool(section.columns), box=None, pad_edge=False)
        for name in section.columns or ("",):
            table.add_column(name, style="", header_style="dim", overflow="fold")
        for row in section.rows:
            table.add_row(*(Text(escaped(cell)) for cell in row))
        console.print(table)
        console.print()
