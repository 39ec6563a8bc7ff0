"""From a program and a setting to the graph of costs that the search solves.

The problem.  A plan says how every parameter is stored, how every operator is split and how every
tensor in between is placed, on each mesh axis.  The time and memory of one training step, forward
and backward, must become costs of single nodes and of pairs of nodes (`problem`), for models of
thousands of operators with tens to hundreds of strategies each.

The idea.

- The forward graph is enough.  A placement code stands for a value and its gradient, so a strategy
  of an operator fixes what its backward reads and makes (`axis_placement`, `rules`).
- A node costs what its strategy alone decides: computation by the roofline, collectives inside the
  operator, redistribution of constants that it reads, the update of a parameter, bytes it owns
  (`saved_activations`).
- An edge costs what two strategies decide: the redistribution of one tensor, of its gradient on
  the way back, and a copy that the consumer saves (`edges`).
- A tensor with several consumers gets a layout node.  Once it is there it stands for the producer,
  so consumers pay for redistribution from its layout.
- Time is that of one step.  Activations move in every micro-batch.  A stored parameter is gathered
  in every micro-batch, again where its block is recomputed, and its gradient is reduced once a
  step; the share of that traffic which `Topology.overlap` hides costs nothing.
- Equal operators share their tables.  A key names all that a table follows from, so the hundred
  layers of a transformer need the tables of one.

Invariants.

- Every value that is no view and no constant has exactly one producing node in `_producers` at a
  time, and an edge leads from a node that is there already to one that is new.
- Two nodes or edges with equal keys have the very same table objects, not equal ones: elimination
  and `Problem.in_flight` find shared tables by identity and compute each once.
- The first choice of every rule is to replicate: `Focus` gives it to nodes without a choice yet.

What was tried and lost.  torch tensors as tables: a pure package would need torch, and so would a
search of a program that is traced already.  An integer program for a solver (HiGHS): the same
optimum, in 0.5 s to minutes where elimination takes milliseconds.  Redistribution tables that are
kept for every mesh: with them kept for one mesh, and layouts that bound each other, the search for
a mesh on 1,024 devices takes a quarter of the memory.
"""

# tidy: long file, nodes, edges and their shared tables are one idea, and its theory stands above

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from msrun.errors import ConfigError
from msrun.parallel.search.cost.cost import RedistributionCosts, collective
from msrun.parallel.search.cost.redistribution import MoveKind
from msrun.parallel.search.graph.axis_placement import (
    FLAT_SHARDED,
    REPLICATED,
    RR,
    RZ,
    FloatArray,
    IntArray,
    is_sharded,
    value_placement,
)
from msrun.parallel.search.graph.operators import rule_of
from msrun.parallel.search.graph.program import Program, Step, Value
from msrun.parallel.search.graph.rules import (
    Choice,
    ShardingRule,
    Site,
    layout_rule,
    output_rule,
    param_rule,
)
from msrun.parallel.search.graph.views import DimMap
from msrun.parallel.search.solve.edges import copied_bytes, exchange_seconds
from msrun.parallel.search.solve.problem import (
    Edge,
    Exchange,
    Problem,
    Setting,
    StrategyNode,
    combinations,
    is_layout_node,
    layout_node,
    named_by,
    parts,
    stored_parts,
    work,
)
from msrun.parallel.search.solve.saved_activations import NOT_SAVED, Retention, SavedActivations
from msrun.parallel.search.solve.uses import Uses

Key = Any
# Of each strategy: seconds, bytes, and bytes that every micro-batch in flight takes again.
NodeCosts = tuple[FloatArray, FloatArray, FloatArray]


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """The placement of one tensor that the user has fixed.

    Args:
        node: The node that has it.
        port: Number of the node's input; None is its output.
        codes: Axis -> code; only the placement of the values counts.
        key: The configuration key that fixes it, for messages.
    """

    node: str
    port: int | None = None
    codes: dict[int, int]
    key: str


