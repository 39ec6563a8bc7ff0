"""`rt.save`, `rt.load` and `rt.resume`: all that a job needs to go on, in any layout.

Model, optimizer, random generators, loader and step.  Tensors are resharded on load by
`torch.distributed.checkpoint`.  State that is no tensor is JSON; no file is ever unpickled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from msrun.errors import CheckpointError
from msrun.parallel.auto.dropout_rng import DropoutRng
from msrun.parallel.checkpoint import plan as plans
from msrun.parallel.checkpoint import random as generators
from msrun.parallel.checkpoint import store
from msrun.parallel.checkpoint.peers import DEADLINE, HostGroup
from msrun.parallel.checkpoint.state import (
    Models,
    Optimizers,
    State,
    TensorNames,
    collect,
    each_model,
    plain,
)
from msrun.parallel.checkpoint.strategy_file import describe, merge, write_strategy
from msrun.parallel.checkpoint.targets import Targets, check_taken
from msrun.parallel.checkpoint.tensors import FilePlan, read_tensor, write_file
from msrun.parallel.checkpoint.user_state import Extra, Stateful, check_extra, plain_extra
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS, ROOT, ParallelConfig
from msrun.parallel.layout import MeshLayout
from msrun.parallel.rank_context import RankContext
from msrun.version import __version__

RANDOM = "random."
# Of models that a plan of mode auto runs: all ranks have the same.
DRAWS = "draws"
# Ranks of a job that ends well come to its end together, but for a last evaluation on one.
AT_EXIT = timedelta(minutes=5)


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """State that changes between two steps, as it was right after the first.

    Args:
        step: Steps that were done.
        loader: State of the loader; None without.
        random: Kind of generator -> state.
    """

    step: int
    loader: dict[str, Any] | None
    random: dict[str, torch.Tensor]


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """What `load` found.

    Args:
        path: Directory of the checkpoint.
        step: Steps that were done.
        extra: What the user added.
    """

    path: Path
    step: int
    extra: dict[str, Any]


class Checkpoints:
    """Saves and loads the models of a job; all ranks make one and call its methods together.

    Args:
        config: The parallel configuration.
        context: This rank.
        dropout_rngs: Generators of each model that a plan of mode auto runs, in the order of
            `rt.shard`; the owner appends to it.
    """

    def __init__(
        self,
        config: ParallelConfig,
        context: RankContext,
        dropout_rngs: Sequence[Sequence[DropoutRng]] = (),
    ) -> None:
        self._config = config
        self._settings = config.checkpoint
        self._context = context
        self._dropout_rngs = dropout_rngs
        self._peers = HostGroup()
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None
        self._has_strategy = False
        self._division: plans.WriteDivision | None = None
        # What `after_step` saves beside model and optimizer.
        self._step = 0
        self._loader: Stateful | None = None
        self._extra: Extra = None
        self._due: Callable[[], None] | None = None

    def save(
        self,
        path: str | Path | None,
        models: Models,
        optimizer: Optimizers = None,
        *,
        step: int,
        loader: Stateful | None = None,
        extra: Extra = None,
    ) -> None:
        """Write a checkpoint; it is there, whole, when this returns, or later if asynchronous.

        Args:
            path: Its directory, replaced when it is a checkpoint; None takes one named for the
                step in the configured directory, and removes the oldest ones there.
            models: One, or the pipeline stages of this rank; or several by name, when names of
                their tensors begin with it.
            optimizer: Of their parameters; one, several or None.
            step: Steps that were done.
            loader: Whose place in the data is kept.
            extra: Name -> plain JSON value, or an object with `state_dict` of such values.

        Raises:
            CheckpointError: It could not be written, here or on another rank, or the one before.
        """
        self.finish()
        with self._peers.together():
            moment = self._moment(step, loader)
        self._save(path, models, optimizer, (moment, extra))

    def _save(
        self,
        path: str | Path | None,
        models: Models,
        optimizer: Optimizers,
        rest: tuple[Moment, Extra],
    ) -> None:
        settings = self._settings
        target = self._target(path, rest[0].step)
        peers = self._peers
        with peers.together():
            state = self._collect(self._names(models), _each(optimizer), rest[0])
            manifest = self._manifest(*rest)
        if self._is_sharded_by_script:
            self._compare(state)
        division = self._division = self._divide(state)
        side_states = peers.gather(
            (state.aliases, state.values) if division.has_side_state else ({}, {})
        )
        building, commit = "", None
        with peers.together():
            if self._context.rank == 0:
                building = str(store.begin(target))
                contents = _contents(manifest, division.layout, side_states)
                keep = settings.keep if settings and path is None else 0
                commit = partial(_commit, Path(building), target, contents, keep)
        folder = Path(peers.from_first(building))
        is_async = settings is not None and settings.is_async
        with peers.together():
            staged = plans.stage(state, division, is_copied=is_async)
        if settings and settings.strategy and not self._has_strategy:
            self.write_strategy(settings.strategy, models)
            self._has_strategy = True
        work = partial(self._write, folder, division.file, staged, commit)
        if is_async:
            self._writer = threading.Thread(
                target=self._in_background, args=(work,), name="msrun-checkpoint"
            )
            self._writer.start()
        else:
            work()

    def load(
        self,
        path: str | Path | None,
        models: Models,
        optimizer: Optimizers = None,
        *,
        loader: Stateful | None = None,
        extra: Extra = None,
    ) -> Restored:
        """Load what is given from a checkpoint; with an optimizer, random generators too.

        Args:
            path: A checkpoint, or a directory of which the newest is taken; None takes the
                configured directory.
            models: As of `save`.
            optimizer: As of `save`.
            loader: As of `save`.
            extra: Objects with `load_state_dict`; other values are in what is returned.

        Raises:
            CheckpointError: There is none, it is broken, or does not fit; unless the files became
                unreadable in the middle, nothing was changed.
        """
        self.finish()
        source = ""
        with self._peers.together():
            if self._context.rank == 0:
                source = str(store.find(self._folder("rt.load", path)).absolute())
        folder = Path(self._peers.from_first(source))
        optimizers = _each(optimizer)
        with self._peers.together():
            manifest = store.read_manifest(folder)
            index = store.read_index(folder, manifest)
            targets = Targets(self._names(models), optimizers, index)
            check_extra(manifest, loader, extra)
        check_taken(self._peers.any_of(targets.taken), index)
        with self._peers.together():
            if loader is not None:
                loader.load_state_dict(manifest.loader or {})
            plans.read(folder, targets.tensors)
            targets.apply()
            for name, value in (extra or {}).items():
                if isinstance(value, Stateful):
                    value.load_state_dict(manifest.extra[name])
            if optimizers:
                self._restore_random(folder, manifest, index)
        return Restored(path=folder, step=manifest.step, extra=manifest.extra)

    def resume(
        self,
        models: Models,
        optimizer: Optimizers,
        loader: Stateful | None = None,
        *,
        extra: Extra = None,
    ) -> int:
        """Load the newest checkpoint of the configured directory, if there is one.

        Automatic saves from now on include `loader` and `extra`.

        Returns:
            The step to go on from: how many were done.

        Raises:
            CheckpointError: As of `load`; or no directory is configured.
        """
        self.finish()
        self._loader, self._extra, self._step = loader, extra, 0
        newest = ""
        with self._peers.together():
            if self._context.rank == 0:
                path = store.find_newest(self._folder("rt.resume", None))
                newest = str(path.absolute()) if path else ""
        newest = self._peers.from_first(newest)
        if newest:
            restored = self.load(newest, models, optimizer, loader=loader, extra=extra)
            self._step = restored.step
        return self._step

    def after_step(self, models: Models, optimizer: Optimizers) -> None:
        """Count a step; every so many as the configuration says, one is saved by `before_step`.

        By then a scheduler of the learning rate, which moves after the step, has moved.
        """
        settings = self._settings
        self._step += 1
        if settings and settings.every and self._step % settings.every == 0:
            moment = self._moment(self._step, self._loader)
            self._due = partial(self._save, None, models, optimizer, (moment, self._extra))

    def before_step(self, within: timedelta = DEADLINE) -> None:
        """Save the step before, if it is one to save: loader and generators as they were then.

        Ranks meet for it wherever they are, at the next step or at their end: one that leaves
        early still takes part.
        """
        if self._due is not None:
            due, self._due = self._due, None
            self._join()  # the writer talks to the same peers
            self._peers.meet(within)
            due()

    def finish(self) -> None:
        """Wait until all is there that was to be saved; due before a job ends well.

        Raises:
            CheckpointError: It could not be written.
        """
        self.before_step()
        self._join()

    def finish_at_exit(self, within: timedelta = AT_EXIT) -> None:
        """Do what `finish` does, unless some rank does not come: it may have ended early.

        Raises:
            CheckpointError: The last checkpoint could not be written.
        """
        self.before_step(within)
        self._join()

    def write_strategy(
        self, path: str | Path, models: Models, stages: Sequence[int] | None = None
    ) -> None:
        """Write how each parameter of the job lies on the mesh; see `strategy_file`.

        Args:
            path: Of the file, which rank 0 replaces.
            models: As of `save`.
            stages: Pipeline stage of each model; None counts round the pipeline.

        Raises:
            CheckpointError: It cannot be written.
        """
        layout = self._context.layout
        first = self._context.coordinate.get(PIPELINE_AXIS, 0)
        count = len(each_model(models))
        numbers = stages or [first + n * layout.size(PIPELINE_AXIS) for n in range(count)]
        with self._peers.together():
            own = describe(models, numbers)
        parts = self._peers.gather(own)
        with self._peers.together():
            if self._context.rank == 0:
                write_strategy(path, merge(parts))

    def _names(self, models: Models) -> TensorNames:
        data_rank = self._context.coordinate.get(DATA_AXIS, 0)
        return TensorNames(self._config.reduce.exclude, data_rank, models)

    def _join(self) -> None:
        """Wait for the writer in the background, and raise what became of it."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    @property
    def _is_sharded_by_script(self) -> bool:
        """Whether the script divides work in a way that is not known here."""
        sizes = self._context.layout.axes
        return self._config.mode == "manual" and any(
            size > 1 for axis, size in sizes.items() if axis != DATA_AXIS
        )

    def _moment(self, step: int, loader: Stateful | None) -> Moment:
        state = None if loader is None else plain(loader.state_dict(), "state of the loader")
        random = generators.capture(self._context.device)
        for number, (first, *_) in enumerate(self._dropout_rngs):
            random[f"{DRAWS}{number}"] = first.state
        return Moment(step=step, loader=state, random=random)

    def _collect(
        self, names: TensorNames, optimizers: Sequence[Optimizer], moment: Moment
    ) -> State:
        state = collect(names, optimizers)
        for kind, own in moment.random.items():
            state.tensors[f"{RANDOM}{self._context.rank}.{kind}"] = own
        return state

    def _manifest(self, moment: Moment, extra: Extra) -> store.Manifest:
        return store.Manifest(
            format=store.FORMAT,
            step=moment.step,
            world_size=self._context.world_size,
            mesh=self._context.layout.axes,
            msrun=__version__,
            torch=str(torch.__version__),
            files={},
            loader=moment.loader,
            extra={name: plain_extra(name, value) for name, value in (extra or {}).items()},
        )

    def _divide(self, state: State) -> plans.WriteDivision:
        """Return who writes what: as the last time where no rank has anything new."""
        peers, last = self._peers, self._division
        [is_new] = peers.any_of([last is None or last.signature != plans.signature(state)])
        if last is not None and not is_new:
            return last
        with peers.together():
            proposal = plans.propose(state)
        proposals = peers.gather(proposal)
        writes: list[plans.RankWrites] = []
        layout = plans.StorageLayout()
        with peers.together():
            if self._context.rank == 0:
                writes, layout = plans.divide(proposals)
        return plans.accept(state, peers.scatter(writes), layout)

    def _compare(self, state: State) -> None:
        """Refuse tensors of one name that differ from rank to rank."""
        with self._peers.together():
            own = plans.digests(state)
        each = self._peers.gather(own)
        with self._peers.together():
            plans.compare(each)

    def _write(
        self,
        folder: Path,
        file: FilePlan | None,
        staged: dict[str, torch.Tensor],
        commit: Callable[[], None] | None,
    ) -> None:
        """Write this rank's file; when all have, rank 0 makes it a checkpoint."""
        try:
            with self._peers.together():
                if file is not None:
                    path = folder / plans.file_name(self._context.rank)
                    write_file(path, file, staged.pop)
                    store.sync_directory(folder)
            with self._peers.together():
                if commit is not None:
                    commit()
        except Exception:
            if self._context.rank == 0:
                store.discard(folder)
            raise

    def _in_background(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the next save or the end raises it
            self._failure = error

    def _restore_random(self, folder: Path, manifest: store.Manifest, index: store.Index) -> None:
        context = self._context

        def states(rank: int) -> dict[str, torch.Tensor]:
            prefix = f"{RANDOM}{rank}."
            return {
                name.removeprefix(prefix): read_tensor(folder, stored)
                for name, stored in index.tensors.items()
                if name.startswith(prefix)
            }

        saved = MeshLayout(manifest.mesh)
        here = (context.layout, context.rank)
        generators.continue_streams(states, saved, here, context.device, context.stream)
        common = states(0)
        for number, model in enumerate(self._dropout_rngs):
            for dropout_rng in model:
                dropout_rng.state = common.get(f"{DRAWS}{number}", dropout_rng.state)

    def _target(self, path: str | Path | None, step: int) -> Path:
        """Return the directory to write, the same on every rank."""
        folder = self._folder("rt.save", path)
        target = folder if path is not None else store.step_path(folder, step)
        return Path(self._peers.from_first(str(target.absolute())))

    def _folder(self, who: str, path: str | Path | None) -> Path:
        if path is not None:
            return Path(path)
        if self._settings is None:
            hint = f"set {ROOT}.checkpoint.dir, or name a directory"
            raise CheckpointError(f"{who} knows no directory", hint=hint)
        return Path(self._settings.dir)


def _commit(
    building: Path, target: Path, contents: tuple[store.Manifest, store.Index], keep: int
) -> None:
    store.commit(building, target, *contents)
    if keep:
        store.remove_oldest(target.parent, keep, target)


def _contents(
    manifest: store.Manifest,
    layout: plans.StorageLayout,
    side_states: Sequence[tuple[dict[str, str], dict[str, Any]]],
) -> tuple[store.Manifest, store.Index]:
    """Return both files that describe a checkpoint, of which the ranks have `besides`."""
    aliases: dict[str, str] = {}
    values: dict[str, Any] = {}
    for own_aliases, own_values in reversed(side_states):  # the lowest rank has the last word
        aliases |= own_aliases
        values |= own_values
    index = store.Index(tensors=layout.tensors, aliases=aliases, values=values)
    return msgspec.structs.replace(manifest, files=layout.files), index


def _each(optimizer: Optimizers) -> list[Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
