"""Where the first rows of a table come from that no rank has: drawn numbers, or a checkpoint.

Plain data that ranks send to servers in the plan of a session.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from msrun.parallel.servers.recipe import Value


class Drawn(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Rows that a generator gives, as `torch.nn.init` does for a whole table.

    Args:
        kind: Of numbers.
        value: Standard deviation of `normal`; bound of `uniform`, which is also its negative one;
            or the constant.
        seed: Of the generator.
        padding: Rows that are zero.
    """

    kind: Literal["normal", "uniform", "constant"]
    value: float
    seed: int
    padding: list[int] = []


class Stored(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Rows of a checkpoint, with the optimizer's state of them.

    Args:
        folder: The checkpoint.
        weight: Name of the table there.
        state: Key of the optimizer's state -> the name there of its tensor, one row for each of
            the table's.
        numbers: Key -> type and value of state that is one number in a tensor.
        values: Key -> other state.
    """

    folder: str
    weight: str
    state: dict[str, str]
    numbers: dict[str, tuple[str, float]]
    values: dict[str, Value]


class TableSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table that servers make.

    Args:
        shape: Its sizes.
        dtype: Name of its type in torch.
        rows: Its first rows.
    """

    shape: list[int]
    dtype: str
    rows: Drawn | Stored
