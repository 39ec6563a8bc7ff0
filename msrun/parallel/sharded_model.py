"""A model after `rt.shard`: the state that its steps need, and checks of it before each step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

import torch
from torch import nn
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel.config import ROOT, ParallelConfig
from msrun.parallel.foreach.global_hooks import check_global_hooks
from msrun.parallel.foreach.step_hooks import before_step, before_update
from msrun.parallel.foreach.whole_values import give_gradient
from msrun.parallel.local import is_sharded
from msrun.parallel.losses.call_hook import CallHook, weakly
from msrun.parallel.losses.decided.decisions import Decisions
from msrun.parallel.losses.pairs.input_rows import InputRows
from msrun.parallel.weights.memory import ParameterMemory, exchanged

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from msrun.parallel.auto.random_steps.step_rng import StepRng
    from msrun.parallel.copies.group import Copies
    from msrun.parallel.data_parallel.collective_order import CollectiveOrder
    from msrun.parallel.data_parallel.parameter_hooks import ParameterHooks
    from msrun.parallel.data_parallel.parameter_snapshot import ParameterSnapshot
    from msrun.parallel.data_parallel.reductions import Reduction
    from msrun.parallel.data_parallel.replica_digest import OptimizerRef, ReplicaDigest
    from msrun.parallel.host.activations import Activations
    from msrun.parallel.host.overlapped_step import OverlappedStep
    from msrun.parallel.losses.equal_batches import EqualBatches
    from msrun.parallel.losses.plain_loops.calls import PlainLoop
    from msrun.parallel.losses.sample_dims import Known
    from msrun.parallel.pipeline.model import PipelineModel
    from msrun.parallel.servers.remote import RemoteParameters
    from msrun.parallel.summands.late import LateSums
    from msrun.parallel.weights.origin import Origin

Context = Callable[[], contextlib.AbstractContextManager[Any]]


class _MicroBatches(Protocol):
    """Contexts of the micro-batches of a step; `layers.micro_batches` has them."""

    def before_last(self, model: nn.Module, /) -> contextlib.AbstractContextManager[None]: ...

    def last(self, model: nn.Module, /) -> contextlib.AbstractContextManager[None]: ...


class _Verifier(Protocol):
    """Compares steps with one process; `verify.verifier` has it."""

    def run(self, step: Any, /) -> torch.Tensor: ...

    def watch(self, optimizer: torch.optim.Optimizer, /) -> None: ...


class _Sequences(Protocol):
    """The part of each sequence that a rank has; `context.sequences` has it."""

    def cut(self, model: nn.Module, batch: Any, /) -> Any: ...

    def begin(self, part: Any, /) -> None: ...


class OriginalParameters:
    """The parameters of a model before the first change, to recognise stale optimizers later.

    Args:
        model: The model.
        is_strong: Hold strong references at first.  Parameters of `init_on_meta` need it: torch
            gives them memory in place only while nothing refers to them weakly.
    """

    def __init__(self, model: nn.Module, *, is_strong: bool) -> None:
        self._strong = list(model.parameters()) if is_strong else []
        self._weak = [] if is_strong else [weakref.ref(param) for param in model.parameters()]

    def references(self) -> list[weakref.ref[Parameter]]:
        """Return weak references to all of them."""
        return self._weak or [weakref.ref(param) for param in self._strong]


def refuse_compiled(config: ParallelConfig, *, is_zero: bool) -> None:
    """Refuse what `torch.compile` returned, where modules inside would have to change.

    Args:
        config: The configuration.
        is_zero: Whether there are ranks over which `optimizer.zero` would shard.
    """
    needs = {
        "plan": bool(config.plan),
        "pipeline": config.pipeline is not None,
        "optimizer.zero": is_zero and config.optimizer.zero > 0,
    }
    for key in [key for key, is_set in needs.items() if is_set]:
        inside = "modules without a rule inside" if key == "plan" else "modules inside of it"
        raise ModelError(
            f"{ROOT}.{key}: rt.shard got what torch.compile returned, of which it can shard "
            "nothing that is compiled",
            hint=f"give rt.shard the model itself, and compile {inside} in place: "
            "model.layer.compile()",
        )


def refuse_copies(model: nn.Module, reason: str) -> None:
    """Have `copy.deepcopy(model)` say why it cannot be copied."""

    def refused(_: dict[int, Any]) -> nn.Module:
        raise ModelError(
            f"a model of rt.shard cannot be copied under {reason}",
            hint="copy the model before rt.shard, and pass both to rt.shard",
        )

    model.__deepcopy__ = refused  # type: ignore[assignment]


def prepare_copies(config: ParallelConfig, model: nn.Module, *, is_zero: bool) -> None:
    """Have `copy.deepcopy` say why it does not work on `model`, where it does not."""
    if config.pipeline:
        refuse_copies(model, f"{ROOT}.pipeline")
    elif is_zero:
        refuse_copies(model, f"{ROOT}.optimizer.zero")


_HOOKS = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
    "register_backward_hook",
)


def refuse_hooks(modules: Iterable[tuple[str, nn.Module]], problem: str) -> None:
    """Have modules refuse hooks from now on, which nothing would run as one process does.

    Args:
        modules: By name.
        problem: Why, with %s for the name.
    """
    for name, module in modules:

        def refused(*_: Any, name: str = name, **__: Any) -> NoReturn:
            raise ModelError(
                f"{problem % name}, so a hook on it would not run as in one process",
                hint="put hooks on modules that run as a whole: those that have a stage run once a "
                "micro-batch, and without pipeline and mode: auto all do",
            )

        # Lists are called in no process, so a hook on them never runs.
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            vars(module).update(dict.fromkeys(_HOOKS, refused))


def entered(contexts: Iterable[Context]) -> contextlib.ExitStack:
    """Enter `contexts` in order; the result leaves them all, the last one first."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        return stack.pop_all()


