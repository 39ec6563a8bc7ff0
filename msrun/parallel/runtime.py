"""`msrun.init()` and the runtime, the one object that a training script uses.

The life of a rank:

1. `init` reads identity and configuration, and checks both by arithmetic.  Only then does it pick
   the device and join the process group, so a refusal leaves nothing behind.  An existing process
   group is adopted, and not destroyed at the end.  `Runtime` makes the mesh with its groups; with
   `mesh: auto` the first `shard` does.
2. `shard` makes a model parallel and keeps a `ShardedModel` with what its steps need, in a weak
   mapping: the script owns the model, and the runtime must not keep it alive.
3. `step` trains on one batch.  A checkpoint that became due after a step is written at the start of
   the next one, so that a learning-rate scheduler, which moves between the two, has moved.
4. `close` leaves the process group.  At the end of a `with` block or of the process, checkpoints
   are finished first.  After an uncaught exception a rank with peers does neither: its peers learn
   of the failure from the death of the process.

A process has one runtime, `_current`, as it has one default process group.

The runtime decides little: each method hands the `RankContext` and the configuration to the module
of its feature, which does not know the runtime.  These modules are imported inside the methods.  A
rank of torchrun waits for every import by itself (`torch.distributed.tensor` alone takes a second),
so a script pays only for features that it uses.  Under msrun the forkserver has done the imports
before it forks the ranks (`preload`, `config.preloads`).
"""

# tidy: long file, the public methods of one object: each is a docstring and a call of its feature

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self, TypeVar, Unpack

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from msrun import environ
from msrun.environ import RankIdentity
from msrun.errors import ConfigError, ModelError, UsageError
from msrun.identity import read_identity
from msrun.parallel import device as devices
from msrun.parallel.axes import use_axes
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS, ROOT, ParallelConfig
from msrun.parallel.config_file import read_config
from msrun.parallel.group import join
from msrun.parallel.layout import check_world
from msrun.parallel.notation.mesh_layout import MeshLayout
from msrun.parallel.rank_context import BatchWeight, Rank, RankContext, placed
from msrun.parallel.replicas import seed_everything
from msrun.units import parse_size
from msrun.worker.beat import beat

# Methods import their features themselves: see the end of the docstring.
if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.utils.hooks import RemovableHandle

    from msrun.parallel.auto.random_steps.step_rng import StepRng
    from msrun.parallel.checkpoint.api import Checkpoints
    from msrun.parallel.data import LoaderOptions, MeshLoader, SizedDataset
    from msrun.parallel.data_parallel.stream import StreamLoader
    from msrun.parallel.deferred.init import DeferredInit
    from msrun.parallel.foreach.plain_steps import PlainSteps
    from msrun.parallel.layers.precision import LossScale
    from msrun.parallel.losses.metrics import StepMetrics
    from msrun.parallel.losses.plain_loops.weights import PlainLosses
    from msrun.parallel.servers.remote import RemoteParameters
    from msrun.parallel.sharded_model import KnownOptimizers, ShardedModel
    from msrun.parallel.step import LossFunction
    from msrun.parallel.verify.verifier import Verifier
    from msrun.parallel.watchdog.watchdog import Watchdog
    from msrun.parallel.weights.export import Exporter
    from msrun.parallel.weights.load import PretrainedKeys
    from msrun.parallel.weights.origin import Origin

Source = str | Path | Mapping[str, Any] | ParallelConfig | None
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


