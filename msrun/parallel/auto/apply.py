"""`mode: auto` of `rt.shard`: search on the first rank, or a plan found before; the same on all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.errors import UsageError
from msrun.parallel.auto.build import Pin, build
from msrun.parallel.auto.codes import RR
from msrun.parallel.auto.execute import Executor
from msrun.parallel.auto.memory import OutOfMemoryError
from msrun.parallel.auto.plan import SavedPlan, read_plan
from msrun.parallel.auto.problem import Setting
from msrun.parallel.auto.program import Program
from msrun.parallel.auto.saved import check_fit, check_model, choices_of
from msrun.parallel.auto.search import Mode, search
from msrun.parallel.auto.topology import Topology, preset
from msrun.parallel.auto.trace import Traced, trace
from msrun.parallel.config import DATA_AXIS, ROOT, Dim
from msrun.parallel.layout import rules_of
from msrun.parallel.tensor import describe_modules
from msrun.parallel.tensor_plan import plan_modules

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


class Answer(msgspec.Struct, frozen=True):
    """What the first rank tells the others.

    Args:
        chosen: Node -> its choice on every axis.
        seconds: Predicted, of a step.
        error: Why there is no plan; empty if there is one.
        hint: What to do about it; may be empty.
    """

    chosen: dict[str, tuple[int, ...]] = {}
    seconds: float = 0.0
    error: str = ""
    hint: str = ""


def apply(runtime: Runtime, model: nn.Module, sample: Sequence[Any] | None) -> None:
    """Search a plan for `model`, or read it, and make its forward run it, in place.

    Every rank has the same whole parameters before.

    Raises:
        UsageError: The model cannot be traced, a wish cannot be met, no plan fits, or the one that
            was saved is for something else.
    """
    if sample is None:
        raise UsageError(
            f"{ROOT}.mode: auto needs a batch to trace the model with",
            hint="rt.shard(model, sample=(x,)) with the inputs of one local batch",
        )
    was_training = model.training
    model.train()
    whole, batch = _whole_batch(sample, runtime.layout.size(DATA_AXIS))
    traced = trace(model, whole)
    model.train(was_training)
    names = list(runtime.layout.axes)
    data_axes = frozenset(at for at, name in enumerate(names) if name == DATA_AXIS)
    setting = Setting(
        sizes=tuple(runtime.layout.axes.values()),
        topology=_topology(runtime),
        data_axes=data_axes,
        batch=batch,
    )
    path = runtime.config.plan
    if isinstance(path, str):
        ask = partial(_read, runtime, traced.program, setting, path)
    else:
        ask = partial(_ask, runtime, traced, setting, _pins(runtime, model, traced.program))
    answer = _agreed(ask, runtime)
    if answer.error:
        raise UsageError(answer.error, hint=answer.hint or None)
    problem = build(traced.program, setting, cuts=_hubs(answer.chosen))
    rules = {node.name: node.rule for node in problem.nodes}
    executor = Executor(
        model, traced, rules, answer.chosen, setting=setting, mesh=runtime.mesh, seed=_seed()
    )
    model.forward = executor


def _topology(runtime: Runtime) -> Topology:
    """Return the machine that is named, or what goes for this device."""
    try:
        return preset(runtime.config.topology or _PRESETS.get(runtime.device.type, "a100"))
    except UsageError as error:
        raise UsageError(f"{ROOT}.{error.message}") from None


def _whole_batch(sample: Sequence[Any], ranks: int) -> tuple[list[Any], int]:
    """Return inputs as of all data-parallel ranks together, and their number of samples."""
    local = next((len(x) for x in sample if isinstance(x, Tensor) and x.dim()), 0)
    if not local:
        raise UsageError("the sample of rt.shard holds no tensor with a first dim of samples")
    whole = [
        x.new_zeros((local * ranks, *x.shape[1:]))
        if isinstance(x, Tensor) and x.dim() and len(x) == local
        else x
        for x in sample
    ]
    return whole, local * ranks


def _ask(runtime: Runtime, traced: Traced, setting: Setting, pins: Sequence[Pin]) -> Answer:
    config = runtime.config
    mode = _MODES[config.search or "exact"]
    limit = None if config.memory is None else float(config.memory)
    try:
        found = search(traced.program, setting, mode=mode, pins=pins, limit=limit)
    except OutOfMemoryError as error:
        needed = f"{error.least / _GIB:.3g} GiB"
        return Answer(error=f"{ROOT}.memory: no plan fits; the smallest takes {needed} on a rank")
    except UsageError as error:
        return Answer(error=error.message, hint=error.hint or "")
    return Answer(chosen=found.chosen, seconds=found.seconds)


def _read(runtime: Runtime, program: Program, setting: Setting, path: str) -> Answer:
    """Return what a saved plan says, if it is for this job and model."""
    try:
        plan = read_plan(Path(path))
        axes = runtime.layout.axes
        check_fit(plan, path, world=runtime.world_size, mesh=axes, batch=setting.batch)
        _check_runs(plan, path)
        check_model(plan, path, program)
        problem = build(program, setting, cuts=plan.shared)
        chosen = choices_of(plan, path, problem, program)
    except UsageError as error:
        return Answer(error=f"{ROOT}.plan: {error.message}", hint=error.hint or "")
    return Answer(chosen=chosen, seconds=plan.seconds)


def _check_runs(plan: SavedPlan, where: str) -> None:
    """Refuse what the executor does not do."""
    for is_there, what in (
        (plan.stages > 1, f"{plan.stages} stages of a pipeline"),
        (plan.microbatches > 1, f"{plan.microbatches} micro-batches"),
        (plan.recompute, "recomputation"),
    ):
        if is_there:
            raise UsageError(
                f"{where} has {what}, which mode auto does not run",
                hint="name the mesh in `msrun search --mesh`",
            )


def _hubs(chosen: Mapping[str, object]) -> list[str]:
    """Return the tensors that a plan moves once for all who read them."""
    return [name.removeprefix("hub:") for name in chosen if name.startswith("hub:")]


def _agreed(ask: Any, runtime: Runtime) -> Answer:
    """Return what the first rank answers."""
    content = msgspec.json.encode(ask()) if runtime.rank == 0 else b""
    if runtime.world_size == 1:
        return msgspec.json.decode(content, type=Answer)
    size = torch.tensor([len(content)], device=runtime.device)
    dist.broadcast(size, src=0)
    sent = torch.zeros(int(size), dtype=torch.uint8, device=runtime.device)
    if runtime.rank == 0:
        sent.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(sent, src=0)
    return msgspec.json.decode(bytes(sent.tolist()), type=Answer)


def _seed() -> int:
    """Return a number that all ranks have: of the first rank's generator."""
    seed = torch.tensor([torch.initial_seed() % 2**62])
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
    axes = {name: at for at, name in enumerate(runtime.layout.axes) if name != DATA_AXIS}
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