def each(*checks: Callable[[], None]) -> None:
    """Run all of `checks`."""
    for check in checks:
        check()


class ShardedModel:
    """A model after `shard`, with the state that its steps need.

    Args:
        model: The model; only referred to weakly.
        originals: Its parameters before `shard`; some are replaced by now.
        reductions: Reductions of gradients over data-parallel ranks.
        computing: Context that loss and backward pass must run in, such as the guard.
        microbatches: Number of micro-batches that a step splits a local batch into.  A pipeline
            splits its batch itself.
        is_pipeline: Whether the model is a stage of a pipeline.
        has_fixed_shapes: Whether the model takes batches of one size alone.
        excluded: Names of parameters whose gradients are not reduced.
        snapshot: Parameters as of `shard`; None allows changes.
        order: Compares the order in which ranks gather modules; None without ZeRO.
        step_rngs: Random generators of a model that a plan of mode auto runs.
        replicas: Compares replicas now and then; None on one rank.
        micro_batches: What micro-batches do to buffers; None in a pipeline.
        hooks: Gradient hooks of the script, which run once gradients are complete.
        uncompiled: Context in which modules run as they were before `compile`.
        exchanges_tokens: Whether ranks share experts, so that all take part in each backward pass.

    Attributes:
        is_described: Whether the first step has begun, which prints the pipeline.
        is_watched: Whether a step was looked at for what mixes samples, and not refused.
        decisions: What the model decides by values of a part of the batch.
        input_rows: Which inputs micro-batches cut.
        sequences: The part of each sequence that a rank has; None without style `context`.
        known: What is known of each output of a micro-batch of a plan of mode auto.
        verifier: Compares the first steps with one process; None without `verify`.
        batches: Compares the batches of ranks that share samples; None on one rank.
        copies: The copies of each micro-batch; None without.
        activations: Those that wait on the host; None without `offload`.
        host_step: Has steps overlap the next forward; None without `optimizer.offload: overlap`.
        origin: Names and library of the model before `shard`.
        remote: Parameters that live on servers; None without.
        late: Takes summands of gradients in a step; None without an operator plan.
        plain_loop: What ranks compare of a plain loop; None where they have nothing to compare.
    """

    verifier: _Verifier | None = None
    origin: Origin | None = None
    remote: RemoteParameters | None = None
    is_watched = False
    sequences: _Sequences | None = None
    batches: EqualBatches | None = None
    copies: Copies | None = None
    activations: Activations | None = None
    host_step: OverlappedStep | None = None
    known: Sequence[Known] = ()
    late: LateSums | None = None
    plain_loop: PlainLoop | None = None

    def __init__(
        self,
        model: nn.Module,
        originals: Sequence[weakref.ref[Parameter]],
        reductions: Sequence[Reduction],
        computing: Context,
        *,
        microbatches: int = 1,
        is_pipeline: bool = False,
        has_fixed_shapes: bool = False,
        excluded: Collection[str] = (),
        snapshot: ParameterSnapshot | None = None,
        order: CollectiveOrder | None = None,
        step_rngs: Sequence[StepRng] = (),
        replicas: ReplicaDigest | None = None,
        micro_batches: _MicroBatches | None = None,
        hooks: ParameterHooks,
        uncompiled: Context = contextlib.nullcontext,
        exchanges_tokens: bool = False,
    ) -> None:
        self.hooks = hooks
        self.decisions = Decisions()
        self.input_rows = InputRows()
        self.uncompiled = uncompiled
        self.exchanges_tokens = exchanges_tokens
        # Weak, since the runtime maps the model to this object: a strong reference would keep both.
        self._model = weakref.ref(model)
        self._own = set(model.parameters())
        self._divided = [ParameterMemory(param) for param in self._own if is_sharded(param)]
        if self._divided:
            check = CallHook(weakly(self._check_data))
            nn.Module.register_forward_pre_hook(model, check)
        # Optimizer -> how many parameters it held when it was checked.
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self.watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._snapshot = snapshot
        self.order = order
        if order:
            order.before_gather = self.decisions.before_gather
        self.replicas = replicas
        self._micro_batches = micro_batches
        self.step_rngs = step_rngs
        self.is_described = False
        self._gathering: list[weakref.ref[FSDPModule]] = []
        self._excluded = excluded
        self._originals = originals
        self._reductions = reductions
        if reductions:
            forget = CallHook(weakly(self._forget_raised))
            nn.Module.register_forward_pre_hook(model, forget, prepend=True)
        self.computing = computing
        self.microbatches = microbatches
        self.is_pipeline = is_pipeline
        self.has_fixed_shapes = has_fixed_shapes

    def model(self) -> nn.Module:
        """Return the model.

        Raises:
            ReferenceError: Nothing else holds it any more.
        """
        model = self._model()
        if model is None:
            raise ReferenceError("the model of rt.shard is gone")
        return model

    def pipeline(self) -> PipelineModel:
        """Return the model as a stage of a pipeline."""
        return cast("PipelineModel", self.model())

    def parameters(self) -> list[Parameter]:
        """Return this rank's parameters, each once."""
        model = self._model()
        return [] if model is None else list(model.parameters())

    def excluded(self) -> list[Parameter]:
        """Return the parameters whose gradients are not reduced."""
        model = self._model()
        named = [] if model is None else model.named_parameters()
        return [param for name, param in named if name in self._excluded]

    def paused(self, *, by_script: bool = False) -> contextlib.ExitStack:
        """Return an entered context in which gradients accumulate on this rank.

        Args:
            by_script: Whether the script splits its batch by itself.  One process would then run
                each part by itself, too.
        """
        if by_script:
            self.hooks.check_parts()
        paused = [reduction.paused for reduction in self._reductions]
        if self._micro_batches and not by_script:
            paused.append(partial(self._micro_batches.before_last, self.model()))
        return entered(paused)

    def in_step(self, *, looks: bool) -> contextlib.ExitStack:
        """Return an entered context of the forward and backward passes of a step.

        Args:
            looks: Whether the step looks at what the model does.
        """
        contexts: list[Context] = [self.hooks.suspended, self.decisions.in_step]
        if self.order:
            contexts.append(self.order.compared_later)
        if looks or self.decisions.lines:  # what is watched must be seen
            contexts.append(self.uncompiled)
        if self.plain_loop:
            self.plain_loop.leave()
        if self.batches:
            contexts.append(self.batches.in_step)
        if self.late:
            contexts.append(partial(self.late.open, self.microbatches))
        return entered(contexts)

    def _forget_raised(self) -> None:
        """Forget a backward pass that raised on all ranks, and that the script caught."""
        for reduction in self._reductions:
            reduction.forget_raised()

    def completed(self) -> contextlib.ExitStack:
        """Return an entered context of one backward pass, at whose end gradients are reduced."""
        completed = [reduction.completed for reduction in self._reductions]
        if self._micro_batches:
            completed.append(partial(self._micro_batches.last, self.model()))
        return entered(completed)

    def reduce(self) -> None:
        """Reduce the gradients that accumulated while paused."""
        for reduction in self._reductions:
            reduction.reduce()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a model that changed since `shard`, or an optimizer of another model.

        Raises:
            ModelError: The optimizer step would not train this model on all ranks alike.
        """
        if self._snapshot:
            self._snapshot.check()
        if self.host_step:
            self.host_step.check(optimizer)
        self._check_data()
        if self.is_pipeline or self.has_fixed_shapes:
            check_global_hooks("mode: auto" if self.has_fixed_shapes else "pipeline")
        # The walk over all parameters is done again only after `add_param_group`.
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._optimizers.get(optimizer) == count:
            return
        self.check_optimizer(optimizer)
        holds = self.holds(optimizer)
        if self.is_pipeline:
            # Ranks of one stage alone may give it parameters later, which the others cannot know.
            holds = optimizer in self._optimizers or self.pipeline().is_any(flag=holds)
        if not holds:
            name = type(self._model()).__name__
            raise ModelError(f"{type(optimizer).__name__} holds no parameter of {name}")
        self._optimizers[optimizer] = count
        self.watch(optimizer)

    def compare_replicas(self) -> None:
        """Refuse replicas that differ between ranks; all ranks call it.

        Raises:
            RanksDisagreeError: They do.
        """
        if self.replicas:
            self.replicas.compare()

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Have `optimizer` compare the replicas of this model now and then, before it steps."""
        replicas = self.replicas
        # Other ranks compare what theirs holds, and wait for all.
        is_empty = self.is_pipeline and not any(group["params"] for group in optimizer.param_groups)
        if replicas and optimizer not in self.watched and (is_empty or self.holds(optimizer)):
            self.watched.add(optimizer)
            before_update(optimizer, self.release)  # a closure's backward reads what is gathered
            before_step(optimizer, partial(self._before_step, replicas, weakref.ref(optimizer)))
            if self.plain_loop:
                before_update(optimizer, self.plain_loop.settle)

    def _before_step(self, replicas: ReplicaDigest, optimizer: OptimizerRef) -> None:
        """Do what every step of an optimizer needs, also in a plain loop."""
        for memory in self._divided:
            give_gradient(memory.param)
        replicas.count_step(optimizer)
        self._check_data()

    def release(self) -> None:
        """Release gathered parameters, since the optimizer changes their shards."""
        if self.order and not self._gathering and (model := self._model()) is not None:
            from msrun.parallel.data_parallel.zero import gathering

            self._gathering = [weakref.ref(module) for module in gathering(model)]
        for module in filter(None, (reference() for reference in self._gathering)):
            module.reshard()

    def _check_data(self) -> None:
        """Refuse values that a script gave a sharded parameter in a way that its shard ignores.

        A loop that steps without an optimizer is told so in its next forward.
        """
        written = exchanged(self._divided)
        model = self._model()
        if not written or model is None:
            return
        names = (name for name, param in model.named_parameters() if id(param) in written)
        raise ModelError(
            f"param.data = tensor has no effect on {next(names, 'a parameter')}, which is sharded, "
            "so it keeps its values",
            hint="write in place: param.copy_(tensor) under torch.no_grad()",
        )

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether `optimizer` trains a parameter of this model."""
        held = {param for group in optimizer.param_groups for param in group["params"]}
        return not self._own.isdisjoint(held)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that holds parameters which `shard` replaced."""
        replaced = {id(reference()) for reference in self._originals}
        replaced -= {id(param) for param in self.parameters()}
        for group in optimizer.param_groups:
            if any(id(param) in replaced for param in group["params"]):
                raise ModelError(
                    f"{type(optimizer).__name__} holds parameters from before rt.shard",
                    hint="make the optimizer after rt.shard(model)",
                )


