"""What the user has decided beside `mode: auto`: `optimizer`, `recompute` and `reduce`.

The search decides the rest for it.  ZeRO of the configuration fixes how parameters are stored over
`dp`, and how often they are gathered and their gradients reduced; recomputation of the repeated
blocks fixes what they save; a type of the reduction its bytes.  All of it counts in time and
memory.  What runs them is the ordinary runtime: the executor of mode auto gathers tensor by tensor
and has no units, buckets or types of its own.  So the plan must be one that the runtime executes,
and its stages those of whole modules (`module_stages`).  The fastest plan of all is taken if it is;
else the fastest of those that are (`runtime_plans`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import torch
from torch import nn

from msrun.errors import ConfigError
from msrun.parallel.auto.agreed import PlanBroadcast
from msrun.parallel.auto.module_stages import ModuleStages
from msrun.parallel.auto.tracing.trace import Traced
from msrun.parallel.config import REST, ROOT, Optimizer, ParallelConfig
from msrun.parallel.match import matching
from msrun.parallel.search.graph.program import Program
from msrun.parallel.search.graph.repeat import find_blocks
from msrun.parallel.search.graph.rules import ShardingRule
from msrun.parallel.search.mesh.stage_search import search_stages
from msrun.parallel.search.plan.lowering import Lowering, Planned, UserDecisions, lower
from msrun.parallel.search.plan.runtime_plans import search_runtime
from msrun.parallel.search.solve.build import Pin, build
from msrun.parallel.search.solve.modes import SearchResult
from msrun.parallel.search.solve.problem import DataParallelKeys, Setting, layout_nodes


def decided(config: ParallelConfig) -> UserDecisions | None:
    """Return what the user has decided; None if nothing."""
    if not config.decided:
        return None
    return UserDecisions(optimizer=config.optimizer if "optimizer" in config.decided else None)


def with_decisions(
    config: ParallelConfig, setting: Setting, program: Program, model: nn.Module
) -> Setting:
    """Return `setting` with what the user has decided.

    Raises:
        ConfigError: `recompute` matches no module.
    """
    return msgspec.structs.replace(
        setting,
        decided=of_data_ranks(config),
        recompute=recomputes_blocks(config, program, model),
    )


def of_data_ranks(config: ParallelConfig) -> DataParallelKeys:
    """Return what is decided for parameters and gradients over `dp`."""
    dtype = config.reduce.dtype
    return DataParallelKeys(
        sharded_from=_sharded_from(config.optimizer),
        level=config.optimizer.zero,
        reduce_itemsize=getattr(torch, dtype).itemsize if dtype else None,
    )


def _sharded_from(optimizer: Optimizer) -> float | None:
    """Return the bytes from which parameters have sharded state; None if nothing is decided.

    Where fewer ranks than all of `dp` share a copy, a plan that counts none errs to more memory.
    """
    if not optimizer.zero:
        return None
    return float(optimizer.threshold) if optimizer.shard_size == REST else math.inf


def recomputes_blocks(config: ParallelConfig, program: Program, model: nn.Module) -> bool:
    """Return whether `recompute` covers the repeated blocks.

    Other modules are counted as if they saved all, so plans err to more memory.

    Raises:
        ConfigError: It matches no module.
    """
    if not config.recompute:
        return False
    modules = [name for name, _ in model.named_modules()]
    names = matching(config.recompute.modules, modules, "recompute.modules")
    blocks = find_blocks(program)
    if blocks is None or config.recompute.save:
        return False
    inside = blocks.block_of(program)
    return all(
        any(not name or f"{step.module}.".startswith(f"{name}.") for name in names)
        for step in program.steps
        if step.name in inside
    )


class RuntimePlans:
    """The plans of a model that the runtime executes by itself.

    Args:
        config: With decisions of the user.
        axes: Names of the mesh axes.
        traced: The model.
        setting: With these decisions.
        local: Returns the program for the samples of one rank.
        units: What stages consist of; None without stages.
    """

    def __init__(
        self,
        config: ParallelConfig,
        axes: Sequence[str],
        traced: Traced,
        setting: Setting,
        local: Callable[[], Program],
        *,
        units: ModuleStages | None,
    ) -> None:
        self._config, self._axes, self.traced = config, axes, traced
        self._setting, self._local = setting, local
        self._units = units

    def rules(self, chosen: Mapping[str, tuple[int, ...]]) -> dict[str, ShardingRule]:
        """Return the rule of every node of a plan."""
        problem = build(self.traced.program, self._setting, cuts=layout_nodes(chosen))
        return self.traced.rules | {node.name: node.rule for node in problem.nodes}

    def lowering(self, chosen: Mapping[str, tuple[int, ...]]) -> Lowering | None:
        """Return the configuration with which the runtime executes a plan; None without one."""
        planned = Planned(
            self.traced.program, self._setting, self._axes, self.rules(chosen), chosen
        )
        return lower(planned, self.traced.modules, self._local, decided(self._config))

    def search(self, answer: PlanBroadcast, pins: Callable[[], Sequence[Pin]]) -> PlanBroadcast:
        """Return the fastest plan found that the runtime executes, with what was decided.

        Args:
            answer: Mesh and micro-batches.
            pins: Returns the placements that the user has fixed.

        Raises:
            ConfigError: There is none.
            OutOfMemoryError: None fits.
        """
        if isinstance(self._config.plan, str):
            raise _refusal(self._config)
        found: list[tuple[SearchResult, list[int]]] = []
        for decided in self._stored():
            setting = msgspec.structs.replace(self._setting, decided=decided)
            with contextlib.suppress(_NoPlanError):
                plan, starts = self._fastest(setting, pins())
                if self.lowering(plan.chosen) is not None:
                    found.append((plan, starts))
        if not found:
            raise _refusal(self._config)
        plan, starts = min(found, key=lambda one: one[0].seconds)
        return msgspec.structs.replace(answer, chosen=plan.chosen, starts=starts, recompute=False)

    def _fastest(self, setting: Setting, pins: Sequence[Pin]) -> tuple[SearchResult, list[int]]:
        program, limit = self.traced.program, self._config.memory

        def find(total: float | None) -> SearchResult:
            plan = search_runtime(
                program, setting, self.traced.modules, axes=self._axes, pins=pins, limit=total
            )
            if plan is None:
                raise _NoPlanError
            return plan

        within = None if limit is None else float(limit)
        if self._units is None:
            return find(within), [0]
        staged = search_stages(
            program,
            setting,
            self.traced.rules,
            find,
            pace=self._units.pace(),
            pins=pins,
            limit=within,
            allowed=self._units.starts(),
        )
        return staged.result, staged.starts

    def _stored(self) -> Iterator[DataParallelKeys]:
        """Yield what is decided, or else any mixture, nothing and everything of sharded state."""
        decided = self._setting.decided
        yield decided
        if decided.sharded_from is None:
            yield msgspec.structs.replace(decided, sharded_from=math.inf)
            yield msgspec.structs.replace(decided, sharded_from=0.0)


class _NoPlanError(Exception):
    """The runtime executes no plan."""


def _refusal(config: ParallelConfig) -> ConfigError:
    """Return the error that the runtime does not execute the plan."""
    key = config.decided[0]
    if isinstance(config.plan, str):
        return ConfigError(
            f"{ROOT}.{key}: {config.plan} is a plan that only the executor of mode auto runs, and "
            f"it has no {key}",
            hint=f"leave {key} out, or search anew with {key} beside mode auto",
        )
    return ConfigError(
        f"{ROOT}.{key}: beside mode auto it needs a plan of modules, and this model has none on "
        "this mesh that computes the same with the samples of one rank",
        hint=f"leave {key} out, or choose semi_auto",
    )
