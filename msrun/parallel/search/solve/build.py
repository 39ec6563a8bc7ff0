"""From a program and a setting to the problem that is solved."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from msrun.errors import UsageError
from msrun.parallel.search.cost.cost import RedistributionCosts, collective
from msrun.parallel.search.cost.redistribution import MoveKind
from msrun.parallel.search.graph.axis_placement import (
    RR,
    RZ,
    SHARD_CODES,
    FloatArray,
    IntArray,
    is_sharded,
    value_placement,
)
from msrun.parallel.search.graph.operators import rule_of
from msrun.parallel.search.graph.program import Program, Step, Value
from msrun.parallel.search.graph.rules import Choice, ShardingRule, Site, layout_rule
from msrun.parallel.search.graph.views import DimMap
from msrun.parallel.search.solve.edges import copied_bytes, exchange_seconds
from msrun.parallel.search.solve.problem import (
    Edge,
    Exchange,
    Problem,
    Setting,
    StrategyNode,
    combinations,
    layout_node,
    parts,
    stored_parts,
    work,
)
from msrun.parallel.search.solve.saved_activations import NOTHING, Retention, SavedActivations
from msrun.parallel.search.solve.uses import Uses

Key = Any
# Of each strategy: seconds, bytes, and bytes kept of one micro-batch.
Weights = tuple[FloatArray, FloatArray, FloatArray]


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A wish of the user: how one tensor lies.

    Args:
        node: The node that has it.
        port: Number of the node's input; None is its output.
        codes: Axis -> code; only where the values lie counts.
        key: Where the wish stands, for messages.
    """

    node: str
    port: int | None = None
    codes: dict[int, int]
    key: str


