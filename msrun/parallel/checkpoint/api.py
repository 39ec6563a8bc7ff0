"""`rt.save`, `rt.load` and `rt.resume`: everything that a job needs to continue, in any layout.

A checkpoint holds the model, and with an optimizer its state; the random generators of every rank,
the position of the loader, the step, and `extra` of the script.  It is one directory: a safetensors
file for each rank that writes, `index.json` and `checkpoint.json` (see `store`).

Who writes what.  All ranks collect their state by the names of the unmodified model (`state`).
Rank 0 plans which rank writes which part (`plan`), makes a hidden directory next to the target, and
sends its name.  Each rank writes and syncs its own file.  When all have, rank 0 checks the sizes of
all files, writes the index and then the manifest, and renames the directory.  Only then is it a
checkpoint.

What a kill leaves.  A kill at any moment leaves the previous checkpoint or the new one, complete.
Leftovers in hidden directories are removed by the next save to the same place.  The newest `keep`
checkpoints of the configured directory stay; older ones are removed only after the rename.

With `async`, tensors are copied to the host before `save` returns, and a thread does the writing
and the rename.  It uses a process group of its own (`HostGroup`).  An error of the thread is raised
by the next save, load or `finish`.

Automatic checkpoints.  `after_step` notes that a save is due, with the loader's position and the
generators as of that moment; `before_step` of the next step makes it.  So a learning-rate
scheduler, which moves after the step, is saved as it will continue.  Ranks meet for a due save with
a timeout wherever they are, at their next step or at their end: a rank that ends right after a step
still takes part in its checkpoint, and the others do not wait forever for one that was killed.

Every stage runs in `HostGroup.together`, so an error on one rank raises on all of them.  A load
checks names, shapes and metadata on all ranks before it changes the first tensor.  Nothing is ever
unpickled from a file (docs/decisions/0017).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch.optim import Optimizer

from msrun.errors import CheckpointError, DamagedCheckpointError
from msrun.parallel.auto.random_steps.step_rng import StepRng
from msrun.parallel.checkpoint import plan as plans
from msrun.parallel.checkpoint import random as generators
from msrun.parallel.checkpoint import schema, store, user_state
from msrun.parallel.checkpoint.checksums import DataFiles
from msrun.parallel.checkpoint.moment import Moment, Restored
from msrun.parallel.checkpoint.peers import DEADLINE, HostGroup
from msrun.parallel.checkpoint.state import (
    Models,
    Optimizers,
    State,
    TensorNames,
    collect,
    each_model,
    each_optimizer,
    plain,
)
from msrun.parallel.checkpoint.strategy_file import (
    ParameterStrategy,
    describe,
    merge,
    write_strategy,
)
from msrun.parallel.checkpoint.targets import Targets, check_taken
from msrun.parallel.checkpoint.tensors import FilePlan, write_file
from msrun.parallel.checkpoint.user_state import Extra, Stateful, check_extra, plain_extra
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS, ROOT, ParallelConfig
from msrun.parallel.rank_context import RankContext
from msrun.version import __version__
from msrun.worker.beat import beat

# Ranks of a job that ends well end together, except that one of them may run a last evaluation.
AT_EXIT = timedelta(minutes=5)


class Checkpoints:
    """Saves and loads models of a job; all ranks make one and call its methods together.

    Args:
        config: The parallel configuration.
        context: This rank.
        step_rngs: Generators of each model that a plan of mode auto runs, in the order of
            `rt.shard`; the owner appends to it.
    """

    def __init__(
        self,
        config: ParallelConfig,
        context: RankContext,
        step_rngs: Sequence[Sequence[StepRng]] = (),
    ) -> None:
        self._config = config
        self._settings = config.checkpoint
        self._context = context
        self._step_rngs = step_rngs
        self._peers = HostGroup()
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None
        self._has_strategy = False
        self._division: plans.WriteDivision | None = None
        # State of automatic saves beside model and optimizer, and the one that is due.
        self._step = 0
        self._loader: Stateful | None = None
        self._extra: Extra = None
        self._due: Callable[[], None] | None = None

    @property
    def peers(self) -> HostGroup:
        """All ranks; free after `finish`."""
        return self._peers

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
        """Write a checkpoint.  It is complete when this returns, or with `async` some time later.

        Args:
            path: Directory of the checkpoint, which replaces a checkpoint there.  None makes one
                named by the step in the configured directory, and removes the oldest ones there.
            models: One model, or the pipeline stages of this rank; or a mapping of several, whose
                names become prefixes of their tensors' names.
            optimizer: Optimizers of their parameters; one, several or None.
            step: Number of steps that are done.
            loader: Loader whose position to save; None saves none.
            extra: Name -> plain JSON value, or an object whose `state_dict` returns such values.

        Raises:
            CheckpointError: It, or the one before it, could not be written on some rank.
        """
        # The writer of the previous save may still run, and both would use one process group.
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
        settings, peers = self._settings, self._peers
        target, first_step = self._target(path, rest[0].step)
        with peers.together():
            store.check_step(rest[0].step, first_step)
            state = self._collect(self._names(models), each_optimizer(optimizer), rest[0])
            manifest = self._manifest(*rest)
        if self._is_sharded_by_script:
            self._compare(state)
        division = self._division = self._divide(state)
        with peers.together():
            side_state = plans.side_state(state) if division.has_side_state else plans.SideState()
        side_states = peers.gather(side_state, plans.SideState)
        building, commit = "", None
        with peers.together():
            if self._context.rank == 0:
                building = str(store.begin(target))
                contents = plans.contents(manifest, division.layout, side_states)
                keep = settings.keep if settings and path is None else 0
                commit = partial(store.finish, Path(building), target, contents, keep=keep)
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
        beat()

    def load(
        self,
        path: str | Path | None,
        models: Models,
        optimizer: Optimizers = None,
        *,
        loader: Stateful | None = None,
        extra: Extra = None,
    ) -> Restored:
        """Load a checkpoint into the given objects; with an optimizer, random generators too.

        Args:
            path: A checkpoint, or a directory whose newest one to load; None takes the configured
                directory.
            models: As in `save`.
            optimizer: As in `save`.
            loader: Loader to move to the saved position.
            extra: Name -> object with `load_state_dict` to restore.  Values of other names are in
                the result.

        Raises:
            CheckpointError: There is none, it is broken, or it does not fit.  Then nothing was
                changed, unless a data file turned out damaged in the middle.  In a directory of
                several, a damaged one is passed over with a warning.
        """
        self.finish()
        find = partial(self._find, path)
        restored = self._load_newest(find, models, optimizer, loader, extra)
        if restored is None:
            raise CheckpointError("there is no checkpoint")  # `store.find` has said so before
        return restored

    def _find(self, path: str | Path | None, passed_over: dict[Path, str]) -> Path:
        return store.find(self._folder("rt.load", path).absolute(), passed_over)

    def _find_newest(self, passed_over: dict[Path, str]) -> Path | None:
        return store.find_newest(self._folder("rt.resume", None).absolute(), passed_over)

    def _load_newest(
        self,
        find: Callable[[dict[Path, str]], Path | None],
        models: Models,
        optimizer: Optimizers,
        loader: Stateful | None,
        extra: Extra,
    ) -> Restored | None:
        """Load what `find` finds; when it is damaged, what it finds next.

        A damaged one may have filled some tensors, and the next one fills them all again.
        """
        passed_over: dict[Path, str] = {}
        while True:
            source = ""
            with self._peers.together():
                if self._context.rank == 0 and (found := find(passed_over)) is not None:
                    source = str(found)
            source = self._peers.from_first(source)
            if not source:
                return None
            try:
                return self._load(Path(source), models, optimizer, loader, extra)
            except DamagedCheckpointError as error:
                if self._context.rank == 0:
                    store.pass_over(Path(source), error.message, passed_over)

    def _load(
        self,
        folder: Path,
        models: Models,
        optimizer: Optimizers,
        loader: Stateful | None,
        extra: Extra,
    ) -> Restored:
        optimizers = each_optimizer(optimizer)
        with self._peers.together():
            manifest = schema.read_manifest(folder)
            index = schema.read_index(folder, manifest)
            targets = Targets(self._names(models), optimizers, index)
            check_extra(manifest, loader, extra)
        # With a pipeline each rank takes only the tensors of its stages, so ranks answer together.
        check_taken(self._peers.any_of(targets.taken), index)
        with self._peers.together(), DataFiles(folder, manifest.checksums) as files:
            # The loader first: it may refuse the position, and then no tensor has changed yet.
            if loader is not None:
                loader.load_state_dict(manifest.loader or {})
            self._read(folder, files, index, targets)
            targets.apply()
            for name, value in (extra or {}).items():
                if isinstance(value, Stateful):
                    user_state.restore_extra(value, manifest.extra[name])
            if optimizers:
                generators.restore_saved(manifest, index, files, self._context, self._step_rngs)
        return Restored(path=folder, step=manifest.step, extra=manifest.extra)

    def _read(self, folder: Path, files: DataFiles, index: schema.Index, targets: Targets) -> None:
        """Fill the tensors of a load."""
        del folder, index
        plans.read(files, targets.tensors)

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
            Number of steps that are done; 0 without a checkpoint.

        Raises:
            CheckpointError: No checkpoint of the directory can be used, the newest sound one does
                not fit, or no directory is configured.
        """
        self.finish()
        self._loader, self._extra, self._step = loader, extra, 0
        restored = self._load_newest(self._find_newest, models, optimizer, loader, extra)
        if restored is not None:
            self._step = restored.step
        return self._step

    def after_step(self, models: Models, optimizer: Optimizers) -> None:
        """Count a step; if it is one to save, have `before_step` save it.

        By then a learning-rate scheduler, which moves after the step, has moved.
        """
        settings = self._settings
        self._step += 1
        if settings and settings.every and self._step % settings.every == 0:
            moment = self._moment(self._step, self._loader)
            self._due = partial(self._save, None, models, optimizer, (moment, self._extra))

    def before_step(self, within: timedelta = DEADLINE) -> None:
        """Write the checkpoint that `after_step` noted, if one is due.

        Loader and generators are saved as they were right after the step.  Ranks meet here at
        their next step or at their end, so a rank that ends early still takes part.
        """
        if self._due is not None:
            due, self._due = self._due, None
            self._join()  # the writer thread uses the same process group
            self._peers.meet(within)
            due()

    def finish(self) -> None:
        """Wait until every checkpoint is complete; call it before a job ends well.

        Raises:
            CheckpointError: A checkpoint could not be written.
        """
        self.before_step()
        self._join()

    def finish_at_exit(self, within: timedelta = AT_EXIT) -> None:
        """Do what `finish` does, but wait only so long for ranks that may have ended early.

        Raises:
            CheckpointError: The last checkpoint could not be written.
        """
        self.before_step(within)
        self._join()

    def write_strategy(
        self, path: str | Path, models: Models, stages: Sequence[int] | None = None
    ) -> None:
        """Write the layout of each parameter of the job; see `strategy_file`.

        Args:
            path: Path of the file, which rank 0 replaces.
            models: As in `save`.
            stages: Pipeline stage of each model; None counts from this rank's stage
                on, in steps of the number of pipeline ranks.

        Raises:
            CheckpointError: It cannot be written.
        """
        layout = self._context.layout
        first = self._context.coordinate.get(PIPELINE_AXIS, 0)
        count = len(each_model(models))
        numbers = stages or [first + n * layout.size(PIPELINE_AXIS) for n in range(count)]
        with self._peers.together():
            own = describe(models, numbers)
        parts = self._peers.gather(own, dict[str, ParameterStrategy])
        with self._peers.together():
            if self._context.rank == 0:
                write_strategy(path, merge(parts))

    def _names(self, models: Models) -> TensorNames:
        data_rank = self._context.coordinate.get(DATA_AXIS, 0)
        return TensorNames(self._config.reduce.exclude, data_rank, models)

    def _join(self) -> None:
        """Wait for the writer thread, and raise the error that it ended with."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    @property
    def _is_sharded_by_script(self) -> bool:
        """Whether the script itself may shard tensors, over an axis beside `dp`."""
        sizes = self._context.layout.axes
        return self._config.mode == "manual" and any(
            size > 1 for axis, size in sizes.items() if axis != DATA_AXIS
        )

    def _moment(self, step: int, loader: Stateful | None) -> Moment:
        state = None if loader is None else plain(loader.state_dict(), "state of the loader")
        random = generators.capture(self._context.device)
        for number, (first, *_) in enumerate(self._step_rngs):
            random[f"{generators.DRAWS}{number}"] = first.state
        return Moment(step=step, loader=state, random=random)

    def _collect(
        self, names: TensorNames, optimizers: Sequence[Optimizer], moment: Moment
    ) -> State:
        state = collect(names, optimizers)
        for kind, own in moment.random.items():
            state.tensors[f"{generators.RANDOM}{self._context.rank}.{kind}"] = own
        return state

    def _manifest(self, moment: Moment, extra: Extra) -> schema.Manifest:
        return schema.Manifest(
            format=schema.FORMAT,
            step=moment.step,
            world_size=self._context.world_size,
            mesh=self._context.layout.axes,
            ranks=[*self._context.layout.ranks],
            msrun=__version__,
            torch=str(torch.__version__),
            files={},
            loader=moment.loader,
            extra={name: plain_extra(name, value) for name, value in (extra or {}).items()},
        )

    def _divide(self, state: State) -> plans.WriteDivision:
        """Return this rank's share of the writing; that of the last save if no rank has changed."""
        peers, last = self._peers, self._division
        [is_new] = peers.any_of([last is None or last.signature != plans.signature(state)])
        if last is not None and not is_new:
            return last
        with peers.together():
            proposal = plans.propose(state)
        proposals = peers.gather(proposal, plans.Proposal)
        writes: list[plans.RankWrites] = []
        layout = plans.StorageLayout()
        with peers.together():
            if self._context.rank == 0:
                writes, layout = plans.divide(proposals)
        return plans.accept(state, peers.scatter(writes, plans.RankWrites), layout)

    def _compare(self, state: State) -> None:
        """Refuse plain tensors that differ between ranks, of which one rank would write its own."""
        with self._peers.together():
            own = plans.digests(state)
        each = self._peers.gather(own, dict[str, bytes])
        with self._peers.together():
            plans.compare(each)

    def _write(
        self,
        folder: Path,
        file: FilePlan | None,
        staged: plans.Staged,
        commit: Callable[[dict[str, str]], None] | None,
    ) -> None:
        """Write this rank's file; when all ranks have, rank 0 makes the directory a checkpoint."""
        name, own = plans.file_name(self._context.rank), ""
        try:
            with self._peers.together():
                if file is not None:
                    own = write_file(folder / name, file, partial(plans.take, staged))
                    store.sync_directory(folder)
            # `together` above was the barrier: now every file is written and synced.
            of_ranks = self._peers.gather((name, own), tuple[str, str])
            with self._peers.together():
                if commit is not None:
                    commit({name: checksums for name, checksums in of_ranks if checksums})
        except Exception:
            if self._context.rank == 0:
                store.discard(folder)
            raise

    def _in_background(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the next save or the end raises it
            self._failure = error

    def _target(self, path: str | Path | None, step: int) -> tuple[Path, int]:
        """Return the directory to write and the number of steps, as rank 0 has them."""
        folder = self._folder("rt.save", path)
        target = store.step_path(folder, step) if path is None else folder
        steps, _, name = self._peers.from_first(f"{step:d} {target.absolute()}").partition(" ")
        return Path(name), int(steps)

    def _folder(self, who: str, path: str | Path | None) -> Path:
        if path is not None:
            return Path(path)
        if self._settings is None:
            hint = f"set {ROOT}.checkpoint.dir, or name a directory"
            raise CheckpointError(f"{who} knows no directory", hint=hint)
        return Path(self._settings.dir)
