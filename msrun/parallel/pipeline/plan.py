"""Where a model is cut into stages: decided and checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel.config import Pipeline
from msrun.parallel.losses.batch import read_batch
from msrun.parallel.match import matching
from msrun.parallel.pipeline import even_cut
from msrun.parallel.pipeline.chunks import STAGES, Chunks, read_chunks
from msrun.parallel.pipeline.skeleton import Skeleton
from msrun.parallel.pipeline.split import ChunkProgram, CutRule, assign
from msrun.parallel.pipeline.trace import NamedInputs, Trace, input_names, trace
from msrun.parallel.torch_compat import has_own_call, hooks_of

_SHOWN_MAX = 8


class PipelineCut(Protocol):
    """What all stages of a pipeline know of each other."""

    @property
    def chunks(self) -> Chunks:
        """The chunks there are."""

    @property
    def stage_params(self) -> list[dict[str, Parameter]]:
        """Name -> parameter of each stage; a shared one is in several, or has several names.

        The model that is made of it empties them.
        """

    @property
    def measure(self) -> str | None:
        """What was balanced; None where the stages were named."""

    @property
    def constants(self) -> dict[str, Tensor]:
        """Tensors that are neither parameters nor buffers, by name."""

    def modules(self, stage: int) -> list[str]:
        """Return the names of the modules that `stage` takes over unchanged."""

    def attributes(self, stage: int) -> list[str]:
        """Return the names of what else `stage` has: parameters, buffers, constants."""

    def shown(self, stage: int) -> str:
        """Return how reports name what `stage` runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """A model cut into chunks; a `PipelineCut`.

    Args:
        chunks: The chunks there are.
        traced: The whole model.
        programs: Program of each chunk.
        stage_params: Name -> parameter, of each stage; a shared one is in several, or has several
            names.
        measure: What was balanced; None where the stages were named.
        rule: Cuts other forwards where this one was.
        skeleton: A copy of the model, which records them.
        opened: Modules whose own forward is divided, the model itself included.
    """

    chunks: Chunks
    traced: Trace
    programs: list[ChunkProgram]
    stage_params: list[dict[str, Parameter]]
    measure: str | None
    rule: CutRule
    skeleton: Skeleton
    opened: list[str]

    @property
    def constants(self) -> dict[str, Tensor]:
        """Tensors that `forward` makes from plain numbers, by the name of their step."""
        return self.traced.constants

    def modules(self, stage: int) -> list[str]:
        """Return the names of the modules that `stage` calls."""
        return [name for c in self.chunks.of_stage(stage) for name in self.programs[c].modules]

    def attributes(self, stage: int) -> list[str]:
        """Return what else `stage` has: buffers, constants, parameters used by themselves."""
        names = [name for c in self.chunks.of_stage(stage) for name in self.programs[c].attributes]
        return list(dict.fromkeys([*names, *self.stage_params[stage]]))

    def shown(self, stage: int) -> str:
        """Return the modules that `stage` calls, by segments."""
        segments = (", ".join(self.programs[c].modules) for c in self.chunks.of_stage(stage))
        return " | ".join(segments)


def plan_split(
    model: nn.Module,
    settings: Pipeline,
    stages: int,
    sample: Sequence[Any] | Mapping[str, Any] | None = None,
    device: torch.device | None = None,
) -> SplitPlan:
    """Return how `model` is cut into `stages` stages.

    Args:
        model: Nothing in it changes.
        settings: Where to cut.
        stages: Ranks along the pipeline axis.
        sample: Inputs of one batch, in order or by name; see `split_model`.
        device: Of the model; None is that of its tensors.

    Raises:
        ModelError: It cannot be cut so.
    """
    chunks, patterns = read_chunks(settings, stages)
    measure = None
    named: dict[str, int] = {}
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    is_unit = even_cut.leaves(model, chunks.count)
    if patterns:
        params = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        matching(patterns, [*names, *params], "pipeline.stages")
        named = assign(patterns, names)
        is_unit = _leaves(named, names)
        _check_covered(params, named, is_unit)
    opened = [name for name in names if not name or not is_unit(name)]
    _check_hooks(model, opened)
    skeleton = Skeleton(model, is_unit, device or _device(model))
    traced = _trace(model, skeleton, is_unit, sample, counts=not patterns)
    calls = [node for node in traced.graph.nodes if node.op == "call_module"]
    if patterns:
        modules = {node: named[str(node.target)] for node in calls if str(node.target) in named}
    else:
        modules, measure = even_cut.place_evenly(model, traced, chunks)
    rule = CutRule(
        chunks=chunks,
        calls=_calls(modules),
        movable=[name for name in _calls(modules) if not _has_parameters(model, name)],
    )
    programs = rule.programs(traced)
    stage_params = _stage_params(model, programs, chunks)
    for name, param, chunk in _unused(model, stage_params, named, patterns):
        stage_params[chunks.stage(chunk)][name] = param
    return SplitPlan(
        chunks=chunks,
        traced=traced,
        programs=programs,
        stage_params=stage_params,
        measure=measure,
        rule=rule,
        skeleton=skeleton,
        opened=opened,
    )


