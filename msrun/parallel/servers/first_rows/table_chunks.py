"""A table on servers as a checkpoint takes it: in blocks of rows, one after the other.

Each rank writes every so-manieth block, and has one at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from msrun.parallel.checkpoint.packed import TensorChunks

_BLOCK_BYTES_MIN = 8 << 20
# The index of a checkpoint has an entry for each.
_BLOCKS_MAX = 4096


class TableChunks(TensorChunks):
    """The blocks of one tensor that a rank writes.

    Args:
        size: Shape of the tensor.
        dtype: Its type.
        rank: This rank.
        ranks: How many divide the blocks.
        fetch: Returns the rows from one to before another.
    """

    def __init__(
        self,
        size: torch.Size,
        dtype: torch.dtype,
        rank: int,
        ranks: int,
        fetch: Callable[[int, int], Tensor],
    ) -> None:
        super().__init__(size, dtype, {})
        self._fetch = fetch
        row_bytes = max(size[1:].numel() * dtype.itemsize, 1)
        total = size[0] * row_bytes
        self._rows = max(max(_BLOCK_BYTES_MIN, total // _BLOCKS_MAX) // row_bytes, 1)
        self._begins = range(rank * self._rows, size[0], ranks * self._rows)

    def part(self, index: MetadataIndex) -> Tensor:
        """Return the block at the offset of `index`."""
        begin = (index.offset or (0,))[0]
        return self._fetch(begin, min(begin + self._rows, self.size()[0]))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        size = self.size()
        return [
            ChunkStorageMetadata(
                offsets=torch.Size((begin, *[0] * (len(size) - 1))),
                sizes=torch.Size((min(self._rows, size[0] - begin), *size[1:])),
            )
            for begin in self._begins
        ]
