"""Stages of whole modules: where a searched plan may be cut for the ordinary pipeline.

What the user decides beside `mode: auto` only the runtime does, and its pipeline gives modules to
stages, not operators.  A module with at most a fair share of the parameters is a unit, as where it
cuts by itself (`even_cut.leaves`).  A stage may begin where the first operator of a unit runs, if
no unit with parameters runs before and behind that.  So stages are those that the search counted,
but for operators between two units, which the pipeline computes where their inputs are.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from glob import escape
from typing import Any

import msgspec
from torch import nn

from msrun.errors import ConfigError, UsageError
from msrun.parallel.config import PIPELINE_AXIS, ROOT, ParallelConfig, Pipeline
from msrun.parallel.pipeline.chunks import Chunks
from msrun.parallel.pipeline.even_cut import leaves
from msrun.parallel.pipeline.model import PipelineModel
from msrun.parallel.pipeline.plan import plan_split
from msrun.parallel.pipeline.tied import check_tables, find_ties
from msrun.parallel.pipeline.tree import check_names
from msrun.parallel.search.graph.program import Program
from msrun.parallel.search.graph.repeat import find_blocks
from msrun.parallel.search.mesh.job_layout import divisors
from msrun.parallel.search.mesh.schedules import paces
from msrun.parallel.search.mesh.stages import Pace, cut_between_blocks


class ModuleStages:
    """The units of one model, and the stages that they may form.

    Args:
        model: The whole model.
        program: Its forward.
        chunks: Of the pipeline.
        microbatches: Of a step.
    """

    def __init__(
        self, model: nn.Module, program: Program, chunks: Chunks, microbatches: int
    ) -> None:
        self._model, self._program = model, program
        self._chunks, self._microbatches = chunks, microbatches
        self._modules = dict(model.named_modules(remove_duplicate=False))
        is_small = leaves(model, chunks.count)
        self._units = {
            name
            for name, module in self._modules.items()
            if name and is_small(name) and type(module).forward is not nn.Module.forward
        }
        # The unit of each step; empty for what is between units.
        self._unit_of = [self._unit(step.module) for step in program.steps]

    def _unit(self, module: str) -> str:
        """Return the largest unit that `module` is or is in."""
        names = module.split(".")
        above = (".".join(names[:at]) for at in range(1, len(names) + 1))
        return next((name for name in above if name in self._units), "")

    def pace(self) -> Sequence[Pace]:
        """Return how the schedule runs each chunk."""
        return paces(self._chunks, self._microbatches)

    def starts(self) -> set[int]:
        """Return the numbers of the steps that a stage may begin with."""
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for at, unit in enumerate(self._unit_of):
            first.setdefault(unit, at)
            last[unit] = at
        inside = {
            at
            for unit in first
            if unit and next(self._modules[unit].parameters(), None) is not None
            for at in range(first[unit] + 1, last[unit] + 1)
        }
        return {first[unit] for unit in first if unit} - inside - {0}

    def pipeline(self, starts: Sequence[int]) -> Pipeline:
        """Return the pipeline of the runtime whose chunks begin at the steps `starts`.

        Raises:
            ConfigError: One of them begins within a module.
        """
        if not self.starts().issuperset(starts[1:]):
            raise ConfigError(
                f"{ROOT}.mesh.{PIPELINE_AXIS}: the plan has a stage that begins within a module, "
                "and the runtime has stages of whole modules",
                hint="leave out optimizer, recompute and reduce, or search anew beside them",
            )
        chunks, places = self._chunks, dict(self._places(starts))
        return Pipeline(
            stages={
                escape(name): place if chunks.segments == 1 else (place, chunks.segment(chunk))
                for name, chunk in places.items()
                for place in [chunks.stage(chunk)]
            },
            microbatches=self._microbatches,
            schedule=chunks.schedule,
        )

    def _places(self, starts: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Yield the chunk of each unit with parameters, and of parameters outside of them."""
        units = [unit for unit in dict.fromkeys(self._unit_of) if unit]
        own = [unit for unit in units if next(self._modules[unit].parameters(), None) is not None]
        for unit in own:
            yield unit, bisect_right(starts, self._unit_of.index(unit)) - 1
        readers = {
            self._program.params[value]: at
            for at, step in reversed([*enumerate(self._program.steps)])
            for value in step.inputs.values()
            if value in self._program.params
        }
        for name, _ in self._model.named_parameters(remove_duplicate=False):
            if not any(name.startswith(f"{unit}.") for unit in own):
                owner = name.rpartition(".")[0]
                is_leaf = owner and next(self._modules[owner].children(), None) is None
                yield owner if is_leaf else name, bisect_right(starts, readers.get(name, 0)) - 1


def possible_stages(
    config: ParallelConfig, model: nn.Module, program: Program, sample: Sequence[Any], world: int
) -> frozenset[int]:
    """Return the numbers of stages of equal blocks that the pipeline of the runtime can run.

    Args:
        config: `mode: auto`.
        model: Which is not changed.
        program: Its forward.
        sample: Inputs of it.
        world: Ranks.
    """
    blocks = find_blocks(program)
    if blocks is None:
        return frozenset()
    found = set()
    for count in divisors(math.gcd(blocks.count, world))[1:]:
        starts = cut_between_blocks(blocks, count, PIPELINE_AXIS)
        units = ModuleStages(model, program, Chunks(schedule="1f1b", stages=count), count)
        if _can_run(config, model, sample, units, starts):
            found.add(count)
    return frozenset(found)


def _can_run(
    config: ParallelConfig,
    model: nn.Module,
    sample: Sequence[Any],
    units: ModuleStages,
    starts: Sequence[int],
) -> bool:
    try:
        pipeline = units.pipeline(starts)
        # Which refuses keys that do not go with stages.
        msgspec.structs.replace(
            config,
            mode=None,
            mesh={PIPELINE_AXIS: len(starts)},
            plan=[],
            search=None,
            memory=None,
            topology=None,
            pipeline=pipeline,
        )
        check_names(PipelineModel, model)
        plan = plan_split(model, pipeline, len(starts), sample)
        check_tables(model, plan, find_ties(plan), placed=())
    except (UsageError, ValueError):
        return False
    return True
