"""Plans which rank writes and reads which part of which tensor, with torch's planners.

Any layout must load into any other.  torch's `DefaultSavePlanner` and `DefaultLoadPlanner` solve
that for DTensors: each rank proposes the parts that it holds, a global plan drops the parts that
several ranks hold, and on load each wanted part is intersected with the stored chunks.  Only these
planners are used.  torch's file format is not, since its index and its non-tensor state are pickled
(docs/decisions/0017); files are safetensors (`tensors`) with an index in JSON (`store`).

Saving:

1. Every rank turns its `State` into a `Proposal` (`propose`).
2. Rank 0 merges the proposals (`divide`).  Each part of a tensor is written by one rank, and rank 0
   works out the position of every chunk in every file before any file is written.
3. Every rank keeps its share as a `WriteDivision` (`accept`) and takes its tensors (`stage`), as
   copies on the host if a background thread writes them.

A division holds as long as no rank has tensors of other names, shapes, types or placements
(`signature`), so later saves of a training run skip steps 1 and 2.

Invariants: chunks of a tensor do not overlap and fill it; a rank writes one file, or none if other
ranks hold all of its parts too.  `State.common` names tensors of which each rank keeps its own
copy, such as buffers: all of these come from the lowest rank that has them, so that they fit each
other.

Loading: each rank plans reads for its own targets and reads only the rows that it needs (`read`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from msrun.errors import CheckpointError, RanksDisagreeError
from msrun.parallel.checkpoint.checksums import DataFiles
from msrun.parallel.checkpoint.packed import TensorChunks, as_planned
from msrun.parallel.checkpoint.schema import Chunk, Index, Manifest, StoredTensor
from msrun.parallel.checkpoint.state import State
from msrun.parallel.checkpoint.targets import Target
from msrun.parallel.checkpoint.tensors import (
    CODES,
    TORCH_DTYPES,
    FilePlan,
    FileTensor,
    check_storable,
    digest,
    plan_file,
    read_part,
)
from msrun.parallel.local import is_sharded
from msrun.parallel.uneven_rows.rows import plain
from msrun.worker.beat import beat

# Name in a rank's file -> tensor to write, or what fetches it in its turn.
Staged = dict[str, Tensor | Callable[[], Tensor]]


class TensorPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a tensor as ranks tell it each other; torch's `WriteItem` in plain values.

    Args:
        name: Name of the tensor.
        dtype: A key of `ITEM_BYTES`.
        shape: Sizes of the whole tensor.
        at: Index of its first element in the tensor.
        sizes: Sizes of the part.
        index: torch's position of the part; None before the global plan.
        is_shard: Whether the tensor is sharded.
    """

    name: str
    dtype: str
    shape: list[int]
    at: list[int]
    sizes: list[int]
    index: int | None
    is_shard: bool


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one rank could write.

    Args:
        parts: Parts of tensors.
        common: Names of tensors of which each rank has its own copy.
        names: Names of its state that is not a tensor, and of its aliases.
    """

    parts: list[TensorPart]
    common: list[str]
    names: list[str]


class RankWrites(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that one rank writes.

    Args:
        parts: Parts of tensors.
        has_side_state: Whether it has aliases or state other than tensors that no lower rank has.
    """

    parts: list[TensorPart]
    has_side_state: bool


class SideState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a rank beside its tensors.

    Args:
        aliases: Further name of a tensor -> its name.
        values: Name -> state that is not a tensor, as JSON in Python's dialect, whose integers
            have any size.
    """

    aliases: dict[str, str] = {}
    values: str = "{}"


class StorageLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Positions of all tensors of a checkpoint in its data files.

    Args:
        tensors: Name -> type, shape and chunks.
        files: Data file -> size in bytes.
    """

    tensors: dict[str, StoredTensor] = {}
    files: dict[str, int] = {}


class WriteDivision(msgspec.Struct, frozen=True, kw_only=True):
    """This rank's share of the writing, valid until some rank's `signature` changes.

    Args:
        signature: Signature of this rank's state.
        items: Name in this rank's file -> part of a tensor.
        file: Plan of the file; None if this rank writes none.
        has_side_state: As in `RankWrites`.
        layout: Layout of the whole checkpoint on rank 0; empty elsewhere.
    """

    signature: tuple[object, ...]
    items: dict[str, WriteItem]
    file: FilePlan | None
    has_side_state: bool
    layout: StorageLayout