class Focus(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of all strategies is looked at.

    Args:
        axes: Axes that choose.
        others: Node -> what it has chosen on all axes, which holds for the other axes; those
            that are not there have chosen nothing, the first of all choices.
    """

    axes: frozenset[int]
    others: dict[str, tuple[int, ...]]


def build(
    program: Program,
    setting: Setting,
    *,
    cuts: Collection[str] = (),
    block_of: Mapping[str, int] | None = None,
    pins: Iterable[Pin] = (),
    focus: Focus | None = None,
    prices: RedistributionCosts | None = None,
) -> Problem:
    """Return the problem of placing every tensor of `program`.

    Args:
        program: The forward pass.
        setting: Mesh, machine, and how a step is run.
        cuts: Values between repeated blocks, which get a hub in any case.
        block_of: Step of a repeated block -> number of the block.
        pins: The user's wishes.
        focus: Part of the strategies; None is all of them.
        prices: Those of the setting, if they are there already.

    Raises:
        UsageError: A wish cannot be met.
    """
    builder = _Builder(
        program,
        setting,
        cuts=frozenset(cuts),
        block_of=block_of or {},
        pins=pins,
        focus=focus,
        prices=prices or setting.redistribution_costs(),
    )
    return builder.build()


class _Builder:
    """Adds nodes in the order of execution; equal operators share their tables."""

    def __init__(
        self,
        program: Program,
        setting: Setting,
        *,
        cuts: frozenset[str],
        block_of: Mapping[str, int],
        pins: Iterable[Pin],
        focus: Focus | None,
        prices: RedistributionCosts,
    ) -> None:
        self._program, self._setting, self._focus = program, setting, focus
        self._cuts, self._block_of = cuts, block_of
        self._pins: dict[str, list[Pin]] = {}
        for pin in pins:
            self._pins.setdefault(pin.node, []).append(pin)
        self._prices = prices
        self._shared: dict[Key, ShardingRule] = {}
        self._sites = {step.name: Site(step, program) for step in program.steps}
        self._signatures = {name: site.signature() for name, site in self._sites.items()}
        self._rules = {step.name: self._rule(step.name) for step in program.steps}
        self._uses = Uses(program, setting, self._rules)
        self._trained = program.trained() if setting.training else set()
        self._again = self._block_of if setting.recompute else {}
        self._kept = SavedActivations(
            program,
            self._rules,
            self._uses,
            trained=self._trained,
            cuts=cuts,
            recomputed=self._again,
        )
        self._makers: dict[str, tuple[int, int]] = {}
        self._tables: dict[Key, tuple[IntArray, Weights]] = {}
        self._matrices: dict[Key, tuple[FloatArray, FloatArray | None]] = {}
        self._keys: list[Key] = []
        self._problem = Problem(nodes=[], edges=[])

    def build(self) -> Problem:
        for name in self._program.params:
            if self._uses.uses.get(name):
                self._add_param(name)
        unknown: dict[str, None] = {}
        for step in self._program.steps:
            is_constant = self._uses.constants.issuperset(step.outputs)
            if is_constant or step.outputs[0] in self._uses.views:
                continue
            if not self._rules[step.name].known:
                unknown.setdefault(step.target)
            self._add_step(step)
        self._add_outputs()
        self._problem.unknown = tuple(unknown)
        return self._problem

    def _rule(self, name: str) -> ShardingRule:
        key = self._signatures[name]
        if key not in self._shared:
            self._shared[key] = rule_of(self._sites[name])
        return self._shared[key]

    # Nodes.

    def _add(self, name: str, kind: str, rule: ShardingRule, key: Key, weigh: _Weigh) -> int:
        """Add a node whose seconds and bytes `weigh` finds, unless an equal node has had them."""
        nothing = (0,) * len(self._setting.sizes)
        picked = self._focus.others.get(name, nothing) if self._focus else None
        full = (key, name if name in self._pins else None, picked)
        if full not in self._tables:
            rows = self._rows(name, rule.choices, picked)
            self._tables[full] = (rows, weigh(rows))
        rows, (seconds, memory, held) = self._tables[full]
        node = StrategyNode(
            name=name, kind=kind, rule=rule, rows=rows, seconds=seconds, memory=memory, held=held
        )
        self._problem.nodes.append(node)
        self._keys.append(full)
        return len(self._keys) - 1

    def _rows(
        self, name: str, choices: tuple[Choice, ...], picked: tuple[int, ...] | None
    ) -> IntArray:
        """Return the strategies that a node has."""
        sizes = self._setting.sizes
        pins: Sequence[Pin] = self._pins.get(name, ())
        per_axis = []
        for axis in range(len(sizes)):
            allowed = [at for at, c in enumerate(choices) if all(_meets(p, axis, c) for p in pins)]
            if self._focus and picked is not None and axis not in self._focus.axes:
                allowed = [picked[axis]] if picked[axis] in allowed else allowed[:1]
            per_axis.append(allowed)
        rows = combinations(per_axis, choices, sizes)
        if not len(rows):
            raise UsageError(f"{pins[0].key}: {name} can not be divided so")
        return rows

    def _add_param(self, name: str) -> None:
        value = self._program.values[name]
        is_trained = name in self._trained
        key = ("param", value, is_trained)
        if key not in self._shared:
            self._shared[key] = _param_rule(value, is_trained=is_trained)
        rule = self._shared[key]

        def weigh(rows: IntArray) -> Weights:
            return self._weigh_param(value, rule, rows, is_trained=is_trained)

        self._makers[name] = (self._add(name, "param", rule, key, weigh), 0)
        self._add_layout_node(name)

    def _weigh_param(
        self, value: Value, rule: ShardingRule, rows: IntArray, *, is_trained: bool
    ) -> Weights:
        """Return seconds and bytes of a parameter: its update, and what it and its state take.

        Where the state is cut flat, the ranks gather what each of them updated.
        """
        setting, topology = self._setting, self._setting.topology
        codes = np.array([choice.outs[0] for choice in rule.choices])[rows]
        kept = parts(is_sharded(codes), setting.sizes)
        if not is_trained:
            return np.zeros(len(rows)), value.nbytes / kept, np.zeros(len(rows))
        updated = parts(is_sharded(codes) | (codes == RZ), setting.sizes)
        memory: FloatArray = (
            value.count
            * (2 * value.itemsize + setting.state_bytes)
            / stored_parts(value.shape, codes, setting.sizes)
        )
        touched = 2 * (value.itemsize + setting.state_bytes)
        seconds: FloatArray = value.count * touched / updated / topology.memory_bandwidth
        flat = np.where(codes == RZ, SHARD_CODES, -1)
        whole = np.full_like(flat[:1], -1)
        start = self._prices.seconds(flat, whole, 0.0)[:, 0]
        rate = self._prices.seconds(flat, whole, 1.0)[:, 0] - start
        gathered = start + rate * value.nbytes / kept
        return seconds + gathered * (1 - topology.overlap), memory, np.zeros(len(rows))

    def _add_step(self, step: Step) -> None:
        rule = self._rules[step.name]
        again = step.name in self._again
        kept = self._kept.of_step(step)
        layouts = self._uses.layouts
        fixed = tuple(
            (port, layouts[name].tobytes())
            for port, name in enumerate(step.inputs.values())
            if name in layouts
        )

        def weigh(rows: IntArray) -> Weights:
            seconds = work(rule, rows, self._setting, again=again)
            memory, held = np.zeros(len(rows)), np.zeros(len(rows))
            for end, port, nbytes, is_per_microbatch in kept:
                codes = np.array([getattr(choice, end)[port] for choice in rule.choices])[rows]
                share = nbytes / parts(is_sharded(codes), self._setting.sizes)
                memory += share
                held += share * is_per_microbatch
            seconds += self._fetch(step, rule, rows) + self._sum_inside(rule, rows)
            return seconds, memory, held

        key = ("op", self._signatures[step.name], again, kept, fixed)
        at = self._add(step.name, "op", rule, key, weigh)
        for port, name in enumerate(step.inputs.values()):
            root, view = self._uses.base_of(name)
            if root not in self._uses.constants:
                self._connect(root, at, port, view, self._kept.of_copy(root, step, port))
        for port, name in enumerate(step.outputs):
            self._makers[name] = (at, port)
            self._add_layout_node(name)

    def _fetch(self, step: Step, rule: ShardingRule, rows: IntArray) -> FloatArray:
        """Return the seconds to bring constants to where each strategy wants them."""
        seconds = np.zeros(len(rows))
        for port, name in enumerate(step.inputs.values()):
            layout = self._uses.layouts.get(name)
            if layout is not None:
                wanted = value_placement(
                    np.array([choice.ins[port] for choice in rule.choices])[rows]
                )
                nbytes = self._program.values[name].nbytes
                moved = self._prices.seconds(value_placement(layout), wanted, nbytes)[0]
                seconds += moved * self._setting.rounds
        return seconds

    def _sum_inside(self, rule: ShardingRule, rows: IntArray) -> FloatArray:
        """Return the seconds of sums that the operator itself takes over its ranks."""
        seconds = np.zeros(len(rows))
        nbytes = np.array([choice.summed for choice in rule.choices])
        for axis, wire in enumerate(self._prices.wires):
            if nbytes.any() and wire.size > 1:
                start, rate = collective(MoveKind.REDUCE, wire)
                here = nbytes[rows[:, axis]]
                seconds += np.where(here > 0, start + rate * here, 0.0)
        return seconds * self._setting.rounds * (1 + self._setting.training)

    def _add_layout_node(self, value: str) -> None:
        if not self._kept.has_layout_node(value):
            return
        tensor = self._program.values[value]
        is_kept, is_per_microbatch = self._kept.of_layout_node(value)
        key = ("layout", tensor.shape, tensor.itemsize, is_kept, is_per_microbatch)
        if key not in self._shared:
            self._shared[key] = layout_rule(tensor)
        rule = self._shared[key]

        def weigh(rows: IntArray) -> Weights:
            if not is_kept:
                return _nothing(rows)
            codes = np.array([choice.outs[0] for choice in rule.choices])[rows]
            share = tensor.nbytes / parts(is_sharded(codes), self._setting.sizes)
            return np.zeros(len(rows)), share, share * is_per_microbatch

        at = self._add(layout_node(value), "layout", rule, key, weigh)
        self._connect(value, at, 0, None, self._kept.of_copy(value, None, 0))
        self._makers[value] = (at, 0)

    def _add_outputs(self) -> None:
        """Have the outputs lie as whoever called the model expects them."""
        sizes = self._setting.sizes
        for number, value in enumerate(self._program.outputs):
            root, view = self._uses.base_of(value)
            if root in self._uses.constants:
                continue
            tensor = self._program.values[value]
            rule = _output_rule(tensor)
            rows = combinations(self._output_choices(tensor), rule.choices, sizes)
            zeros = np.zeros(len(rows))
            node = StrategyNode(
                name=f"out:{number}",
                kind="out",
                rule=rule,
                rows=rows,
                seconds=zeros,
                memory=zeros,
                held=zeros,
            )
            self._problem.nodes.append(node)
            self._keys.append(("out", tensor.shape))
            self._connect(root, len(self._keys) - 1, 0, view)

    def _output_choices(self, tensor: Value) -> list[range]:
        sizes, data = self._setting.sizes, self._setting.data_axes
        both = range(2 if tensor.shape else 1)
        if not data and not self._setting.batch:
            return [both] * len(sizes)
        divisor = int(np.prod([sizes[m] for m in data]))
        fits = bool(tensor.shape) and tensor.shape[0] % divisor == 0
        cut = range(1, 2) if fits else range(1)
        return [cut if axis in data else range(1) for axis in range(len(sizes))]

    # Edges.

    def _connect(
        self, value: str, at: int, port: int, view: DimMap | None, copy: Retention = NOTHING
    ) -> None:
        """Add the edge on which node `at` gets `value`, and keeps its own copy of it."""
        source, made = self._makers[value]
        nodes, nbytes = self._problem.nodes, self._program.values[value].nbytes
        ahead, back = self._traffic(value, nodes[source], nodes[at])
        named = tuple(view.dims.items()) if view else None
        key = (
            *(self._keys[source], self._keys[at], made, port, named),
            *(ahead, back, nbytes, copy.is_kept),
        )
        moved = Exchange(
            value=value, made=made, port=port, view=view, nbytes=nbytes, ahead=ahead, back=back
        )
        if key not in self._matrices:
            ends = nodes[source].outs(made), nodes[at].ins(port)
            self._matrices[key] = (
                exchange_seconds(self._prices, *ends, moved),
                copied_bytes(self._setting.sizes, *ends, moved) if copy.is_kept else None,
            )
        seconds, memory = self._matrices[key]
        self._problem.edges.append(Edge(source, at, seconds, moved, memory, copy.is_per_microbatch))

    def _traffic(
        self, value: str, source: StrategyNode, target: StrategyNode
    ) -> tuple[float, float]:
        """Return how often a step moves `value` forward, and its gradient back.

        Stored parameters are gathered for each micro-batch, and kept until its backward pass; their
        gradients are summed once a step.
        """
        setting = self._setting
        has_gradient = value in self._trained
        again = target.name in self._again
        if source.kind == "param":
            visible = 1 - setting.topology.overlap
            return setting.rounds * (1 + again) * visible, (visible if has_gradient else 0.0)
        back = 1 if value in self._program.params else setting.rounds
        return float(setting.rounds * (1 + again)), float(back if has_gradient else 0)


class _Weigh(Protocol):
    """Finds seconds and bytes of strategies."""

    def __call__(self, rows: IntArray, /) -> Weights: ...


def _meets(pin: Pin, axis: int, choice: Choice) -> bool:
    """Return whether a choice on one axis is what `pin` wishes."""
    if axis not in pin.codes:
        return True
    code = choice.outs[0] if pin.port is None else choice.ins[pin.port]
    return bool(value_placement(np.array(code)) == value_placement(np.array(pin.codes[axis])))


def _nothing(rows: IntArray) -> Weights:
    return np.zeros(len(rows)), np.zeros(len(rows)), np.zeros(len(rows))


def _param_rule(value: Value, *, is_trained: bool) -> ShardingRule:
    """Return how a parameter can be stored: whole, cut by a dim, or whole with its state cut."""
    choices = [Choice("R", 0, (), (RR,), divides=False)]
    if is_trained and value.shape:
        choices.append(Choice("Z", 0, (), (RZ,), divides=False))
    for dim, size in enumerate(value.shape[:SHARD_CODES]):
        if size > 1:
            choices.append(Choice(f"d{dim}", size, (), (dim,), divides=False))
    return ShardingRule(choices=tuple(choices))


def _output_rule(value: Value) -> ShardingRule:
    choices = [Choice("R", 0, (RR,), (), divides=False)]
    if value.shape:
        choices.append(Choice("b", value.shape[0], (0,), (), divides=False))
    return ShardingRule(choices=tuple(choices))