class Focus(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of all strategies is searched.

    Args:
        axes: Axes that are free.
        others: Node -> its choice on all axes, which holds for the axes that are not free; nodes
            that are missing keep the first choice there.
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
    redistribution: RedistributionCosts | None = None,
) -> Problem:
    """Return the problem of placing every tensor of `program`.

    Args:
        program: The forward pass.
        setting: Mesh, machine, and how a step is run.
        cuts: Values between repeated blocks, which get a layout node in any case.
        block_of: Step of a repeated block -> number of the block.
        pins: Placements that the user has fixed.
        focus: Part of the strategies; None is all of them.
        redistribution: Costs of the setting, if they are known already.

    Raises:
        ConfigError: No strategy has a placement that the user has fixed.
    """
    builder = _Builder(
        program,
        setting,
        cuts=frozenset(cuts),
        block_of=block_of or {},
        pins=pins,
        focus=focus,
        redistribution=redistribution or setting.redistribution_costs(),
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
        redistribution: RedistributionCosts,
    ) -> None:
        self._program, self._setting, self._focus = program, setting, focus
        self._block_of = block_of
        self._pins: dict[str, list[Pin]] = {}
        for pin in pins:
            self._pins.setdefault(pin.node, []).append(pin)
        cuts |= {named_by(node) for node in self._pins if is_layout_node(node)}
        self._cuts = cuts
        self._redistribution = redistribution
        self._shared: dict[Key, ShardingRule] = {}
        self._sites = {step.name: Site(step, program) for step in program.steps}
        self._signatures = {name: site.signature() for name, site in self._sites.items()}
        self._rules = {step.name: self._rule(step.name) for step in program.steps}
        self._uses = Uses(program, setting, self._rules)
        self._trained = program.trained() if setting.training else set()
        self._recomputed = self._block_of if setting.recompute else {}
        self._saved = SavedActivations(
            program,
            self._rules,
            self._uses,
            trained=self._trained,
            cuts=cuts,
            recomputed=self._recomputed,
            keeps_params=setting.decided.keeps_gathered,
        )
        self._producers: dict[str, tuple[int, int]] = {}
        self._tables: dict[Key, tuple[IntArray, NodeCosts]] = {}
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

    def _add(
        self,
        name: str,
        kind: str,
        rule: ShardingRule,
        key: Key,
        weigh: _CostFunction,
        *,
        stored: int | None = None,
    ) -> int:
        """Add a node with the costs that `weigh` finds, or those of an equal node before it."""
        nothing = (0,) * len(self._setting.sizes)
        picked = self._focus.others.get(name, nothing) if self._focus else None
        # A pin or a fixed choice changes which strategies a node has, so no other node shares them.
        full = (key, name if name in self._pins else None, picked)
        if full not in self._tables:
            rows = self._rows(name, rule.choices, picked, stored)
            self._tables[full] = (rows, weigh(rows))
        rows, (seconds, memory, microbatch_memory) = self._tables[full]
        node = StrategyNode(
            name=name,
            kind=kind,
            rule=rule,
            rows=rows,
            seconds=seconds,
            memory=memory,
            microbatch_memory=microbatch_memory,
        )
        self._problem.nodes.append(node)
        self._keys.append(full)
        return len(self._keys) - 1

    def _rows(
        self,
        name: str,
        choices: tuple[Choice, ...],
        picked: tuple[int, ...] | None,
        stored: int | None,
    ) -> IntArray:
        """Return the strategies that a node has; over data axes those with the code `stored`."""
        sizes = self._setting.sizes
        pins: Sequence[Pin] = self._pins.get(name, ())
        per_axis = []
        for axis in range(len(sizes)):
            allowed = [at for at, c in enumerate(choices) if all(_meets(p, axis, c) for p in pins)]
            if stored is not None and axis in self._setting.data_axes:
                allowed = [at for at in allowed if choices[at].outs[0] == stored]
            if self._focus and picked is not None and axis not in self._focus.axes:
                allowed = [picked[axis]] if picked[axis] in allowed else allowed[:1]
            per_axis.append(allowed)
        rows = combinations(per_axis, choices, sizes)
        if not len(rows):
            raise ConfigError(f"{pins[0].key}: {self._described(name)} cannot be placed like that")
        return rows

    def _described(self, name: str) -> str:
        """Return how messages name a node."""
        if name in self._sites:
            step = self._sites[name].step
            return f"{step.packet} of {step.module or 'the model'}"
        return self._program.params.get(name, f"the output {named_by(name)}")

    def _stored(self, value: Value, *, is_trained: bool) -> int | None:
        """Return the code of a parameter over data axes, where the caller has decided."""
        least = self._setting.decided.sharded_from
        if least is None:
            return None
        return RZ if is_trained and value.shape and value.nbytes >= least else RR

    def _add_param(self, name: str) -> None:
        value = self._program.values[name]
        is_trained = name in self._trained
        key = ("param", value, is_trained)
        if key not in self._shared:
            self._shared[key] = param_rule(value, is_trained=is_trained)
        rule = self._shared[key]

        def weigh(rows: IntArray) -> NodeCosts:
            return self._weigh_param(value, rule, rows, is_trained=is_trained)

        stored = self._stored(value, is_trained=is_trained)
        self._producers[name] = (self._add(name, "param", rule, key, weigh, stored=stored), 0)
        self._add_layout_node(name)

    def _weigh_param(
        self, value: Value, rule: ShardingRule, rows: IntArray, *, is_trained: bool
    ) -> NodeCosts:
        """Return the costs of a parameter: its update, and the bytes of it and its state.

        Where the state is sharded flat, the ranks gather what each of them updated: once, or in
        every forward and backward pass.
        """
        setting, topology = self._setting, self._setting.topology
        codes = np.array([choice.outs[0] for choice in rule.choices])[rows]
        shards = parts(is_sharded(codes), setting.sizes)
        if not is_trained:
            return np.zeros(len(rows)), value.nbytes / shards, np.zeros(len(rows))
        # With sharded state each rank updates its share alone, though the parameter is replicated.
        updated = parts(is_sharded(codes) | (codes == RZ), setting.sizes)
        stored = stored_parts(value.shape, codes, setting.sizes)
        is_whole = setting.decided.has_whole_gradients and setting.rounds > 1
        memory: FloatArray = value.count * (
            (value.itemsize + setting.state_bytes) / stored
            + value.itemsize / (shards if is_whole else stored)
        )
        # The optimizer reads and writes parameter and state; its arithmetic is free beside that.
        touched = 2 * (value.itemsize + setting.state_bytes)
        seconds: FloatArray = value.count * touched / updated / topology.memory_bandwidth
        flat = np.where(codes == RZ, FLAT_SHARDED, REPLICATED)
        replicated = np.full_like(flat[:1], REPLICATED)
        start = self._redistribution.seconds(flat, replicated, 0.0)[:, 0]
        rate = self._redistribution.seconds(flat, replicated, 1.0)[:, 0] - start
        gathered = start + rate * value.nbytes / shards
        if setting.decided.gathers_each:
            gathered *= 2 * setting.rounds
        return seconds + gathered * (1 - topology.overlap), memory, np.zeros(len(rows))

    def _add_step(self, step: Step) -> None:
        rule = self._rules[step.name]
        recomputes = step.name in self._recomputed
        saved = self._saved.of_step(step)
        layouts = self._uses.layouts
        fixed = tuple(
            (port, layouts[name].tobytes())
            for port, name in enumerate(step.inputs.values())
            if name in layouts
        )

        def weigh(rows: IntArray) -> NodeCosts:
            seconds = work(rule, rows, self._setting, recomputes=recomputes)
            memory, microbatch_memory = np.zeros(len(rows)), np.zeros(len(rows))
            for end, port, nbytes, is_per_microbatch in saved:
                codes = np.array([getattr(choice, end)[port] for choice in rule.choices])[rows]
                share = nbytes / parts(is_sharded(codes), self._setting.sizes)
                memory += share
                microbatch_memory += share * is_per_microbatch
            seconds += self._move_constants(step, rule, rows) + self._reduce_inside(rule, rows)
            return seconds, memory, microbatch_memory

        key = ("op", self._signatures[step.name], recomputes, saved, fixed)
        at = self._add(step.name, "op", rule, key, weigh)
        for port, name in enumerate(step.inputs.values()):
            base, view = self._uses.base_of(name)
            if base not in self._uses.constants:
                self._connect(base, at, port, view, self._saved.of_copy(base, step, port))
        for port, name in enumerate(step.outputs):
            self._producers[name] = (at, port)
            self._add_layout_node(name)

    def _move_constants(self, step: Step, rule: ShardingRule, rows: IntArray) -> FloatArray:
        """Return the seconds to redistribute constants to where each strategy reads them."""
        seconds = np.zeros(len(rows))
        for port, name in enumerate(step.inputs.values()):
            layout = self._uses.layouts.get(name)
            if layout is not None:
                wanted = value_placement(
                    np.array([choice.ins[port] for choice in rule.choices])[rows]
                )
                nbytes = self._program.values[name].nbytes
                moved = self._redistribution.seconds(value_placement(layout), wanted, nbytes)[0]
                seconds += moved * self._setting.rounds
        return seconds

    def _reduce_inside(self, rule: ShardingRule, rows: IntArray) -> FloatArray:
        """Return the seconds of all-reduces inside the operator, such as those of a batch norm."""
        seconds = np.zeros(len(rows))
        nbytes = np.array([choice.summed for choice in rule.choices])
        for axis, wire in enumerate(self._redistribution.wires):
            if nbytes.any() and wire.size > 1:
                start, rate = collective(MoveKind.REDUCE, wire)
                here = nbytes[rows[:, axis]]
                seconds += np.where(here > 0, start + rate * here, 0.0)
        return seconds * self._setting.rounds * (1 + self._setting.training)

    def _add_layout_node(self, value: str) -> None:
        if not self._saved.has_layout_node(value):
            return
        tensor = self._program.values[value]
        is_saved, is_per_microbatch = self._saved.of_layout_node(value)
        key = ("layout", tensor.shape, tensor.itemsize, is_saved, is_per_microbatch)
        if key not in self._shared:
            self._shared[key] = layout_rule(tensor)
        rule = self._shared[key]

        def weigh(rows: IntArray) -> NodeCosts:
            if not is_saved:
                return _no_costs(rows)
            codes = np.array([choice.outs[0] for choice in rule.choices])[rows]
            share = tensor.nbytes / parts(is_sharded(codes), self._setting.sizes)
            return np.zeros(len(rows)), share, share * is_per_microbatch

        at = self._add(layout_node(value), "layout", rule, key, weigh)
        self._connect(value, at, 0, None, self._saved.of_copy(value, None, 0))
        # From here on consumers connect to this node.
        self._producers[value] = (at, 0)

    def _add_outputs(self) -> None:
        """Add nodes for outputs: they are redistributed to the layout that the caller expects."""
        sizes = self._setting.sizes
        for number, value in enumerate(self._program.outputs):
            base, view = self._uses.base_of(value)
            if base in self._uses.constants:
                continue
            tensor = self._program.values[value]
            rule = output_rule(tensor)
            rows = combinations(self._output_choices(tensor), rule.choices, sizes)
            zeros = np.zeros(len(rows))
            node = StrategyNode(
                name=f"out:{number}",
                kind="out",
                rule=rule,
                rows=rows,
                seconds=zeros,
                memory=zeros,
                microbatch_memory=zeros,
            )
            self._problem.nodes.append(node)
            self._keys.append(("out", tensor.shape))
            self._connect(base, len(self._keys) - 1, 0, view)

    def _output_choices(self, tensor: Value) -> list[range]:
        sizes, data = self._setting.sizes, self._setting.data_axes
        both = range(2 if tensor.shape else 1)
        if not data and not self._setting.batch:
            return [both] * len(sizes)
        # Ranks with different samples want the outputs of theirs, if each axis can have its share.
        divisor = int(np.prod([sizes[m] for m in data]))
        fits = bool(tensor.shape) and tensor.shape[0] % divisor == 0
        cut = range(1, 2) if fits else range(1)
        return [cut if axis in data else range(1) for axis in range(len(sizes))]

    # Edges.

    def _connect(
        self, value: str, at: int, port: int, view: DimMap | None, copy: Retention = NOT_SAVED
    ) -> None:
        """Add the edge on which node `at` gets `value`, and may save a copy of its own."""
        source, out_port = self._producers[value]
        nodes, nbytes = self._problem.nodes, self._program.values[value].nbytes
        times = self._traffic(value, nodes[source], nodes[at])
        named = tuple(view.dims.items()) if view else None
        key = (
            *(self._keys[source], self._keys[at], out_port, port, named),
            *(*times, nbytes, copy.is_saved),
        )
        exchange = Exchange(
            value=value,
            out_port=out_port,
            port=port,
            view=view,
            nbytes=nbytes,
            forward_times=times[0],
            backward_times=times[1],
        )
        if key not in self._matrices:
            ends = nodes[source].outs(out_port), nodes[at].ins(port)
            self._matrices[key] = (
                exchange_seconds(self._redistribution, *ends, exchange),
                copied_bytes(self._setting.sizes, *ends, exchange) if copy.is_saved else None,
            )
        seconds, memory = self._matrices[key]
        self._problem.edges.append(
            Edge(source, at, seconds, exchange, memory, copy.is_per_microbatch)
        )

    def _traffic(
        self, value: str, source: StrategyNode, target: StrategyNode
    ) -> tuple[float, float]:
        """Return how often a step redistributes `value`, and its gradient.

        A stored parameter is gathered for each micro-batch, and saved until its backward pass; its
        gradient is reduced once a step.  Levels of ZeRO that the caller has chosen differ.
        """
        setting = self._setting
        has_gradient = value in self._trained
        recomputes = target.name in self._recomputed
        if source.kind == "param":
            visible = 1 - setting.topology.overlap
            reductions = self._reductions(value) if has_gradient else 0.0
            return setting.rounds * (1 + recomputes) * visible, reductions * visible
        # The layout node of a parameter hands on one gradient a step, as the parameter does.
        backward = 1 if value in self._program.params else setting.rounds
        return float(setting.rounds * (1 + recomputes)), float(backward if has_gradient else 0)

    def _reductions(self, value: str) -> float:
        """Return how often a step reduces the gradient of a parameter, in its own type."""
        tensor, decided = self._program.values[value], self._setting.decided
        is_trained = value in self._trained
        is_each = decided.reduces_each and self._stored(tensor, is_trained=is_trained) == RZ
        times = float(self._setting.rounds) if is_each else 1.0
        return times * (decided.reduce_itemsize or tensor.itemsize) / tensor.itemsize


class _CostFunction(Protocol):
    """Returns the costs of strategies."""

    def __call__(self, rows: IntArray, /) -> NodeCosts: ...


def _meets(pin: Pin, axis: int, choice: Choice) -> bool:
    """Return whether a choice on one axis has the placement that `pin` fixes."""
    if axis not in pin.codes:
        return True
    code = choice.outs[0] if pin.port is None else choice.ins[pin.port]
    return bool(value_placement(np.array(code)) == value_placement(np.array(pin.codes[axis])))


def _no_costs(rows: IntArray) -> NodeCosts:
    return np.zeros(len(rows)), np.zeros(len(rows)), np.zeros(len(rows))