class _Planner(DefaultSavePlanner):
    """torch's planner, which also takes all common tensors from the lowest rank that has them."""

    def __init__(self, state: State) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.set_up_planner(as_planned(state.tensors, state.rows) | state.chunks)

    def lookup_object(self, index: MetadataIndex) -> Any:
        packed = self.state_dict.get(index.fqn)
        return (
            packed.part(index) if isinstance(packed, TensorChunks) else super().lookup_object(index)
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # torch would balance replicated tensors over ranks by size.  Common ones may differ between
        # ranks, so a mix of several ranks' copies would be a state that no rank had.
        seen: set[str] = set()
        plans = []
        for plan in all_plans:
            items = [item for item in plan.items if item.index.fqn not in seen]
            seen |= plan.planner_data
            plans.append(dataclasses.replace(plan, items=items, planner_data=None))
        return super().create_global_plan(plans)


class _Reader(DefaultLoadPlanner):
    """torch's planner, which also fills tensors that pack several in one dim."""

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        packed = self.state_dict.get(index.fqn)
        return (
            packed.part(index) if isinstance(packed, TensorChunks) else super().lookup_tensor(index)
        )


def signature(state: State) -> tuple[object, ...]:
    """Return everything in `state` that the division of the writing depends on."""
    tensors = tuple(
        (
            name,
            plain(tensor).shape,
            tensor.dtype,
            (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None,
        )
        for name, tensor in state.tensors.items()
    )
    rows = tuple((name, each.counts, each.index) for name, each in state.rows.items())
    return tensors, rows, tuple(state.aliases), tuple(state.values), frozenset(state.common)


@torch.no_grad()
def propose(state: State) -> Proposal:
    """Return everything that this rank could write.

    Raises:
        CheckpointError: A tensor cannot be stored.
    """
    for name, tensor in state.tensors.items():
        check_storable(name, tensor)
    plan = _Planner(state).create_local_plan()
    return Proposal(
        parts=[_part(item) for item in plan.items],
        common=sorted(state.common),
        names=[*state.aliases, *state.values],
    )


def divide(proposals: list[Proposal]) -> tuple[list[RankWrites], StorageLayout]:
    """Return what each rank writes, and the position of every tensor in the files."""
    proposed = [
        SavePlan([_item(part) for part in each.parts], planner_data=frozenset(each.common))
        for each in proposals
    ]
    plans, metadata = _Planner(State()).create_global_plan(proposed)
    layout = StorageLayout(
        tensors={
            name: StoredTensor(
                dtype=CODES[stored.properties.dtype], shape=[*stored.size], chunks=[]
            )
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        },
        files={},
    )
    writes = []
    known: set[str] = set()
    for rank, (plan, proposal) in enumerate(zip(plans, proposals, strict=True)):
        parts = [_part(item) for item in plan.items]
        writes.append(RankWrites(parts=parts, has_side_state=not known.issuperset(proposal.names)))
        known.update(proposal.names)
        # `accept` on the other ranks makes the same file plan from the same items, so rank 0 knows
        # the first byte of every part without asking.
        items = dict(_slots(plan.items))
        if not items:
            continue
        file, name = plan_file(items), file_name(rank)
        layout.files[name] = file.nbytes
        for slot, start in zip(file.slots, file.starts, strict=True):
            at = _data(items[slot]).chunk.offsets
            chunk = Chunk(at=[*at], shape=[*slot.shape], file=name, start=start)
            layout.tensors[items[slot].index.fqn].chunks.append(chunk)
    return writes, layout


def accept(state: State, writes: RankWrites, layout: StorageLayout) -> WriteDivision:
    """Return the division with `writes` as this rank's share."""
    items = dict(_slots([_item(part) for part in writes.parts]))
    return WriteDivision(
        signature=signature(state),
        items={slot.name: item for slot, item in items.items()},
        file=plan_file(items) if items else None,
        has_side_state=writes.has_side_state,
        layout=layout,
    )


def side_state(state: State) -> SideState:
    """Return the state beside tensors, to send."""
    return SideState(aliases=state.aliases, values=json.dumps(state.values))


def contents(
    manifest: Manifest, layout: StorageLayout, side_states: Sequence[SideState]
) -> tuple[Manifest, Index]:
    """Return the manifest and the index of a checkpoint.

    Args:
        manifest: Manifest without the names of the data files.
        layout: Layout of the data files.
        side_states: Those of each rank.
    """
    aliases: dict[str, str] = {}
    values: dict[str, Any] = {}
    for own in reversed(side_states):  # values of the lowest rank win
        aliases |= own.aliases
        values |= json.loads(own.values)
    # A weight that two stages share is a tensor under its name in each, and in one of them perhaps
    # a further name too.
    aliases = {name: first for name, first in aliases.items() if name not in layout.tensors}
    index = Index(tensors=layout.tensors, aliases=aliases, values=values)
    return msgspec.structs.replace(manifest, files=layout.files), index


@torch.no_grad()
def stage(state: State, division: WriteDivision, *, is_copied: bool) -> Staged:
    """Return name in this rank's file -> tensor to write, or what fetches it in its turn.

    Args:
        state: State of this rank.
        division: A division made for a state of this signature.
        is_copied: Return copies on the host, which the next step does not change.
    """
    planner = _Planner(state)
    staged: Staged = {}
    for name, item in division.items.items():
        if chunks := state.chunks.get(item.index.fqn):
            staged[name] = partial(chunks.part, item.index)
            continue
        tensor = planner.resolve_data(item)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is no tensor")
        staged[name] = tensor.detach().to("cpu", copy=True) if is_copied else tensor.detach()
    return staged


def take(staged: Staged, name: str) -> Tensor:
    """Return the next tensor to write, and report progress if training waits for it."""
    if threading.current_thread() is threading.main_thread():
        beat()
    found = staged.pop(name)
    return found if isinstance(found, Tensor) else found()


def digests(state: State) -> dict[str, bytes]:
    """Return name -> digest of each plain tensor that must be equal on all ranks that have it."""
    return {
        name: digest(tensor)
        for name, tensor in state.tensors.items()
        if name not in state.common and name not in state.rows and not is_sharded(tensor)
    }


def compare(ranks: Iterable[Mapping[str, bytes]]) -> None:
    """Check that the `digests` of all `ranks` agree.

    Raises:
        RanksDisagreeError: Tensors of one name differ.
    """
    first: dict[str, tuple[int, bytes]] = {}
    for rank, digests_of_rank in enumerate(ranks):
        for name, digest_here in digests_of_rank.items():
            other, expected = first.setdefault(name, (rank, digest_here))
            if digest_here != expected:
                raise RanksDisagreeError(
                    f"{name} is not the same on rank {other} and rank {rank}",
                    hint="make a tensor that the script shards a DTensor, or name it by rank",
                )


def file_name(rank: int) -> str:
    """Return the name of the data file of `rank`."""
    return f"rank_{rank:05}.safetensors"


def read(files: DataFiles, targets: Mapping[str, Target]) -> None:
    """Fill `targets` from the data files; each rank reads what it needs.

    Raises:
        DamagedCheckpointError: A file cannot be read, or is not as it was written.
    """
    planner = _Reader(flatten_state_dict=False, flatten_sharded_tensors=False)
    state: dict[str, Any] = {name: target.tensor for name, target in targets.items()}
    known = {name: _metadata(target.stored) for name, target in targets.items()}
    planner.set_up_planner(state, Metadata(state_dict_metadata=dict(known)))
    rows = {name: target.rows for name, target in targets.items() if target.rows}
    planner.state_dict = as_planned(state, rows)  # afterwards: torch copies what is no tensor
    wanted: dict[str, list[tuple[int, ReadItem]]] = {}
    with torch.no_grad():
        for item in planner.create_local_plan().items:
            chunk = _chunk(targets, item)
            wanted.setdefault(chunk.file, []).append((chunk.start, item))
        for items in wanted.values():
            # In the order of the file, since sequential reads are the fast ones.
            for _, item in sorted(items, key=lambda pair: pair[0]):
                dtype = targets[item.storage_index.fqn].stored.dtype
                part = read_part(
                    files, dtype, _chunk(targets, item), item.storage_offsets, item.lengths
                )
                tensor = planner.resolve_tensor(item)
                tensor.copy_(part)
                planner.commit_tensor(item, tensor)
                beat()
        files.settle()


def _chunk(targets: Mapping[str, Target], item: ReadItem) -> Chunk:
    """Return the chunk that `item` reads; its index counts chunks in the order of `_metadata`."""
    index = item.storage_index.index
    if index is None:
        raise CheckpointError(f"{item.storage_index.fqn} has no chunk")
    return targets[item.storage_index.fqn].stored.chunks[index]


def _metadata(stored: StoredTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=TORCH_DTYPES[stored.dtype]),
        size=torch.Size(stored.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(chunk.at), sizes=torch.Size(chunk.shape))
            for chunk in stored.chunks
        ],
    )