class KnownOptimizers:
    """Optimizers whose parameters were all found in models of `rt.shard`."""

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        # Frozen parameters that no model has: they may be thawed.
        self._others: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Parameter]] = (
            weakref.WeakKeyDictionary()
        )

    def check(self, optimizer: torch.optim.Optimizer, models: Collection[ShardedModel]) -> None:
        """Refuse parameters that no model has, whose gradients nothing would reduce.

        Raises:
            ModelError: Each data-parallel rank would train them alone.
        """
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        is_known = self._counts.get(optimizer) == count
        if is_known and not any(param.requires_grad for param in self._others[optimizer]):
            return
        for model in models:
            model.check_optimizer(optimizer)
        known = {id(param) for model in models for param in model.parameters()}
        others: list[Parameter] = []
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if id(param) in known:
                    continue
                others.append(param)
                if param.requires_grad:
                    raise ModelError(
                        f"{type(optimizer).__name__} holds a parameter of shape "
                        f"{tuple(param.shape)} in group {index} that is in no model of rt.shard, "
                        "so each data-parallel rank would train it alone",
                        hint="shard its module too, with rt.shard or as part of the model: "
                        "nn.ModuleDict({'model': model, 'head': head})",
                    )
        self._counts[optimizer], self._others[optimizer] = count, others
