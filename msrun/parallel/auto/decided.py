"""What the user has decided beside `mode: auto`: `optimizer`, `recompute` and `reduce`.

The search decides the rest for it.  ZeRO of the configuration fixes how parameters are stored over
`dp`, recomputation of the repeated blocks what they save, so both count in time and memory.  What
runs them is the ordinary runtime: the executor of mode auto gathers tensor by tensor and has no
units, buckets or types of its own.  So the plan must be one that the runtime executes.  The fastest
plan of all is taken if it is; else the fastest of those that are (`runtime_plans`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from torch import nn

from msrun.errors import ConfigError
from msrun.parallel.auto.tracing.trace import Traced
from msrun.parallel.config import REST, ROOT, Optimizer, ParallelConfig
from msrun.parallel.match import matching
from msrun.parallel.search.graph.program import Program
from msrun.parallel.search.graph.repeat import find_blocks
from msrun.parallel.search.graph.rules import ShardingRule
from msrun.parallel.search.plan.lowering import Lowering, Planned, UserDecisions, lower
from msrun.parallel.search.plan.runtime_plans import search_runtime
from msrun.parallel.search.solve.build import Pin, build
from msrun.parallel.search.solve.modes import SearchResult
from msrun.parallel.search.solve.problem import Setting, layout_nodes


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
        sharded_from=sharded_from(config.optimizer),
        recompute=recomputes_blocks(config, program, model),
    )


def sharded_from(optimizer: Optimizer) -> float | None:
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
    """

    def __init__(
        self,
        config: ParallelConfig,
        axes: Sequence[str],
        traced: Traced,
        setting: Setting,
        local: Callable[[], Program],
    ) -> None:
        self._config, self._axes, self.traced = config, axes, traced
        self._setting, self._local = setting, local

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

    def search(self, pins: Callable[[], Sequence[Pin]]) -> SearchResult:
        """Return the fastest plan found that the runtime executes.

        Args:
            pins: Returns the placements that the user has fixed.

        Raises:
            ConfigError: There is none.
            OutOfMemoryError: None fits.
        """
        if isinstance(self._config.plan, str):
            raise _refusal(self._config)
        limit = None if self._config.memory is None else float(self._config.memory)
        found: list[SearchResult] = []
        for stored in self._stored():
            plan = search_runtime(
                self.traced.program,
                msgspec.structs.replace(self._setting, sharded_from=stored),
                self.traced.modules,
                axes=self._axes,
                pins=pins(),
                limit=limit,
            )
            if plan is not None and self.lowering(plan.chosen) is not None:
                found.append(plan)
        if not found:
            raise _refusal(self._config)
        return min(found, key=lambda plan: plan.seconds)

    def _stored(self) -> Iterator[float | None]:
        """Yield what is decided, or else any mixture, nothing and everything of sharded state."""
        yield self._setting.sharded_from
        if self._setting.sharded_from is None:
            yield math.inf
            yield 0.0


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
