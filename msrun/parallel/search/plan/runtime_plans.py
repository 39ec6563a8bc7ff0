"""The fastest of the plans that the ordinary runtime executes.

`lowering` recognises such a plan; this module searches among them alone.  It is for what the user
has decided beside the search, such as units of ZeRO or modules that recompute: the runtime does
these, the executor of mode auto does not.  The conditions of `lowering` become conditions on single
strategies and on pairs of them, so the solver finds the best plan that meets them:

- An operator that no rule can divide reads along the data axis what its rank has, and along the
  others whole tensors, or shards if it runs on shards as it is; it makes no pending sums there.
- Nothing is redistributed but the input and the output of a module that a rule can divide.
- Parameters are stored in shards only where their module reads them so, or along the data axis.

What a strategy does not show, such as code that computes with the batch size, `lower` finds out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from msrun.parallel.config import DATA_AXIS
from msrun.parallel.search.graph.axis_placement import (
    PARTIAL,
    REPLICATED,
    RZ,
    BoolArray,
    IntArray,
    value_placement,
)
from msrun.parallel.search.graph.operators import rules_of_steps
from msrun.parallel.search.graph.program import Program, Step
from msrun.parallel.search.plan.lowering import (
    AVERAGES,
    BY_CLASS,
    FOLLOWING,
    Modules,
    dividing_steps,
    first_slot,
)
from msrun.parallel.search.solve.build import Pin
from msrun.parallel.search.solve.edges import base_codes
from msrun.parallel.search.solve.eliminate import TooWideError
from msrun.parallel.search.solve.modes import SearchResult, search_problem, whole_problem
from msrun.parallel.search.solve.problem import Edge, Problem, Setting, StrategyNode
from msrun.parallel.search.solve.uses import Uses


def search_runtime(
    program: Program,
    setting: Setting,
    modules: Modules,
    *,
    axes: Sequence[str],
    pins: Sequence[Pin] = (),
    limit: float | None = None,
) -> SearchResult | None:
    """Return the fastest plan that the runtime can execute; None if there is none.

    Args:
        program: The forward pass.
        setting: Mesh, machine, and how a step is run.
        modules: Of the model.
        axes: Names of the mesh axes.
        pins: Placements that the user has fixed.
        limit: Bytes that a rank has; None is any.

    Raises:
        ConfigError: No strategy has a placement that the user has fixed.
        OutOfMemoryError: No such plan fits.
    """
    problem = whole_problem(program, setting, pins)
    conditions = _Conditions(program, setting, modules, axes)
    rows = {at: conditions.rows(node) for at, node in enumerate(problem.nodes)}
    if not all(map(len, rows.values())):
        return None
    some = problem.restricted(rows)
    edges = []
    for edge in some.edges:
        allowed = conditions.pairs(edge, some)
        edges.append(replace(edge, seconds=np.where(allowed, edge.seconds, np.inf)))
    narrow = replace(some, edges=edges)
    try:
        if not np.isfinite(search_problem(narrow, None).seconds):
            return None
        return search_problem(narrow, limit)
    except TooWideError:
        return None


class _Conditions:
    """Says which strategies, and which pairs of them, the runtime executes.

    Args:
        program: The forward pass.
        setting: Mesh, machine, and how a step is run.
        modules: Of the model.
        axes: Names of the mesh axes.
    """

    def __init__(
        self, program: Program, setting: Setting, modules: Modules, axes: Sequence[str]
    ) -> None:
        self._sizes, self._kinds = setting.sizes, modules.kinds
        self._uses = Uses(program, setting, rules_of_steps(program))
        self._steps = {step.name: step for step in program.steps}
        self._params = set(program.params)
        used = [axis for axis, size in enumerate(setting.sizes) if size > 1]
        self._data = [axis for axis in used if axes[axis] == DATA_AXIS]
        self._others = [axis for axis in used if axes[axis] != DATA_AXIS]
        self._dividing = dividing_steps(program, modules)
        self._ends = {step.outputs[0] for step in self._dividing.values()}

    def rows(self, node: StrategyNode) -> IntArray:
        """Return the numbers of the strategies of a node that can be run."""
        fits = np.ones(len(node.rows), bool)
        if node.kind == "param":
            for axis in self._others:
                fits &= node.outs()[:, axis] != RZ
        elif node.kind == "op":
            fits &= self._step_rows(node, self._steps[node.name])
        return np.flatnonzero(fits)

    def _step_rows(self, node: StrategyNode, step: Step) -> BoolArray:
        fits: BoolArray = np.ones(len(node.rows), bool)
        divides = np.array([choice.divides for choice in node.rule.choices])[node.rows]
        is_mean = step.packet in (*AVERAGES, *BY_CLASS) and step.attrs.get("reduction", 1) == 1
        for port in range(len(step.outputs)):
            made = value_placement(node.outs(port))
            for axis in self._data:
                fits &= (made[:, axis] != PARTIAL) | ~divides[:, axis] | is_mean
            if step.name not in self._dividing:
                for axis in self._others:
                    fits &= made[:, axis] != PARTIAL
        for port, (slot, name) in enumerate(step.inputs.items()):
            read = value_placement(node.ins(port))
            if name in self._uses.constants:
                given = value_placement(self._uses.layouts[name])
                for axis in (*self._data, *self._others):
                    fits &= read[:, axis] == given[:, axis]
            elif step.name not in self._dividing:
                follows = step.packet in FOLLOWING and not slot.startswith("attn_mask")
                for axis in self._others:
                    is_whole = read[:, axis] == REPLICATED
                    fits &= is_whole | ((read[:, axis] != PARTIAL) & follows)
        return fits

    def pairs(self, edge: Edge, problem: Problem) -> BoolArray:
        """Return which strategies of both ends of an edge can be run together."""
        source, target = problem.nodes[edge.source], problem.nodes[edge.target]
        exchange = edge.exchange
        if exchange is None:
            return np.ones(edge.seconds.shape, bool)
        wanted_codes = target.ins(exchange.port)
        base, at_view = base_codes(self._sizes, wanted_codes, exchange.view)
        made, wanted = value_placement(source.outs(exchange.out_port)), value_placement(base)
        columns = np.ones(len(wanted), bool)
        if at_view is not None:
            columns = (at_view == wanted_codes).all(axis=1)
        fits: BoolArray = np.broadcast_to(columns, edge.seconds.shape).copy()
        for axis in self._data:
            fits &= self._data_pairs(source, target, made[:, None, axis], wanted[None, :, axis])
        for axis in self._others:
            pair = made[:, None, axis], wanted[None, :, axis]
            if exchange.value in self._params:
                fits &= self._param_pairs(target, *pair)
            else:
                fits &= self._other_pairs(edge, source, target, *pair)
        return fits

    def _data_pairs(
        self, source: StrategyNode, target: StrategyNode, made: IntArray, wanted: IntArray
    ) -> BoolArray:
        if source.kind == "param":
            gathered: BoolArray = np.full(made.shape, fill_value=True) & (wanted == REPLICATED)
            return gathered
        is_mean = (made == PARTIAL) & (wanted == REPLICATED) & (target.kind == "out")
        found: BoolArray = (made == wanted) | is_mean
        return found

    def _param_pairs(self, target: StrategyNode, made: IntArray, wanted: IntArray) -> BoolArray:
        """Return where a parameter is read as it is stored, or a bias added to a pending sum."""
        is_equal: BoolArray = made == wanted
        if target.kind == "layout":
            return is_equal
        if target.name in self._dividing:
            added: BoolArray = is_equal | ((made == REPLICATED) & (wanted == PARTIAL))
            return added
        whole: BoolArray = is_equal & (wanted == REPLICATED)
        return whole

    def _other_pairs(
        self,
        edge: Edge,
        source: StrategyNode,
        target: StrategyNode,
        made: IntArray,
        wanted: IntArray,
    ) -> BoolArray:
        """Return where a value is read as it is handed on, or next to a module that divides."""
        value = edge.exchange.value if edge.exchange else ""
        may_change = value in self._ends and source.kind != "layout"
        own = self._dividing.get(target.name)
        if own is not None and edge.exchange:
            slot = list(own.inputs)[edge.exchange.port]
            may_change |= slot == first_slot(self._kinds[own.module])
        # A module that divides makes pending sums, which are reduced for its one consumer.
        fits = (made == wanted) | may_change
        found: BoolArray = fits & (wanted != PARTIAL)
        return found
