"""Sharded tensors that torch's planners of checkpoints do not know, as they want them.

A fused projection holds query, key and value one after the other, and a rank has its shard of each
of them: several chunks of the whole tensor, where torch's planners know one.  Rows of a table that
ranks divide unevenly are a chunk that no DTensor has.  `TensorChunks` say which, by the methods
that these planners look for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from msrun.parallel.local import is_sharded
from msrun.parallel.uneven_rows.rows import RowRange, plain


class TensorChunks:
    """TensorChunks of one tensor that this rank has, as torch's planners ask for them.

    Args:
        size: Shape of the whole tensor.
        dtype: Its type.
        parts: Index of the first element of each chunk -> the chunk.
    """

    def __init__(
        self, size: torch.Size, dtype: torch.dtype, parts: Mapping[torch.Size, Tensor]
    ) -> None:
        self._size, self._dtype, self._parts = size, dtype, parts

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return self._size

    def part(self, index: MetadataIndex) -> Tensor:
        """Return the chunk at the offset of `index`; what is written to it, the tensor has."""
        return self._parts[torch.Size(index.offset or ())]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=at, sizes=piece.size())
            for at, piece in self._parts.items()
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self._dtype), size=self._size
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]


class PackedTensor(TensorChunks):
    """Stands for a tensor whose dim `dim` packs `parts` tensors.

    Args:
        tensor: The tensor, a DTensor.
        axis: The mesh axis that shards each of the parts.
    """

    def __init__(self, tensor: Any, axis: int) -> None:
        from torch.distributed.tensor import DTensor, Shard

        from msrun.parallel.torch_compat import parts_before

        placed = list(tensor.placements)
        self._dim = placed[axis].dim
        parts = parts_before(placed[axis]) or 1
        placed[axis] = Shard(self._dim)
        local = tensor.to_local()
        # The chunk that this rank would have if nothing was packed: right in all other dims.
        alike = DTensor.from_local(
            local,
            tensor.device_mesh,
            placed,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        (chunk,) = alike.__create_chunk_list__()
        rank = tensor.device_mesh.get_coordinate()[axis]
        length = local.shape[self._dim] // parts
        whole = tensor.shape[self._dim] // parts
        parts_at: dict[torch.Size, Tensor] = {}
        for part, piece in enumerate(local.split(length, self._dim) if length else ()):
            at = list(chunk.offsets)
            at[self._dim] = part * whole + rank * length
            parts_at[torch.Size(at)] = piece
        super().__init__(tensor.shape, tensor.dtype, parts_at)


class TableRows(TensorChunks):
    """Stands for a table of which this rank has some rows, or for state of its optimizer.

    Args:
        tensor: The rows.
        rows: Which they are.
    """

    def __init__(self, tensor: Tensor, rows: RowRange) -> None:
        part = plain(tensor)
        at = torch.Size((rows.first, *[0] * (part.dim() - 1)))
        super().__init__(rows.shape(part), part.dtype, {at: part} if rows.count else {})


def as_planned(tensors: Mapping[str, Tensor], rows: Mapping[str, RowRange]) -> dict[str, Any]:
    """Return `tensors` as torch's planners take them: some as `TensorChunks`.

    Args:
        tensors: By name.
        rows: Name -> rows of a table that a tensor has, where it has some.
    """
    return {name: _planned(tensor, rows.get(name)) for name, tensor in tensors.items()}


def _planned(tensor: Any, rows: RowRange | None) -> Any:
    if rows is not None:
        return TableRows(tensor, rows)
    if not is_sharded(tensor):
        return tensor
    from msrun.parallel.tensor.placements import packed_axis

    axis = packed_axis(tensor.placements)
    return tensor if axis is None else PackedTensor(tensor, axis)
