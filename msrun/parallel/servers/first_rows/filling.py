"""How a server makes its slices of tables that no rank has, in blocks.

A slice has every n-th row of its table, so a server goes through whole tables, block by block, and
keeps its rows of each block: it needs memory for what it keeps, and for one block.  No row travels,
and neither the number of servers nor who makes what changes a value.

*Drawn rows are to the bit those of `torch.nn.init` on the whole table.*  Generators of the CPU give
one number after the other, so blocks in order give the same ones.  There is one rule: torch draws
normal numbers by 16, and for sizes that 16 does not divide it draws the last 16 again.  So all
blocks have a multiple of 16 elements, and the last one has not less than 16.

Drawing takes as long as in one process.  The server's loop does one block at a time, so that it
hears what else there is.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from msrun.cluster.servers.ownership import Slice
from msrun.parallel.checkpoint import schema
from msrun.parallel.checkpoint.checksums import DataFiles
from msrun.parallel.checkpoint.tensors import TORCH_DTYPES, read_part
from msrun.parallel.servers.first_rows.sources import Drawn, Stored, TableSource
from msrun.parallel.servers.rows import SliceState

# As many elements torch draws at once.
_GROUP = 16
BLOCK_BYTES = 8 << 20
# The weight among the tensors of a table; others are keys of the optimizer's state.
_WEIGHT = ""


def blocks_of(
    rows: int, row_elements: int, row_bytes: int, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[int, int]]:
    """Yield the first row of each block of about so many bytes, and the one after its last."""
    count = max(block_bytes // max(row_bytes, 1) // _GROUP, 1) * _GROUP
    begin = 0
    while begin < rows:
        end = min(begin + count, rows)
        if (rows - end) * row_elements < _GROUP:
            end = rows
        yield begin, end
        begin = end


def read_rows(files: DataFiles, stored: schema.StoredTensor, begin: int, end: int) -> Tensor:
    """Return rows of a tensor of a checkpoint, in whatever chunks it is.

    Raises:
        DamagedCheckpointError: As `read_part`.
    """
    found = torch.empty([end - begin, *stored.shape[1:]], dtype=TORCH_DTYPES[stored.dtype])
    for chunk in stored.chunks:
        top = chunk.at[0]
        first, last = max(begin, top), min(end, top + chunk.shape[0])
        if first < last:
            where = [first - top, *[0] * (len(chunk.shape) - 1)]
            part = read_part(files, stored.dtype, chunk, where, [last - first, *chunk.shape[1:]])
            columns = zip(chunk.at[1:], chunk.shape[1:], strict=True)
            found[(slice(first - begin, last - begin), *(slice(a, a + n) for a, n in columns))] = (
                part
            )
    return found


class _Rows(ABC):
    """Has the rows of one table, in order."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys = tuple(keys)
        self.of_all: dict[str, object] = {}

    @abstractmethod
    def block(self, key: str, begin: int, end: int, /) -> Tensor:
        """Return some rows of the weight, or of state."""


class _DrawnRows(_Rows):
    def __init__(self, source: TableSource, drawn: Drawn) -> None:
        super().__init__([_WEIGHT])
        self._source, self._drawn = source, drawn
        self._generator = torch.Generator().manual_seed(drawn.seed)

    def block(self, _key: str, begin: int, end: int) -> Tensor:
        drawn, draw = self._drawn, self._generator
        rows = torch.empty(
            [end - begin, *self._source.shape[1:]], dtype=getattr(torch, self._source.dtype)
        )
        match drawn.kind:
            case "normal":
                rows.normal_(0.0, drawn.value, generator=draw)
            case "uniform":
                rows.uniform_(-drawn.value, drawn.value, generator=draw)
            case "constant":
                rows.fill_(drawn.value)
        for row in drawn.padding:
            if begin <= row < end:
                rows[row - begin] = 0
        return rows


class _StoredRows(_Rows):
    def __init__(self, source: TableSource, stored: Stored, stack: contextlib.ExitStack) -> None:
        super().__init__([_WEIGHT, *stored.state])
        folder = Path(stored.folder)
        manifest = schema.read_manifest(folder)
        self._index = schema.read_index(folder, manifest)
        self._files = stack.enter_context(DataFiles(folder, manifest.checksums))
        self._dtype = getattr(torch, source.dtype)
        self._names = {_WEIGHT: stored.weight, **stored.state}
        self.of_all |= stored.values
        for key, (dtype, value) in stored.numbers.items():
            self.of_all[key] = torch.tensor(value, dtype=getattr(torch, dtype))

    def block(self, key: str, begin: int, end: int) -> Tensor:
        found = read_rows(self._files, self._index.tensors[self._names[key]], begin, end)
        self._files.settle()
        return found if key else found.to(self._dtype)


class Filling:
    """Makes slices.

    Args:
        sources: Table -> what its rows are.
        counts: Table -> into how many slices it is cut.
        wanted: The slices to make.
        block_bytes: About the size of a block.

    Attributes:
        slices: What is made, complete once `advance` says so.
    """

    def __init__(
        self,
        sources: Mapping[str, TableSource],
        counts: Mapping[str, int],
        wanted: Collection[Slice],
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.slices: dict[Slice, SliceState] = {}
        self._sources, self._counts, self._block_bytes = sources, counts, block_bytes
        self._wanted = {
            table: [piece.index for piece in wanted if piece.table == table] for table in sources
        }
        self._blocks = self._fill()

    def advance(self) -> bool:
        """Make one block more; return whether all is there.

        Raises:
            CheckpointError: A checkpoint cannot be read.
        """
        return next(self._blocks, None) is None

    def close(self) -> None:
        """Give up."""
        self._blocks.close()

    @property
    def nbytes(self) -> int:
        """Bytes of rows of slices that are made, without state."""
        return sum(each.rows.nbytes for each in self.slices.values())

    def _fill(self) -> Generator[bool]:
        for table, source in self._sources.items():
            if self._wanted[table]:
                with contextlib.ExitStack() as stack:
                    rows: _Rows = (
                        _DrawnRows(source, source.rows)
                        if isinstance(source.rows, Drawn)
                        else _StoredRows(source, source.rows, stack)
                    )
                    yield from self._fill_table(table, source, rows)

    def _fill_table(self, table: str, source: TableSource, rows: _Rows) -> Generator[bool]:
        count, total = self._counts[table], source.shape[0]
        row_elements = math.prod(source.shape[1:])
        row_bytes = row_elements * getattr(torch, source.dtype).itemsize
        found: dict[int, dict[str, Tensor]] = {index: {} for index in self._wanted[table]}
        for key in rows.keys:
            for begin, end in blocks_of(total, row_elements, row_bytes, self._block_bytes):
                values = rows.block(key, begin, end)
                for index, tensors in found.items():
                    if key not in tensors:
                        length = -(-(total - index) // count)
                        tensors[key] = values.new_empty((length, *source.shape[1:]))
                    first = (index - begin) % count
                    mine = values[first::count]
                    place = (begin + first) // count
                    tensors[key][place : place + len(mine)] = mine
                yield True
        for index, tensors in found.items():
            of_all = {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in rows.of_all.items()
            }
            weight = tensors.pop(_WEIGHT)
            self.slices[Slice(table, index)] = SliceState(weight, {**tensors, **of_all})
