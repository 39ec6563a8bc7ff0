"""`rt.save_pretrained` and `rt.state_dict`: the weights of a model of `rt.shard`, in whole tensors.

Who writes what.  Each file is written by one rank, the first one of a pipeline stage that has its
tensors, so that no file system has to merge the writes of two machines.  All ranks of a stage go
through its tensors in one order, gather one after the other, and drop it again; so a rank needs
memory for one whole tensor, not for the model.  Files have hidden names until all of them are
written on all ranks.  Then the first rank removes an earlier model of the directory, gives them
their names, and writes the index last.

A rank that cannot write goes on to gather, since the other ranks of its stage would wait for it;
all ranks raise at the end.

What is written.  One name of a weight that the model's library ties by itself, else all names; no
adapter of peft is merged.  With a model of peft, only its adapters are written, on rank 0 by peft
itself; for stages it looks at the copy without values from which they were cut.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from msrun.errors import CheckpointError, ModelError
from msrun.parallel.checkpoint import store
from msrun.parallel.checkpoint.peers import HostGroup
from msrun.parallel.checkpoint.state import TensorNames
from msrun.parallel.checkpoint.tensors import (
    TORCH_DTYPES,
    FileTensor,
    plan_file,
    slot,
    write_file,
)
from msrun.parallel.local import full_tensor, is_sharded
from msrun.parallel.uneven_rows.rows import plain, rows_of, whole, whole_shape
from msrun.parallel.weights.files import INDEX, SAFETENSORS
from msrun.parallel.weights.names import is_adapters, shown
from msrun.parallel.weights.origin import Origin
from msrun.worker.beat import beat


class _Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors that a rank could write, by their first names, and its place in the pipeline."""

    stage: int
    tensors: list[FileTensor]


