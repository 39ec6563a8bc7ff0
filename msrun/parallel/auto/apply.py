"""`mode: auto` of `rt.shard`: search on the first rank, or a plan found before; the same on all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.errors import UsageError
from msrun.parallel.auto.dropout_rng import DropoutRng
from msrun.parallel.auto.execute import Executor
from msrun.parallel.auto.native import configuration, return_means
from msrun.parallel.auto.offline_search import SIZES, resized
from msrun.parallel.auto.pipeline_executor import PlannedModel, slices
from msrun.parallel.auto.trace import Traced, trace
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS, ROOT, Dim, ParallelConfig
from msrun.parallel.layout import rules_of
from msrun.parallel.pipeline.chunks import Chunks, check_microbatches, read_chunks
from msrun.parallel.pipeline.ranks import PipelineRanks
from msrun.parallel.search.cost.topology import Topology, find_topology
from msrun.parallel.search.graph.axis_placement import RR
from msrun.parallel.search.graph.program import Program, ProgramByBatch
from msrun.parallel.search.graph.repeat import find_blocks
from msrun.parallel.search.graph.unsupported_ops import check
from msrun.parallel.search.mesh.schedules import paces, rounds
from msrun.parallel.search.mesh.stage_search import search_stages
from msrun.parallel.search.mesh.stages import cut_between_blocks, divide
from msrun.parallel.search.mesh_choice import MeshRequest, choose_mesh
from msrun.parallel.search.plan.lowering import EXECUTOR, Lowering, Planned, lower
from msrun.parallel.search.plan.plan import SavedPlan, read_plan
from msrun.parallel.search.plan.plan_io import check_fit, check_model, choices_of
from msrun.parallel.search.solve.build import Pin, build
from msrun.parallel.search.solve.memory import OutOfMemoryError
from msrun.parallel.search.solve.modes import Mode, search
from msrun.parallel.search.solve.problem import Setting, layout_nodes
from msrun.parallel.search.solve.uses import Uses
from msrun.parallel.tensor.hooks import describe_modules
from msrun.parallel.tensor.plan import plan_modules

if TYPE_CHECKING:
    from msrun.parallel.runtime import Runtime

_MODES: dict[str, Mode] = {
    "exact": "exact",
    "recursive": "recursive",
    "propagation": "propagation",
    "dynamic_programming": "exact",
    "recursive_programming": "recursive",
    "sharding_propagation": "propagation",
}
_PRESETS = {"cuda": "a100", "npu": "ascend910", "cpu": "cpu"}
_GIB = 2**30
_PLAN = f"{ROOT}.plan"
_MODE = f"{ROOT}.mode: auto"

Row = tuple[int, ...]


class PlanBroadcast(msgspec.Struct, frozen=True):
    """What the first rank tells the others.

    Args:
        mesh: Axis -> size.
        microbatches: Into how many a step divides a local batch.
        recompute: Whether repeated blocks keep only what they are given.
        chosen: Node -> its choice on every axis; empty before the search.
        starts: First step of each chunk of a pipeline; empty before the search.
        plan: One that was saved.
        error: Why there is no plan; empty if there is one.
        hint: What to do about it; may be empty.
    """

    mesh: dict[str, int] = {}
    microbatches: int = 1
    recompute: bool = False
    chosen: dict[str, Row] = {}
    starts: list[int] = []
    plan: SavedPlan | None = None
    error: str = ""
    hint: str = ""


class Applied(NamedTuple):
    """What became of a model.

    Args:
        model: What is to be trained: the model itself, or a stage of it.
        options: What a `ShardedModel` is told of it.
        config: The configuration that does what the plan says to a model that is as it was; None
            where that is done.
        finish: To be called when it is done.
    """

    model: nn.Module
    options: dict[str, Any]
    config: ParallelConfig | None = None
    finish: Callable[[], None] = lambda: None


def apply(runtime: Runtime, model: nn.Module, sample: Sequence[Any] | None) -> Applied:
    """Search a plan for `model`, or read it, and have its forward run it; stages take it apart.

    Every rank has the same whole parameters before.

    Raises:
        UsageError: The model cannot be traced, a wish cannot be met, no plan fits, or the one that
            was saved is for something else.
    """
    sample = _checked(model, sample)
    was_training = model.training
    model.train()
    if runtime.config.mesh != "auto" and not _axes(runtime):
        _lay_out(runtime, {**runtime.layout.axes, DATA_AXIS: 1})
    batch = _samples(runtime, sample)
    answer = _outline(runtime, model, sample, batch)
    if runtime.config.mesh == "auto":
        _lay_out(runtime, answer.mesh)
    chunks = _chunks(runtime, answer.microbatches)
    setting = _setting(runtime, batch, chunks, answer.microbatches)
    traced = trace(model, resized(sample, setting.batch))
    model.train(was_training)
    answer = _completed(runtime, model, traced, setting, answer)
    problem = build(traced.program, setting, cuts=layout_nodes(answer.chosen))
    rules = {**traced.rules, **{node.name: node.rule for node in problem.nodes}}
    if chunks.count == 1 and not answer.recompute:
        check(traced.program)
        planned = Planned(traced.program, setting, tuple(_axes(runtime)), rules, answer.chosen)
        part = resized(sample, setting.batch // runtime.layout.size(DATA_AXIS))
        found = lower(planned, traced.modules, lambda: trace(model, part).program)
        if found:
            return _as_usual(runtime, model, traced, found, answer.microbatches)
    runtime.print(f"{_MODE} runs on {EXECUTOR}")
    make = partial(
        Executor,
        traced=traced,
        rules=rules,
        chosen=answer.chosen,
        setting=setting,
        mesh=runtime.mesh[tuple(_axes(runtime))],
        seed=_seed(runtime),
        blocks=find_blocks(traced.program) if answer.recompute else None,
    )
    if chunks.count == 1:
        model.forward = run = make(model)
        runtime.dropout_rngs.append((run.dropout_rng,))
        return Applied(model, {"microbatches": answer.microbatches})
    uses = Uses(traced.program, setting, traced.rules)
    parts = divide(traced.program, uses, answer.starts)
    line = PipelineRanks(chunks=chunks, group=runtime.group(PIPELINE_AXIS), device=runtime.device)
    stage = PlannedModel(
        model,
        slices(model, traced, parts, chunks),
        answer.microbatches,
        line,
        traced=traced,
        make=make,
    )
    runtime.dropout_rngs.append(stage.dropout_rngs)
    return Applied(stage, {"is_pipeline": True})


def _checked(model: nn.Module, sample: Sequence[Any] | None) -> Sequence[Any]:
    """Return the sample, if there is one, and a model that it can be traced with."""
    if sample is None:
        raise UsageError(
            f"{ROOT}.mode: auto needs a batch to trace the model with",
            hint="rt.shard(model, sample=(x,)) with the inputs of one local batch",
        )
    if any(param.is_meta for param in model.parameters()):
        raise UsageError(f"{ROOT}.mode: auto divides models with values, not those of init_on_meta")
    return sample


def _as_usual(
    runtime: Runtime, model: nn.Module, traced: Traced, lowering: Lowering, microbatches: int
) -> Applied:
    """Leave a model to the runtime, which does by itself what the plan says."""
    runtime.print(f"{_MODE} runs on {lowering.name}")
    # As whoever goes on with the checkpoint under another plan needs them.
    runtime.dropout_rngs.append((DropoutRng(traced.program, _seed(runtime)),))
    config = configuration(runtime.config, runtime.layout.axes, lowering, microbatches)
    if runtime.layout.size(DATA_AXIS) == 1:
        return Applied(model, {}, config)
    group = runtime.group(DATA_AXIS)
    finish = partial(return_means, model, traced, lowering, group)
    return Applied(model, {}, config, finish)


def _axes(runtime: Runtime) -> dict[str, int]:
    """Return the axes of the mesh that a plan is for: of one stage."""
    return {name: size for name, size in runtime.layout.axes.items() if name != PIPELINE_AXIS}


def _lay_out(runtime: Runtime, mesh: dict[str, int]) -> None:
    rules = [] if runtime.config.mesh == "auto" else runtime.config.plan
    runtime.lay_out(msgspec.structs.replace(runtime.config, mesh=mesh, plan=rules))


def _chunks(runtime: Runtime, microbatches: int) -> Chunks:
    """Return the chunks of the pipeline, which may be one of one stage."""
    stages, pipeline = runtime.layout.size(PIPELINE_AXIS), runtime.config.pipeline
    if pipeline:
        return read_chunks(msgspec.structs.replace(pipeline, microbatches=microbatches), stages)[0]
    chunks = Chunks(schedule="1f1b", stages=stages)
    check_microbatches(chunks, microbatches)
    return chunks


def _samples(runtime: Runtime, sample: Sequence[Any]) -> int:
    """Return the samples of a step of all ranks."""
    local = next((len(x) for x in sample if isinstance(x, Tensor) and x.dim()), 0)
    if not local:
        raise UsageError("the sample of rt.shard holds no tensor with a first dim of samples")
    return local if runtime.config.mesh == "auto" else local * runtime.layout.size(DATA_AXIS)


def _outline(
    runtime: Runtime, model: nn.Module, sample: Sequence[Any], batch: int
) -> PlanBroadcast:
    """Return mesh and micro-batches, and what came with them if they were not given."""
    config = runtime.config
    if isinstance(config.plan, str):
        return _agreed(partial(_read, runtime, config.plan, batch), runtime)
    if config.mesh == "auto":
        return _agreed(partial(_choose_mesh, runtime, model, sample, batch), runtime)
    return PlanBroadcast(mesh=runtime.layout.axes, microbatches=_microbatches(config))


def _microbatches(config: ParallelConfig) -> int:
    return config.pipeline.microbatches if config.pipeline else config.accumulate


def _read(runtime: Runtime, path: str, batch: int) -> PlanBroadcast:
    """Return a saved plan, if it is for this job."""
    config = runtime.config
    try:
        plan = read_plan(Path(path))
        mesh = plan.axes() if config.mesh == "auto" else runtime.layout.axes
        check_fit(plan, path, world=runtime.world_size, mesh=mesh, batch=batch)
    except UsageError as error:
        raise UsageError(f"{_PLAN}: {error.message}", hint=error.hint) from None
    if _microbatches(config) not in (1, plan.microbatches):
        key = "pipeline.microbatches" if config.pipeline else "accumulate"
        raise UsageError(
            f"{_PLAN}: {path} is for {plan.microbatches} micro-batches, "
            f"and {ROOT}.{key} is {_microbatches(config)}"
        )
    return PlanBroadcast(
        mesh=mesh, microbatches=plan.microbatches, recompute=plan.recompute, plan=plan
    )


def _choose_mesh(
    runtime: Runtime, model: nn.Module, sample: Sequence[Any], batch: int
) -> PlanBroadcast:
    """Return the best mesh of those that can be run, and its plan."""
    config = runtime.config
    small, large = (trace(model, resized(sample, number)).program for number in SIZES)
    with _told_memory():
        best = choose_mesh(
            MeshRequest(
                programs=ProgramByBatch(small, large, SIZES),
                topology=_topology(runtime),
                world=runtime.world_size,
                batch=batch,
                mode=_MODES[config.search or "exact"],
                limit=None if config.memory is None else float(config.memory),
            ),
            time.perf_counter,
        )
    mesh = " x ".join(f"{name} {size}" for name, size in best.mesh.items())
    again = ", recomputation" if best.recompute else ""
    runtime.print(
        f"{ROOT}.mesh: {mesh}, {best.microbatches} micro-batch(es){again}, "
        f"{best.seconds:.4g} s a step predicted"
    )
    return PlanBroadcast(
        mesh=best.mesh,
        microbatches=best.microbatches,
        recompute=best.recompute,
        chosen=best.chosen,
    )


def _setting(runtime: Runtime, batch: int, chunks: Chunks, microbatches: int) -> Setting:
    """Return what a plan is for: a micro-batch of all ranks."""
    axes, ranks = _axes(runtime), runtime.layout.size(DATA_AXIS)
    if batch % (ranks * microbatches):
        key = "pipeline.microbatches" if runtime.config.pipeline else "accumulate"
        raise UsageError(
            f"{ROOT}.{key}: {microbatches} does not divide the {batch / ranks:g} samples of a "
            "local batch, and mode auto needs equal micro-batches"
        )
    return Setting(
        sizes=tuple(axes.values()),
        topology=_topology(runtime),
        data_axes=frozenset(at for at, name in enumerate(axes) if name == DATA_AXIS),
        batch=batch // microbatches,
        rounds=rounds(chunks, microbatches),
    )


def _completed(
    runtime: Runtime, model: nn.Module, traced: Traced, setting: Setting, answer: PlanBroadcast
) -> PlanBroadcast:
    """Return `answer` with what every node chooses, and where chunks begin."""
    program, chunks = traced.program, _chunks(runtime, answer.microbatches)
    if answer.plan is None and not answer.chosen:
        pins = _pins(runtime, model, program)
        found = _agreed(partial(_search, runtime, traced, setting, chunks, pins), runtime)
        return msgspec.structs.replace(answer, chosen=found.chosen, starts=found.starts)
    chosen, key = answer.chosen, f"{ROOT}.mesh.{PIPELINE_AXIS}"
    if answer.plan is not None:
        key = f"{_PLAN}: {runtime.config.plan}"
        check_model(answer.plan, key, program)
        problem = build(program, setting, cuts=answer.plan.shared)
        chosen = choices_of(answer.plan, key, problem, program)
    count = chunks.count
    starts = cut_between_blocks(find_blocks(program), count, key) if count > 1 else [0]
    return msgspec.structs.replace(answer, chosen=chosen, starts=starts)


def _topology(runtime: Runtime) -> Topology:
    """Return the machine that is named, or what goes for this device."""
    try:
        return find_topology(runtime.config.topology or _PRESETS.get(runtime.device.type, "a100"))
    except UsageError as error:
        raise UsageError(f"{ROOT}.{error.message}") from None


def _search(
    runtime: Runtime, traced: Traced, setting: Setting, chunks: Chunks, pins: Sequence[Pin]
) -> PlanBroadcast:
    config = runtime.config
    mode = _MODES[config.search or "exact"]
    limit = None if config.memory is None else float(config.memory)
    with _told_memory():
        if chunks.count == 1:
            found = search(traced.program, setting, mode=mode, pins=pins, limit=limit)
            return PlanBroadcast(chosen=found.chosen, starts=[0])
        staged = search_stages(
            traced.program,
            setting,
            traced.rules,
            pace=paces(chunks, _microbatches(config)),
            mode=mode,
            pins=pins,
            limit=limit,
        )
    return PlanBroadcast(chosen=staged.result.chosen, starts=staged.starts)


@contextlib.contextmanager
def _told_memory() -> Iterator[None]:
    """Have a plan that does not fit be told with the key."""
    try:
        yield
    except OutOfMemoryError as error:
        needed = f"{error.least / _GIB:.3g} GiB"
        raise UsageError(
            f"{ROOT}.memory: no plan fits; the smallest takes {needed} on a rank"
        ) from None


def _agreed(ask: Callable[[], PlanBroadcast], runtime: Runtime) -> PlanBroadcast:
    """Return what the first rank answers.

    Raises:
        UsageError: The first rank has no answer; then every rank raises it.
    """
    content = msgspec.json.encode(_tried(ask)) if runtime.rank == 0 else b""
    if runtime.world_size > 1:
        size = torch.tensor([len(content)], device=runtime.device)
        dist.broadcast(size, src=0)
        sent = torch.zeros(int(size), dtype=torch.uint8, device=runtime.device)
        if runtime.rank == 0:
            sent.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        dist.broadcast(sent, src=0)
        content = bytes(sent.tolist())
    answer = msgspec.json.decode(content, type=PlanBroadcast)
    if answer.error:
        raise UsageError(answer.error, hint=answer.hint or None)
    return answer


def _tried(ask: Callable[[], PlanBroadcast]) -> PlanBroadcast:
    try:
        return ask()
    except UsageError as error:
        return PlanBroadcast(error=error.message, hint=error.hint or "")


def _seed(runtime: Runtime) -> int:
    """Return a number that all ranks have: of the first rank's generator."""
    seed = torch.tensor([torch.initial_seed() % 2**62], device=runtime.device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(seed, src=0)
    return int(seed)


def _pins(runtime: Runtime, model: nn.Module, program: Program) -> list[Pin]:
    """Return the rules of the configuration as wishes: where parameters shall be cut."""
    config = runtime.config
    if not config.plan:
        return []
    plans = plan_modules(rules_of(config), runtime.layout, describe_modules(model))
    values = {full: value for value, full in program.params.items()}
    axes = {name: at for at, name in enumerate(_axes(runtime)) if name != DATA_AXIS}
    pins = []
    for module, plan in plans.items():
        for param, dims in plan.params.items():
            full = f"{module}.{param}" if module else param
            if full in values:
                codes = dict.fromkeys(axes.values(), RR)
                for dim, entry in enumerate(dims):
                    codes |= {axes[axis]: dim for axis in _named(entry)}
                pins.append(Pin(node=values[full], codes=codes, key=f"{plan.key}.params.{param}"))
    return pins


def _named(entry: Dim) -> list[str]:
    return [entry] if isinstance(entry, str) else entry or []