def _trace(
    model: nn.Module,
    skeleton: Skeleton,
    is_unit: Callable[[str], bool],
    sample: Sequence[Any] | Mapping[str, Any] | None,
    *,
    counts: bool,
) -> Trace:
    """Return the steps of the forward: of the sample, or without one as far as can be seen."""
    if sample is None:
        return trace(model, is_unit, input_names(model, None))
    values = [sample] if isinstance(sample, Mapping) else list(sample)
    batch = read_batch(model, [*values, None], has_loss=True)
    if batch.named:
        traced = skeleton.record([*batch.inputs, NamedInputs(batch.named)], counts=counts)
        return replace(traced, inputs=tuple(batch.named))
    names = input_names(model, batch.inputs)
    return replace(skeleton.record(batch.inputs, counts=counts), inputs=tuple(names))


def _calls(modules: Mapping[fx.Node, int]) -> dict[str, list[int]]:
    """Return the chunk of each call of each module."""
    calls: dict[str, list[int]] = {}
    for node, chunk in modules.items():
        calls.setdefault(str(node.target), []).append(chunk)
    return calls


def _device(model: nn.Module) -> torch.device:
    tensors = (*model.parameters(), *model.buffers())
    return tensors[0].device if tensors else torch.device("cpu")


def _check_hooks(model: nn.Module, opened: Sequence[str]) -> None:
    """Refuse hooks on modules that are divided, and a `__call__` of the model: no stage runs it."""
    if has_own_call(model):
        raise ModelError(
            f"{STAGES}: {type(model).__name__} has a __call__ of its own, and is divided among "
            "stages, which run its forward",
            hint="do in forward what __call__ does",
        )
    for name in opened:
        kinds = sorted(hooks_of(model.get_submodule(name)))
        if kinds:
            shown_name = name or type(model).__name__
            raise ModelError(
                f"{STAGES}: {shown_name} has {' and '.join(kinds)} hooks, "
                "and is divided among stages",
                hint="put the hooks on modules that have a stage",
            )


def _has_parameters(model: nn.Module, name: str) -> bool:
    return next(model.get_submodule(name).parameters(), None) is not None


def _leaves(named: Mapping[str, int], names: Sequence[str]) -> Callable[[str], bool]:
    """Return which modules are one step: all their submodules are in one chunk, or in none."""
    mixed: set[str] = set()
    for name in names:
        above = name
        while above:
            above = above.rpartition(".")[0]
            if named.get(above) != named.get(name):
                mixed.add(above)
    return lambda name: name not in mixed


def _check_covered(
    params: Sequence[str], named: Mapping[str, int], is_leaf: Callable[[str], bool]
) -> None:
    """Refuse modules that have parameters and no chunk."""
    missing: dict[str, None] = {}
    for param in params:
        owner = param.rpartition(".")[0]
        if owner not in named and owner and is_leaf(owner):
            while (above := owner.rpartition(".")[0]) and is_leaf(above):
                owner = above
            missing[owner] = None
    _refuse(list(missing))


def _refuse(missing: Sequence[str]) -> None:
    if missing:
        others = len(missing) - _SHOWN_MAX
        more = f" and {others} more" if others > 0 else ""
        raise ModelError(
            f"{STAGES}: no stage for {', '.join(missing[:_SHOWN_MAX])}{more}",
            hint="everything that has parameters needs one",
        )


def _stage_params(
    model: nn.Module, programs: Sequence[ChunkProgram], chunks: Chunks
) -> list[dict[str, Parameter]]:
    """Return the parameters that the programs of each stage use, by name."""
    by_stage: list[dict[str, Parameter]] = [{} for _ in range(chunks.stages)]
    every = dict(model.named_parameters(remove_duplicate=False))
    for chunk, program in enumerate(programs):
        params = by_stage[chunks.stage(chunk)]
        for name in program.modules:
            for part, param in model.get_submodule(name).named_parameters(remove_duplicate=False):
                params[f"{name}.{part}"] = param
        for name in program.attributes:
            if name in every:
                params[name] = every[name]
    return by_stage


def _unused(
    model: nn.Module,
    stage_params: Sequence[Mapping[str, Parameter]],
    named: Mapping[str, int],
    patterns: Mapping[str, int],
) -> Iterator[tuple[str, Parameter, int]]:
    """Yield the parameters that no program uses, with the chunk that gets them.

    Raises:
        ModelError: Stages are named, and one of them has none.
    """
    used = {param for params in stage_params for param in params.values()}
    missing = []
    for name, param in model.named_parameters():
        if param in used:
            continue
        own = next((chunk for key, chunk in patterns.items() if fnmatchcase(name, key)), None)
        chunk = named.get(name.rpartition(".")[0], own) if patterns else 0
        if chunk is None:
            missing.append(name)
        else:
            yield name, param, chunk
    _refuse(missing)