class Runtime:
    """One rank of a job: its device, its mesh, and models made parallel by the configuration.

    Made by `init`.  As a context manager it leaves the process group at the end of the block.

    Attributes:
        rank: Global rank, 0 to `world_size` - 1.
        world_size: Ranks in the job.
        local_rank: Rank on its node, from 0.
        local_world_size: Ranks on its node.
        node_rank: Number of its node, from 0; None if its starter does not give it.
        generation: Number of times the job has formed again; 0 first.
        device: Device of this rank.
        config: The parallel configuration.
        loss_scale: Factor of the loss with `precision: fp16`, for `extra` of checkpoints; else
            None.
    """

    def __init__(
        self,
        identity: RankIdentity,
        config: ParallelConfig,
        device: torch.device,
        *,
        owns_group: bool,
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_rank = identity.local_rank
        self.local_world_size = identity.local_world_size
        self.node_rank = identity.node_rank
        self.generation = identity.generation
        self.config = config
        self.device = device
        self._unplaced = Rank(
            rank=self.rank, world_size=self.world_size, device=device, batch=BatchWeight()
        )
        # With `mesh: auto` the first `shard` makes the mesh.
        self._place = self._unplaced if config.mesh == "auto" else self._unplaced.place(config)
        self._owns_group = owns_group
        self._models: weakref.WeakKeyDictionary[nn.Module, ShardedModel] = (
            weakref.WeakKeyDictionary()
        )
        # Generators of each model that a plan of mode auto runs, in the order of `shard`: a
        # checkpoint stores and restores them by this position.
        self._step_rngs: list[Sequence[StepRng]] = []
        self._deferred: DeferredInit | None = None
        self._known: KnownOptimizers | None = None
        self._remote: RemoteParameters | None = None
        self._verifiers: list[Verifier] = []
        self._wrappers: RemovableHandle | None = None
        self._plain_steps: PlainSteps | None = None
        self._plain_losses: PlainLosses | None = None
        self._watchdog: Watchdog | None = None
        self.loss_scale: LossScale | None = None
        if config.precision == "fp16":
            from msrun.parallel.layers.precision import LossScale

            self.loss_scale = LossScale()
        self._verify_report = environ.verify_report(environ.current())
        use_axes(self.group)
        if config.seed is not None:
            seed_everything(config.seed)

    @functools.cached_property
    def _metrics(self) -> StepMetrics:
        from msrun.parallel.losses.metrics import StepMetrics

        return StepMetrics()

    @property
    def context(self) -> RankContext:
        """This rank on its mesh.

        Raises:
            ConfigError: With `mesh: auto`, `shard` was not called yet.
        """
        return placed(self._place, self.config)

    @property
    def layout(self) -> MeshLayout:
        """The mesh by arithmetic: sizes, coordinates and groups of all ranks.

        Raises:
            ConfigError: With `mesh: auto`, `shard` was not called yet.
        """
        return self.context.configured.layout

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh with its process groups.

        Raises:
            ConfigError: With `mesh: auto`, `shard` was not called yet.
        """
        return self.context.configured.mesh

    @property
    def batch_weight(self) -> float:
        """Weight of the current batch of `loader` in a mean over the job; 1 if all are equal.

        A plain loop multiplies its loss by this weight, so that every sample of an uneven last
        batch counts once.  `step` does so by itself.
        """
        return self._unplaced.batch.read()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def coordinate(self) -> dict[str, int]:
        """Axis name -> this rank's index on it."""
        return self.context.configured.coordinate

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of this rank along `axis`.

        Raises:
            ConfigError: The mesh has no such axis.
        """
        return self.context.configured.group(axis)

    def print(
        self,
        *values: object,
        sep: str | None = " ",
        end: str | None = "\n",
        file: IO[str] | None = None,
        flush: bool = True,
    ) -> None:
        """Print on rank 0 alone, as the built-in `print` does."""
        if self.is_main:
            print(*values, sep=sep, end=end, file=file, flush=flush)

    def barrier(self) -> None:
        """Wait until every rank of the job has called this."""
        dist.barrier(device_ids=None if self.device.type == "cpu" else [self.device.index or 0])

    def beat(self) -> None:
        """Report that this rank makes progress, as `step` does by itself; see `msrun.beat`."""
        beat()

    @contextlib.contextmanager
    def init_on_meta(self) -> Iterator[None]:
        """Make a model without memory inside the block, so that it may be larger than a rank.

        `shard` then gives each rank its part, with the values that one process would have drawn.
        """
        from msrun.parallel.deferred.fill import share_random_state
        from msrun.parallel.deferred.init import DeferredInit

        block = self._deferred
        # Blocks that follow each other before `shard` record in one log, so that values are drawn
        # in the order of the script.
        if block is None or not (block.log.is_open or block.is_pending()):
            if self.world_size > 1:
                share_random_state(self.device)
            self._deferred = block = DeferredInit()
        with block:
            yield

    def shard(
        self, model: nn.Module, sample: Sequence[object] | Mapping[str, object] | None = None
    ) -> nn.Module:
        """Make `model` parallel as configured and return the module to train.

        All ranks call it with the same model; parameters and buffers get the values of rank 0.
        With a pipeline the result has this rank's modules, under their original names; otherwise
        it is `model`, changed in place.

        Args:
            model: The model; with a pipeline it is consumed.
            sample: Inputs of one local batch, from which `pipeline: {stages: auto}` balances the
                stages and `mode: auto` searches a plan.  With `mesh: auto` the inputs of a global
                batch, since the mesh decides the size of a local one.  A pipeline also takes them
                by name, and needs them where `torch.fx` cannot trace the model.

        Raises:
            ConfigError: The configuration does not fit the mesh or the names of the model.
            ModelError: The model cannot train under it as in one process.
        """
        from msrun.parallel.checkpoint.state import WHOLE_NAMES
        from msrun.parallel.shard import shard_model
        from msrun.parallel.weights.origin import Origin
        from msrun.parallel.weights.state_dicts import is_divided, prepare_state_dicts

        if model in self._models:
            raise UsageError(f"{type(model).__name__} is a model of rt.shard already")
        if self._remote:
            raise UsageError(f"{ROOT}.servers: servers have the parameters of another model")
        # With `mesh: auto` every model chooses its mesh, also after an earlier one has.
        rank = self._unplaced if self.config.mesh == "auto" else self.context
        self._refuse_wrappers(model)
        copied = None
        if self.config.verify:
            from msrun.parallel.verify.fit import copy_model

            copied = copy_model(self.config.verified, rank, model)
        # Before the model is taken apart: files of weights have the names that it has now.
        is_consumed = self.config.pipeline is not None or self.config.mode == "auto"
        origin = Origin(model, is_consumed=is_consumed)
        result, state, self._place = shard_model(self.config, rank, model, sample)
        self._note(result, state)
        self._find_remote(result)
        state.origin = origin
        if state.is_pipeline:
            setattr(result, WHOLE_NAMES, origin.first)
        if is_divided(result, is_pipeline=state.is_pipeline):
            prepare_state_dicts(result, origin, state.replicas, is_pipeline=state.is_pipeline)
        if self.config.verify:
            from msrun.parallel.verify.verifier import Verifier

            state.verifier = verifier = Verifier(self.config, self.context, copied)
            verifier.observe(state)
            self._verifiers.append(verifier)
        if state.step_rngs:
            self._step_rngs.append(state.step_rngs)
        # Of the class: some of our models refuse hooks of others.
        nn.Module.register_forward_hook(result, _beat_after)
        return result

    def _note(self, model: nn.Module, state: ShardedModel) -> None:
        """Keep the state of a model, whose steps compare batches if ranks share samples."""
        from msrun.parallel.losses.equal_batches import EqualBatches
        from msrun.parallel.losses.plain_loops.calls import watch_plain_loop
        from msrun.parallel.losses.plain_loops.weights import PlainLosses
        from msrun.parallel.watchdog.watchdog import Watchdog, scope_of

        self._models[model] = state
        if self.world_size > 1:
            if self.config.mode != "manual":
                self._watchdog = self._watchdog or Watchdog()
                scope = scope_of(self.config, self.context, model)
                self._watchdog.watch(model, scope, state.order)
            state.batches = EqualBatches(self.config, self.context)
            if not state.is_pipeline:
                state.batches.watch(model)
                self._plain_losses = losses = self._plain_losses or PlainLosses()
                losses.begin_again()
                watch = losses, self.config, self.context
                state.plain_loop = watch_plain_loop(model, state, *watch)

    def _refuse_wrappers(self, model: nn.Module) -> None:
        """Refuse modules of others that reduce gradients, in `model` now and around it later.

        And look at optimizers that step without having come through the runtime.
        """
        if self._plain_losses:  # what looks at a call would look at how the model is taken apart
            self._plain_losses.drop()
        if self.world_size > 1 and self.config.mode != "manual":
            from msrun.parallel.data_parallel import other_wrappers
            from msrun.parallel.foreach.plain_steps import PlainSteps

            if self._plain_steps is None:
                self._plain_steps = PlainSteps(
                    lambda: [*self._models.values()], self._check_plain, self._has_replicas
                )
                self._plain_steps.begin()
            other_wrappers.check_unwrapped(model)
            self._wrappers = self._wrappers or other_wrappers.watch(
                functools.partial(list, self._models)
            )

    def set_param_ps(self, what: nn.Module | Parameter, *, recurse: bool = True) -> None:
        """Have the parameters of a module, or one, live on parameter servers, before `shard`.

        As patterns in `servers.params` do, and MindSpore's method of that name.

        Args:
            what: A module of the model, or a parameter.
            recurse: Whether those of its submodules live there, too.

        Raises:
            UsageError: The configuration has no `servers`, or there is no parameter.
        """
        from msrun.parallel.servers.parameters.marks import mark

        mark(self.config, what, recurse=recurse)

    def _find_remote(self, model: nn.Module) -> None:
        """Have the configured parameters of `model` live on servers."""
        if self.config.servers:
            from msrun.parallel.servers.remote import RemoteParameters

            self._remote = RemoteParameters(self.config, self.context, model, self.generation)
            self._models[model].remote = self._remote

    def optimizer(self, optimizer: OptimizerT) -> OptimizerT:
        """Check `optimizer`, made of parameters of a sharded model, and return it.

        Its groups and their options stay as they are; a group may hold both plain and sharded
        parameters.

        Raises:
            ModelError: It holds parameters that `shard` replaced: make it after `shard`.  Or its
                kind needs replicated parameters, or the loss several times a step.
        """
        from msrun.parallel.data_parallel.mixed_groups import support_mixed_groups
        from msrun.parallel.data_parallel.optimizer_kinds import check_kind
        from msrun.parallel.foreach.step_hooks import after_step, before_step
        from msrun.parallel.weights.state_dicts import prepare_optimizer

        for sharded in self._models.values():
            sharded.check_optimizer(optimizer)
            sharded.watch(optimizer)
            if sharded.verifier:
                sharded.verifier.watch(optimizer)
        self._check_known(optimizer)
        check_kind(optimizer)
        self._release_before(optimizer)
        support_mixed_groups(optimizer)
        if self.loss_scale:
            before_step(optimizer, self.loss_scale.refuse_plain_step)
        if self._verify_report:
            after_step(optimizer, self._end_if_verified)
        prepare_optimizer(optimizer, is_pipeline=any(m.is_pipeline for m in self._models.values()))
        if self._remote:
            self._remote.attach(optimizer)
        return optimizer

    def loader(
        self,
        dataset: SizedDataset | Iterable[object],
        batch_size: int | None = None,
        **options: Unpack[LoaderOptions],
    ) -> MeshLoader | StreamLoader:
        """Return a `DataLoader` over this rank's part of `dataset`.

        Args:
            dataset: A dataset with a length, or an iterable one, which every rank reads whole.
            batch_size: Samples of one batch of one data-parallel rank; there is no default.
            options: `shuffle`, `seed`, `drop_last`, and the options of `DataLoader`.

        Raises:
            UsageError: There is no `batch_size`, or the last batch would leave some rank without a
                sample.
        """
        from msrun.parallel.data import make_loader

        if self.context.images:
            from msrun.parallel.images.loader import make_image_loader as make

            return make(self.config, self.context, dataset, batch_size, **options)
        loader = make_loader(self.context.configured, dataset, batch_size, **options)
        servers = self.config.servers
        if servers and servers.cache and servers.cache.prefetch:
            from msrun.parallel.servers.caching.ahead import one_ahead

            loader.drawn = functools.partial(one_ahead, self._announce)
        return loader

    def _announce(self, batch: object, following: object) -> None:
        """Have the rows of the next batch asked for while this one computes."""
        if self._remote:
            self._remote.announce(batch, following)

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction | object,
        *batch: object,
        max_norm: float | None = None,
    ) -> Tensor:
        """Train on one local batch: forward, backward, reduction, optimizer step.

        Args:
            model: A result of `shard`.
            optimizer: Optimizer of its parameters; gradients are zeroed first.
            loss_fn: Returns the loss from the model's output and the target: the mean over the
                samples, or the sum of what is averaged and its count.  Without it the model returns
                its loss, in its output or as the output's `loss`.
            batch: Inputs of the model, then the target of `loss_fn`.  A mapping as the only input
                has inputs by name.
            max_norm: Global norm to clip gradients to; None does not clip.

        Returns:
            The loss of the batch of all ranks, the same on every rank.

        Raises:
            ModelError: The batch or the loss does not fit, or the kind of the optimizer is refused.
        """
        from msrun.parallel.data_parallel.joint_updates import check_stage
        from msrun.parallel.data_parallel.optimizer_kinds import check_kind
        from msrun.parallel.layers.norm_functions import all_left
        from msrun.parallel.step import check_clip, run_step

        check_kind(optimizer)
        sharded = self.sharded(model)
        if sharded.is_pipeline:
            check_stage(optimizer)
        self._check_known(optimizer)
        if max_norm is not None:
            check_clip(self.config, self.context)
        if self._remote:
            self._remote.attach(optimizer)
        saves = self.config.checkpoint is not None and self.config.checkpoint.every > 0
        if saves:
            self.checkpoints.before_step()
        watched = self._watchdog.in_step() if self._watchdog else contextlib.nullcontext()
        with watched, all_left():
            loss = run_step(
                self.config,
                self.context,
                sharded,
                optimizer=optimizer,
                loss_fn=loss_fn if callable(loss_fn) else None,
                batch=batch if callable(loss_fn) or loss_fn is None else (loss_fn, *batch),
                max_norm=max_norm,
                loss_scale=self.loss_scale,
            )
        if saves:
            self.checkpoints.after_step(model, optimizer)
        beat()
        self._end_if_verified()
        return loss

    def _end_if_verified(self) -> None:
        """End the script of `msrun verify` once every model has taken its step."""
        if self._verify_report:
            from msrun.parallel.verify.report import end_if_verified

            end_if_verified(self._verify_report, self._verifiers, self.context)

    @functools.cached_property
    def checkpoints(self) -> Checkpoints:
        """Saves and loads checkpoints.  The first use makes a process group: all ranks together."""
        from msrun.parallel.checkpoint.api import Checkpoints

        if self._remote:
            from msrun.parallel.servers.checkpoints import RemoteCheckpoints

            return RemoteCheckpoints(self._remote, self.config, self.context, self._step_rngs)
        return Checkpoints(self.config, self.context, self._step_rngs)

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        step: int,
        path: str | Path | None = None,
        loader: MeshLoader | StreamLoader | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        """Write a checkpoint that any number of ranks in any layout can load; all ranks call it.

        Args:
            model: A result of `shard`.
            optimizer: Optimizer whose state to save; None saves none.
            step: Number of steps that are done.
            path: Directory of this checkpoint; None makes `step_N` in the configured directory.
            loader: Loader whose position to save; None saves none.
            extra: Name -> plain JSON value, or an object with `state_dict`, such as a scheduler.

        Raises:
            CheckpointError: It could not be written, here or on another rank.
        """
        if model in self._models:
            self._models[model].compare_replicas()
        self.checkpoints.save(path, model, optimizer, step=step, loader=loader, extra=extra)

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        path: str | Path | None = None,
        loader: MeshLoader | StreamLoader | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> int:
        """Load a checkpoint, or the newest of a directory; return its number of steps.

        Args:
            model: A result of `shard`, trained or not.
            optimizer: Optimizer to restore, and with it random generators; None restores neither.
            path: A checkpoint or a directory of them; None is the configured directory.
            loader: Loader to move to the saved position; None moves none.
            extra: Name -> object with `load_state_dict` to restore.

        Raises:
            CheckpointError: There is none, or it does not fit; then nothing was changed.
        """
        restored = self.checkpoints.load(path, model, optimizer, loader=loader, extra=extra)
        return restored.step

    def resume(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: MeshLoader | StreamLoader | None = None,
        *,
        extra: Mapping[str, object] | None = None,
    ) -> int:
        """Continue from the newest checkpoint of the configured directory, if there is one.

        Automatic checkpoints from now on include `loader` and `extra`.

        Returns:
            Number of steps that are done; 0 at the first start.

        Raises:
            CheckpointError: The checkpoint does not fit, or no directory is configured.
        """
        return self.checkpoints.resume(model, optimizer, loader, extra=extra)

    def load_pretrained(
        self, model: nn.Module, path: str | Path, *, strict: bool = True
    ) -> PretrainedKeys:
        """Fill `model` with pretrained weights; all ranks call it, and each reads its own parts.

        Args:
            model: A result of `shard`.  A model before it is filled whole on every rank.
            path: What `save_pretrained` of transformers, diffusers or peft wrote, or a
                `.safetensors`, `.bin`, `.pt` file or an index of several.
            strict: Refuse names that do not match.

        Returns:
            Names that the files lack and that the model lacks, as `load_state_dict` of torch does.

        Raises:
            CheckpointError: The files cannot be read or do not fit; then nothing was changed,
                unless a file turned out damaged in the middle, or has two values of one tensor.
        """
        from msrun.parallel.weights.load import load_pretrained

        with self._whole(is_replaced=True):
            checkpoints = self.checkpoints
            checkpoints.finish()
            return load_pretrained(
                checkpoints.peers, model, self._origin(model), Path(path), strict=strict
            )

    def save_pretrained(
        self, model: nn.Module, path: str | Path, *, max_shard_size: int | str = "5GB"
    ) -> None:
        """Write the weights of `model` in a directory that `from_pretrained` loads.

        All ranks call it.  A rank needs memory to gather one whole tensor.  Of a model of peft the
        adapters are written.

        Args:
            model: A result of `shard`.
            path: The directory; its other files stay.
            max_shard_size: Bytes of one file, such as `5GB`; a larger tensor has its own file.

        Raises:
            CheckpointError: It could not be written, here or on another rank.
        """
        with self._whole():
            exporter = self._exporter(model)
            exporter.save(Path(path), parse_size(str(max_shard_size)))

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the state dict of the unmodified model on rank 0, and an empty one elsewhere.

        All ranks call it.  Tensors are whole and on the host; rank 0 needs memory for all of them.

        Raises:
            CheckpointError: A tensor has no values.
        """
        with self._whole():
            return self._exporter(model).state_dict()

    def _whole(self, *, is_replaced: bool = False) -> contextlib.AbstractContextManager[None]:
        """Have parameters that live on servers here inside the block, which may replace them."""
        remote = self._remote
        return remote.whole(is_replaced=is_replaced) if remote else contextlib.nullcontext()

    def _exporter(self, model: nn.Module) -> Exporter:
        from msrun.parallel.weights.export import Exporter

        sharded = self._models.get(model)
        if sharded:
            sharded.compare_replicas()
        checkpoints = self.checkpoints
        checkpoints.finish()
        stage = self.coordinate.get(PIPELINE_AXIS, 0)
        return Exporter(checkpoints.peers, stage, self.device, model, self._origin(model))

    def _origin(self, model: nn.Module) -> Origin:
        from msrun.parallel.weights.origin import Origin

        sharded = self._models.get(model)
        origin = sharded.origin if sharded else None
        return Origin(model, is_consumed=False) if origin is None else origin

    def gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return `x` of all data-parallel ranks, joined along `dim` in the order of the batch.

        For losses that compare the samples of a batch with each other.  Gradients flow back to each
        rank from the losses of all ranks, so they are those of one process: whether each rank has
        the mean loss of its own samples against all, or the loss of all.

        Raises:
            UsageError: A step has several micro-batches, of which only one is there.
        """
        from msrun.parallel.collectives import gather_batch

        return gather_batch(self.context, x, dim)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients of `model` on this rank, for all but the last backward of a step."""
        with self.sharded(model).paused(by_script=True):
            yield

    def clip_grad_norm_(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale the gradients of `model` so that their global norm is at most `max_norm`.

        Returns:
            The norm before clipping, over all ranks and the whole model.
        """
        from msrun.parallel.step import clip

        return clip(self.config, self.context, self.sharded(model), max_norm)

    def sharded(self, model: nn.Module) -> ShardedModel:
        """Return the state that `shard` keeps for `model`.

        Raises:
            UsageError: `model` is not a result of `shard`.
        """
        sharded = self._models.get(model)
        if sharded is None:
            hint = "pass what rt.shard returned; model.compile() compiles it in place"
            raise UsageError(f"{type(model).__name__} is not a model of rt.shard", hint=hint)
        return sharded

    def _check_known(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer of parameters that data-parallel ranks do not train together."""
        if self._known is None:
            from msrun.parallel.sharded_model import KnownOptimizers

            self._known = KnownOptimizers()
        if self._has_replicas():
            self._known.check(optimizer, list(self._models.values()))
        if self._plain_steps:
            self._plain_steps.know(optimizer)

    def _release_before(self, optimizer: torch.optim.Optimizer) -> None:
        """Have other models release gathered parameters before `optimizer` steps.

        Of a model that no backward pass follows they stay gathered, and a script may change them by
        what the optimizer makes of its own, as in a target network.
        """
        from msrun.parallel.foreach.step_hooks import before_update

        models, stepping = self._models, weakref.ref(optimizer)

        def release() -> None:
            for model in [*models.values()]:
                if stepping() not in model.watched:
                    model.release()

        before_update(optimizer, release)

    def _has_replicas(self) -> bool:
        """Return whether data-parallel ranks are to train the same."""
        return self.config.mode != "manual" and self.context.layout.size(DATA_AXIS) > 1

    def _check_plain(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer of a model's parameters in a plain loop, as `optimizer` does.

        Raises:
            ModelError: It would be wrong on shards.
        """
        from msrun.parallel.data_parallel.optimizer_kinds import check_kind, support_several_losses
        from msrun.parallel.foreach.plain_steps import check_lists

        self._release_before(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS):
            op = self.config.reduce.op if self._has_replicas() else None
            support_several_losses(optimizer, op)
        else:
            check_kind(optimizer)
        check_lists(optimizer)
        if self.loss_scale:
            self.loss_scale.refuse_plain_step()

    def mean_over_data(self, value: Tensor) -> Tensor:
        """Return the mean of `value` over the data-parallel ranks, weighted by their samples.

        Raises:
            ModelError: Ranks have parts of it, such as of the gradient of a sharded parameter.
        """
        from msrun.parallel.local import is_sharded
        from msrun.parallel.step import mean_over_data

        if is_sharded(value) and self.context.layout.size(DATA_AXIS) > 1:
            raise ModelError(
                "rt.mean_over_data got a sharded tensor, of which ranks have parts",
                hint="backward() has averaged gradients of sharded parameters; those inside of "
                "rt.no_sync need zero 0",
            )
        return mean_over_data(self.context, value)

    def metric(self, name: str, total: Tensor | float, count: Tensor | float = 1) -> None:
        """Note a number of a part of the batch; a loss function calls it.

        Args:
            name: Of the number.
            total: Its sum over the part, such as the samples that were right.
            count: What divides the sum, such as the samples.

        Raises:
            ModelError: One of them is not one number.
        """
        self._metrics.add(self.context, name, total, count)

    def metrics(self) -> dict[str, float]:
        """Return the quotient of each `metric`, over all ranks and all steps since the last call.

        All ranks call it together, and get the same.
        """
        return self._metrics.read(self.context)

    def finish(self) -> None:
        """Wait until every checkpoint is written; a process that ends well does so by itself.

        Raises:
            CheckpointError: A checkpoint could not be written.
        """
        # The cached property exists only if something was saved or loaded; to make it here would
        # be collective.
        for sharded in self._models.values():
            if sharded.host_step:
                sharded.host_step.settle()
        if "checkpoints" in self.__dict__:
            self.checkpoints.finish()

    def close(self) -> None:
        """Leave the process group, if `init` made it; a second call does nothing."""
        _forget(self)
        if self._watchdog:
            self._watchdog.close()
        if self._wrappers:
            self._wrappers.remove()
        if self._plain_steps:
            self._plain_steps.end()
        if self._plain_losses:
            self._plain_losses.end()
        if self._remote:
            self._remote.close()
        if self.config.verify and self.is_main:
            from msrun.parallel.verify.report import warn_of_nothing, write_report

            warn_of_nothing(self._verifiers)
            if self._verify_report:
                write_report(self._verify_report, self._verifiers)
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        self.close()


_current: Runtime | None = None


def _beat_after(*_: object) -> None:
    """Count a forward pass as progress, as those of an evaluation, which has no steps."""
    if not torch.compiler.is_compiling():
        beat()


def _forget(runtime: Runtime) -> None:
    global _current  # noqa: PLW0603 - the process has one process group, and one runtime
    if _current is runtime:
        _current = None
        use_axes(None)


def init(
    config: Source = None,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout: float | None = None,
) -> Runtime:
    """Return this process's runtime; the first call waits until all ranks have joined the job.

    Args:
        config: Parallel configuration: path of a YAML file or a mapping; None takes the file
            that the launcher passed, or plain data parallel over all ranks.
        backend: Process-group backend; None takes that of the device.
        device: Device of this rank; None takes its own accelerator, or the CPU.
        timeout: Seconds that a collective may take; None is torch's default.

    Raises:
        UsageError: The configuration, environment or device is refused; then no process group
            was made.
    """
    global _current  # noqa: PLW0603 - as in `_forget`
    if _current is not None:
        if config is not None and _settings(config, environ.current()) != _current.config:
            raise ConfigError("msrun.init was called before with another configuration")
        return _current
    env = environ.current()
    identity = read_identity(env)
    settings = _settings(environ.config_file(env) if config is None else config, env)
    is_adopted = dist.is_initialized()
    # Before the group exists: a mesh that does not fit is one error, and no rank waits for peers.
    check_world(settings, dist.get_world_size() if is_adopted else identity.world_size)
    own = devices.pick_device(device, identity)
    if not is_adopted:
        join(identity, env, backend or devices.backend_for(own), timeout)
    try:
        _current = Runtime(identity, settings, own, owns_group=not is_adopted)
        if not is_adopted and own.type == "cpu":
            # Gloo connects all pairs when a group is made.  A rank that leaves while its peers
            # still connect makes them fail, so all of them wait here until they are connected.
            _current.barrier()
    except BaseException:
        # Without a runtime nobody would destroy the group, and a second `init` would adopt it.
        _current = None
        if not is_adopted:
            dist.destroy_process_group()
        raise
    atexit.register(_close_at_exit, weakref.ref(_current))
    return _current


def _settings(source: Source, env: Mapping[str, str]) -> ParallelConfig:
    """Return the configuration in `source`; under `msrun verify` it verifies a step."""
    config = read_config(source)
    if not environ.verify_report(env) or config.verify:
        return config
    try:
        return msgspec.structs.replace(config, verify=1)
    except ValueError as error:
        raise ConfigError(f"{ROOT}.{error}") from None


def _close_at_exit(reference: weakref.ref[Runtime]) -> None:
    """Finish checkpoints and leave the process group, unless the process ends by an exception.

    After an exception a rank with peers ends without leaving: peers learn of it by its death.
    """
    runtime = reference()
    has_failed = hasattr(sys, "last_value")
    if runtime is None or (has_failed and (runtime.world_size > 1 or runtime.device.type != "cpu")):
        return
    if not has_failed and "checkpoints" in runtime.__dict__:
        runtime.checkpoints.finish_at_exit()
    runtime.close()
    # A process group that is still referenced keeps its threads.  One of them may free a tensor
    # after Python has begun to shut down, which aborts the process, so drop the references first:
    # https://github.com/pytorch/pytorch/pull/179291
    for name in ("_place", "checkpoints"):
        vars(runtime).pop(name, None)
