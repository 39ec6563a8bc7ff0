"""Checkpoints of a model some of whose parameters live on servers: they are there as any other.

A checkpoint is the whole state of the job, so servers go back with it.  Each rank has whole
parameters while it is written or loaded.  Tables that no rank has memory for stay on servers: ranks
fetch and write them block by block, and servers read them by themselves (`first_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from msrun.parallel.checkpoint.api import Checkpoints
from msrun.parallel.checkpoint.checksums import DataFiles
from msrun.parallel.checkpoint.moment import Moment, Restored
from msrun.parallel.checkpoint.schema import Index
from msrun.parallel.checkpoint.state import (
    MODEL,
    OPTIMIZER,
    Models,
    Optimizers,
    State,
    TensorNames,
    each_optimizer,
)
from msrun.parallel.checkpoint.targets import Targets
from msrun.parallel.local import has_memory
from msrun.parallel.servers.first_rows import stored
from msrun.parallel.servers.first_rows.table_chunks import TableChunks
from msrun.parallel.servers.parameters.remote_parameter import RemoteParameter
from msrun.parallel.servers.remote import RemoteParameters


class RemoteCheckpoints(Checkpoints):
    """Saves and loads with the parameters of the servers.

    Args:
        remote: These parameters.
        rest: As of `Checkpoints`.
    """

    def __init__(self, remote: RemoteParameters, *rest: Any) -> None:
        super().__init__(*rest)
        self._remote = remote
        # Name in the models of the running save or load -> the table that stays on servers.
        self._streamed: dict[str, RemoteParameter] = {}
        self._loads_state = False

    def _save(self, *words: Any) -> None:
        with self._remote.whole(is_replaced=False, is_streamed=True):
            super()._save(*words)

    def _load(self, folder: Path, models: Models, optimizer: Optimizers, *rest: Any) -> Restored:
        self._loads_state = bool(each_optimizer(optimizer))
        with self._remote.whole(is_replaced=True, is_streamed=True):
            return super()._load(folder, models, optimizer, *rest)

    def _names(self, models: Models) -> TensorNames:
        names = super()._names(models)
        of = {id(tensor): name for name, tensor in names.tensors.items()}
        streamed = ((of.get(id(each.parameter)), each) for each in self._remote.streamed)
        self._streamed = {name: each for name, each in streamed if name is not None}
        return names

    def _collect(
        self, names: TensorNames, optimizers: Sequence[Optimizer], moment: Moment
    ) -> State:
        state = super()._collect(names, optimizers, moment)
        for name, each in self._streamed.items():
            prefix = f"{OPTIMIZER}{name}."
            keys = {
                other: other.removeprefix(prefix)
                for other, tensor in state.tensors.items()
                if other.startswith(prefix) and not has_memory(tensor)
            }
            for other, key in ((MODEL + name, ""), *keys.items()):
                state.chunks[other] = TableChunks(
                    each.shape,
                    state.tensors[other].dtype,
                    self._context.rank,
                    self._context.world_size,
                    partial(self._remote.fetch, each, key),
                )
        return state

    def _read(self, folder: Path, files: DataFiles, index: Index, targets: Targets) -> None:
        found = {
            name: source
            for name in self._streamed
            if (source := stored.take_targets(name, folder, index, targets.tensors))
        }
        share = (self._context.rank, self._context.world_size)
        for name, source in found.items():
            each = self._streamed[name]
            if not self._loads_state:
                self._remote.refuse_rows_alone(each)
            stored.verify(source, files, index, share)
            self._remote.make_of(each, source)
        super()._read(folder, files, index, targets)