def _part(item: WriteItem) -> TensorPart:
    data = _data(item)
    return TensorPart(
        name=item.index.fqn,
        dtype=CODES[data.properties.dtype],
        shape=[*data.size],
        at=[*data.chunk.offsets],
        sizes=[*data.chunk.sizes],
        index=item.index.index,
        is_shard=item.type == WriteItemType.SHARD,
    )


def _item(part: TensorPart) -> WriteItem:
    at = torch.Size(part.at)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=at, sizes=torch.Size(part.sizes)),
        properties=TensorProperties(dtype=TORCH_DTYPES[part.dtype]),
        size=torch.Size(part.shape),
    )
    return WriteItem(
        index=MetadataIndex(part.name, at, part.index),
        type=WriteItemType.SHARD if part.is_shard else WriteItemType.TENSOR,
        tensor_data=data,
    )


def _slots(items: Iterable[WriteItem]) -> Iterator[tuple[FileTensor, WriteItem]]:
    """Yield the file entry of each part that has elements."""
    for item in items:
        data = _data(item)
        if math.prod(data.chunk.sizes):
            name = item.index.fqn + _shown_part(data)
            dtype = CODES[data.properties.dtype]
            yield FileTensor(name=name, dtype=dtype, shape=tuple(data.chunk.sizes)), item


def _data(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn} is no tensor")
    return item.tensor_data


def _shown_part(data: TensorWriteData) -> str:
    """Return the bounds of the part, such as `[0:8,16:32]`; empty for a whole tensor."""
    if data.chunk.sizes == data.size:
        return ""
    bounds = zip(data.chunk.offsets, data.chunk.sizes, strict=True)
    return f"[{','.join(f'{first}:{first + length}' for first, length in bounds)}]"
