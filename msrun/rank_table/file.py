"""Rank tables as files: read with one sentence on what is wrong, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from msrun.bounded_file import read_bounded
from msrun.errors import UsageError
from msrun.units import shown
from ranktable import (
    RankTable,
    RankTableError,
    TableStatus,
    merge_tables,
    parse_table,
    render_table,
)


def read_text(path: str) -> bytes:
    """Return what is in the file.

    Raises:
        UsageError: The file cannot be read, or is larger than any table.
    """
    return read_bounded(path, f"rank table {shown(path)}", mebibytes=64)


def read_table(path: str, *, is_part: bool = False) -> RankTable:
    """Return the completed rank table in a file.

    Args:
        path: The file.
        is_part: Ranks need not start at 0.

    Raises:
        UsageError: The file cannot be read or holds no sound table; the message names the
            first thing that is wrong by its JSON path.
    """
    try:
        table = parse_table(read_text(path), is_part=is_part)
    except RankTableError as error:
        first, more = error.problems[0], len(error.problems) - 1
        hint = f"`msrun ranktable check` tells {more} more" if more else None
        raise UsageError(f"{shown(path)}: {first}", hint=hint) from None
    if table.status is not TableStatus.COMPLETED:
        hint = "wait until its writer has set status to completed"
        raise UsageError(f"{shown(path)}: status: the table is still being written", hint=hint)
    return table


def merge_files(paths: Sequence[str]) -> RankTable:
    """Return one table with the servers of all files, in order, and ranks from 0.

    Raises:
        UsageError: A file holds no sound table, or they do not fit together.
    """
    parts = [read_table(path, is_part=True) for path in paths]
    try:
        return merge_tables(parts)
    except RankTableError as error:
        named = str(error.problems[0])
        for i, path in enumerate(paths):
            named = named.replace(f"parts[{i}]", shown(path))
        raise UsageError(f"the tables do not fit together: {named}") from None


def write_table(table: RankTable, path: str) -> None:
    """Write the table so that a reader finds the old file or the new one, never half of it.

    Raises:
        UsageError: The file cannot be written.
    """
    directory = Path(path).parent
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=directory, prefix=".msrun-", delete=False
        ) as file:
            try:
                file.write(render_table(table))
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise UsageError(f"{shown(path)} cannot be written: {error.strerror}") from None