class _Held(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor, by its first name, and the first rank that has it."""

    entry: FileTensor
    rank: int
    stage: int


class _PlannedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the directory.

    Args:
        name: Its name.
        writer: Rank that writes it.
        stage: Stage whose ranks gather its tensors.
        slots: Its tensors, under the names that they get.
        first: Name of a slot -> first name of the tensor in the model.
    """

    name: str
    writer: int
    stage: int
    slots: list[FileTensor]
    first: dict[str, str]


class Exporter:
    """Gathers the tensors of one model; all ranks make one and call its methods together.

    Args:
        peers: All ranks.
        stage: Pipeline stage of this rank.
        device: Of this rank, by which it gathers.
        model: A result of `rt.shard`.
        origin: The model as it was before.
    """

    def __init__(
        self,
        peers: HostGroup,
        stage: int,
        device: torch.device,
        model: nn.Module,
        origin: Origin,
    ) -> None:
        self._peers = peers
        self._stage = stage
        self._device = device
        self._model = model
        self._origin = origin

    def save(self, folder: Path, shard_bytes: int) -> None:
        """Write a directory that `from_pretrained` loads.

        Args:
            folder: The directory; other files in it stay.
            shard_bytes: Bytes of tensors in one file; a larger tensor has a file of its own.

        Raises:
            CheckpointError: It cannot be written, or a tensor cannot be stored.
        """
        if self._origin.library.adapters:
            self._save_adapters(folder)
            return
        with self._peers.together():
            if self._origin.extra:
                raise CheckpointError(
                    f"safetensors has no place for {self._origin.extra[0]}, which is no tensor",
                    hint="rt.save keeps it",
                )
            own = self._own()
            if self._peers.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
        planned = _plan(self._origin, self._held(own), shard_bytes)
        failure = self._write(folder, planned, own)
        with contextlib.ExitStack() as leftovers:
            own_files = [file for file in planned if file.writer == self._peers.rank]
            for file in own_files:
                leftovers.callback(_discard, folder / _hidden(file.name))
            with self._peers.together():
                if failure is not None:
                    raise failure
            leftovers.pop_all()  # all are written
        with self._peers.together():
            if self._peers.rank == 0:
                _finish(folder, planned, self._origin)

    def state_dict(self) -> dict[str, Tensor]:
        """Return all tensors, whole and on the host, on rank 0; an empty dict on other ranks.

        Raises:
            CheckpointError: A tensor has no values.
        """
        with self._peers.together():
            own = self._own()
        held = self._held(own)
        found: dict[str, Tensor] = {}
        for one in held:
            tensor = self._to_first_rank(one, own)
            if self._peers.rank == 0:
                found[one.entry.name] = tensor
            beat()
        names = self._origin.first if found else {}
        return {name: found[first] for name, first in names.items() if first in found}

    def _held(self, own: Mapping[str, Tensor], *, is_part: bool = False) -> list[_Held]:
        """Return the tensors of all ranks with the first rank that has each, in order.

        Args:
            own: Those of this rank.
            is_part: Whether some of the model are left out.
        """
        with self._peers.together():
            tensors = [_slot(*item) for item in own.items()]
            offer = _Offer(stage=self._stage, tensors=tensors)
        offers = self._peers.gather(offer, _Offer)
        text = ""
        with self._peers.together():
            if self._peers.rank == 0:
                held = _holders(self._origin, offers, is_part=is_part)
                text = msgspec.json.encode(held).decode()
        return msgspec.json.decode(self._peers.from_first(text), type=list[_Held])

    def _own(self) -> dict[str, Tensor]:
        """Return this rank's tensors by the first names of the model."""
        first = self._origin.first
        tensors = TensorNames((), 0, self._model).tensors
        return {first[name]: tensor for name, tensor in tensors.items() if name in first}

    def _whole(self, tensor: Tensor) -> Tensor:
        if rows_of(tensor):
            return whole(tensor)
        tensor = tensor.detach()
        if is_sharded(tensor):  # shards that ZeRO keeps on the host travel by the device
            tensor = tensor.to(self._device)
        return full_tensor(tensor)

    def _write(
        self, folder: Path, planned: Sequence[_PlannedFile], own: Mapping[str, Tensor]
    ) -> Exception | None:
        """Write the files of this rank; return why it could not, after all were gathered."""
        failure: Exception | None = None
        for file in planned:
            if file.stage != self._stage:
                continue
            gathering = self._gathered(file, own)
            if file.writer == self._peers.rank and failure is None:
                failure = _written(folder / _hidden(file.name), file, gathering)
            for _ in gathering:  # what was not written
                beat()
        return failure

    def _gathered(self, file: _PlannedFile, own: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """Yield the tensors of a file in its order, each gathered when it is reached."""
        is_writer = file.writer == self._peers.rank
        for entry in plan_file(file.slots).slots:
            tensor = own[file.first[entry.name]]
            if is_sharded(tensor) or rows_of(tensor):
                gathered = self._whole(tensor)
                yield gathered
                del gathered
            elif is_writer:
                yield tensor

    def _to_first_rank(self, held: _Held, own: Mapping[str, Tensor]) -> Tensor:
        """Return on rank 0 a whole tensor of its own, which rank `held.rank` has in parts."""
        here, gathered = self._peers.rank, torch.empty(0)
        if held.stage == self._stage:
            gathered = self._whole(own[held.entry.name])
        if here == 0 == held.rank:
            return gathered.to("cpu", copy=True)
        if here == 0:
            gathered = torch.empty(held.entry.shape, dtype=TORCH_DTYPES[held.entry.dtype])
            self._peers.receive(gathered, held.rank)
        elif here == held.rank:
            self._peers.send(gathered.cpu().contiguous(), 0)
        return gathered

    def _save_adapters(self, folder: Path) -> None:
        """Write the adapters of a model of peft, as peft does."""
        # Stages have parts of it; the copy without values from which they were cut is whole.
        model: Any = getattr(self._model, "whole", self._model)
        with self._peers.together():
            if not hasattr(model, "create_or_update_model_card"):
                raise ModelError(
                    f"the adapters of {self._origin.kind} cannot be written: rt.save_pretrained "
                    "needs a model of peft that mode: auto does not divide into stages",
                    hint="rt.save keeps them, and rt.state_dict returns them on rank 0: "
                    "save_pretrained(folder, state_dict=...) of an equal model of peft writes them",
                )
            own = {
                name: tensor
                for name, tensor in self._own().items()
                if is_adapters(self._origin.library, name)
                or tensor.requires_grad
                or ".modules_to_save." in name
            }
        found = {}
        for one in self._held(own, is_part=True):
            tensor = self._to_first_rank(one, own)
            if self._peers.rank == 0:
                found[one.entry.name] = tensor
            beat()
        with self._peers.together():
            if self._peers.rank == 0:
                # Not the method of the instance, which refuses to write the parts of one rank.
                type(model).save_pretrained(model, str(folder), state_dict=found)


def _slot(name: str, tensor: Tensor) -> FileTensor:
    """Return the entry of all of `tensor`, of which this rank may have some rows."""
    entry = slot(name, plain(tensor))
    return msgspec.structs.replace(entry, shape=tuple(whole_shape(tensor)))


def _holders(origin: Origin, offers: Sequence[_Offer], *, is_part: bool) -> list[_Held]:
    """Return each tensor with the first rank that has it, in the order of the model."""
    first: dict[str, _Held] = {}
    for rank, offer in enumerate(offers):
        for entry in offer.tensors:
            first.setdefault(entry.name, _Held(entry=entry, rank=rank, stage=offer.stage))
    lost = [name for name in origin.groups if name not in first]
    if lost and not is_part:
        warnings.warn(
            f"msrun: no stage uses {shown(lost)} of {origin.kind}, so no rank has values of it",
            stacklevel=2,
        )
    return [first[name] for name in origin.groups if name in first]


def _plan(origin: Origin, held: Sequence[_Held], shard_bytes: int) -> list[_PlannedFile]:
    """Return the files to write, each with tensors of one rank."""
    runs: list[tuple[_Held, list[tuple[FileTensor, str]]]] = []
    filled = 0
    for one in sorted(held, key=lambda one: one.rank):
        for name in origin.saved_names(one.entry.name):
            entry = msgspec.structs.replace(one.entry, name=name)
            is_full = filled + entry.nbytes > shard_bytes
            if not runs or runs[-1][0].rank != one.rank or (runs[-1][1] and is_full):
                runs.append((one, []))
                filled = 0
            runs[-1][1].append((entry, one.entry.name))
            filled += entry.nbytes
    return [
        _PlannedFile(
            name=_file_name(origin.library.stem, number, len(runs)),
            writer=one.rank,
            stage=one.stage,
            slots=[entry for entry, _ in entries],
            first={entry.name: first for entry, first in entries},
        )
        for number, (one, entries) in enumerate(runs, 1)
    ]


def _file_name(stem: str, number: int, count: int) -> str:
    part = f"-{number:05}-of-{count:05}" if count > 1 else ""
    return f"{stem}{part}{SAFETENSORS}"


def _hidden(name: str) -> str:
    return f".{name}.partial"


def _written(path: Path, file: _PlannedFile, gathering: Iterator[Tensor]) -> Exception | None:
    def take(_: str) -> Tensor:
        beat()
        return next(gathering)

    try:
        write_file(path, plan_file(file.slots), take)
    except Exception as error:  # noqa: BLE001 - the other ranks of the stage wait to gather
        return error
    return None


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _finish(folder: Path, planned: Sequence[_PlannedFile], origin: Origin) -> None:
    """Give the files their names, and write what belongs to them; on the first rank."""
    stem = origin.library.stem
    names = [file.name for file in planned]
    earlier = re.compile(
        rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors({re.escape(INDEX)})?"
    )
    # First, so that a kill leaves no index that leads to files of two models.
    for entry in sorted(folder.iterdir(), reverse=True):
        if earlier.fullmatch(entry.name) and entry.name not in names:
            entry.unlink()
    for name in names:
        os.replace(folder / _hidden(name), folder / name)  # noqa: PTH105 - known to be atomic
    if len(planned) > 1:
        weight_map = {entry.name: file.name for file in planned for entry in file.slots}
        total = sum(entry.nbytes for file in planned for entry in file.slots)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        path = folder / f"{stem}{SAFETENSORS}{INDEX}"
        hidden = folder / _hidden(path.name)
        hidden.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        hidden.replace(path)
    _write_config(folder, planned, origin)
    store.sync_directory(folder)


def _write_config(folder: Path, planned: Sequence[_PlannedFile], origin: Origin) -> None:
    library = origin.library
    if library.config_text:
        (folder / "config.json").write_text(library.config_text, encoding="utf-8")
    if library.config is None:
        return
    config = copy.deepcopy(library.config)
    config.architectures = [origin.kind]
    types = [entry.dtype for file in planned for entry in file.slots]
    floating = [one for one in map(TORCH_DTYPES.__getitem__, types) if one.is_floating_point]
    if floating:
        config.dtype = str(floating[0]).removeprefix("torch.")
    config.save_pretrained(str(folder))
    if library.generation is not None:
        library.generation.save_pretrained(str(folder))
