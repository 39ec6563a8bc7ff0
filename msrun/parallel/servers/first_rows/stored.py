"""Tables of a checkpoint that servers read themselves, as no rank has memory for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from msrun.parallel.checkpoint.checksums import DataFiles
from msrun.parallel.checkpoint.schema import Index, StoredTensor
from msrun.parallel.checkpoint.state import MODEL, OPTIMIZER
from msrun.parallel.checkpoint.targets import Target
from msrun.parallel.local import has_memory
from msrun.parallel.servers.first_rows.filling import blocks_of, read_rows
from msrun.parallel.servers.first_rows.sources import Stored, TableSource
from msrun.worker.beat import beat


def take_targets(
    name: str, folder: Path, index: Index, targets: dict[str, Target]
) -> TableSource | None:
    """Take the tensors of a table out of what a load fills; return what servers read instead.

    Args:
        name: Of the table in the models that are loaded.
        folder: The checkpoint.
        index: Its index.
        targets: Name -> what a load fills.
    """
    weight = targets.pop(MODEL + name, None)
    if weight is None:
        return None
    names = {id(stored): other for other, stored in index.tensors.items()}
    prefix = f"{OPTIMIZER}{name}."
    keys = {
        other.removeprefix(prefix): other
        for other, target in targets.items()
        if other.startswith(prefix) and not has_memory(target.tensor)
    }
    state = {key: names[id(targets.pop(other).stored)] for key, other in keys.items()}
    return TableSource(
        shape=list(weight.tensor.shape),
        dtype=str(weight.tensor.dtype).removeprefix("torch."),
        rows=Stored(
            folder=str(folder.absolute()),
            weight=names[id(weight.stored)],
            state=state,
            numbers={},
            values={},
        ),
    )


def completed(source: TableSource, state: Mapping[str, Any]) -> TableSource:
    """Return a source with the optimizer's state that is not of rows."""
    if not isinstance(source.rows, Stored):
        return source
    numbers: dict[str, tuple[str, float]] = {}
    values: dict[str, Any] = {}
    for key, value in state.items():
        if key in source.rows.state:
            continue
        if not isinstance(value, Tensor):
            values[key] = value
        elif has_memory(value) and value.numel() == 1:
            numbers[key] = (str(value.dtype).removeprefix("torch."), float(value))
    return replace(source, rows=replace(source.rows, numbers=numbers, values=values))


def verify(source: TableSource, files: DataFiles, index: Index, share: tuple[int, int]) -> None:
    """Read this rank's share of a table, so that damage is found before servers begin.

    Args:
        source: The table.
        files: The checkpoint's.
        index: Its index.
        share: This rank, and the number of ranks.

    Raises:
        DamagedCheckpointError: A part is damaged.
    """
    if not isinstance(source.rows, Stored):
        return
    rank, ranks = share
    for name in (source.rows.weight, *source.rows.state.values()):
        stored: StoredTensor = index.tensors[name]
        elements = torch.Size(stored.shape[1:]).numel()
        for number, (begin, end) in enumerate(blocks_of(stored.shape[0], elements, 8 * elements)):
            if number % ranks == rank:
                read_rows(files, stored, begin, end)
                beat()
    files.settle()
