"""Plans that the ordinary runtime executes: recognised, and turned into its configuration.

The problem.  The executor (`auto.execute`) runs any plan, one traced operator after the other.  It
gathers and reduces tensor by tensor, and it replaces the model's own forward.  Many plans that a
search finds are nothing but data parallel, ZeRO, or `colwise` and `rowwise` modules, which the
runtime does with buckets, with units of `fully_shard`, and with the model's forward as it is: on
2 data-parallel ranks 4 collectives a step where the executor has 72, with sharded state 13 for
141, on 2 x 2 ranks 20 for 88, in as much processor time or less.  Lowering must never guess: a
plan that is only almost what the runtime does would train another model, in silence.

The idea.  Replay the plan on paper as the runtime would run it, and compare every placement.

- Along the data axis each rank runs the model on its own samples: every activation must stay
  sharded by sample from input to output, and no operator may redistribute one.
- Along other axes only modules that a `PlanRule` can divide may change a layout: linear, embedding
  and norm modules that are one operator of the program, whose parameters are their own.  All
  operators between them must keep the layout, and be verified on shards by `tensor.guard`.
- A parameter is replicated or stored in shards along the data axis.  Sharded state or parameters
  become `optimizer: {zero: ...}`, with a threshold if exactly the larger ones are sharded.
- An output may be a pending sum over the data axis only if it is a mean loss.  `auto.native` makes
  it the mean over all samples; `Lowering.means` says which outputs these are.
- The model is traced once more with the samples of one rank.  Each step must be the same operator
  with the shapes that the plan has on a rank: this finds code that computes with the batch size.

Invariants.  Every condition is one call of `_require`, so reading those calls is reading what is
lowered.  A condition that fails means the executor, never an error.  `Lowering` holds all that is
handed to the runtime; nothing else of the plan is used.

What was tried and lost.  Plans whose modules share an input that no module makes, such as a
normalised activation read by query, key and value, went to the executor at first, since each module
placed its input for itself; the runtime now places a shared input once, so they are lowered.
Steps that draw random numbers are not lowered: mode auto has those of one process, which only the
executor draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from msrun.parallel.config import DATA_AXIS, Optimizer
from msrun.parallel.notation.dims import dim_of
from msrun.parallel.search.graph.axis_placement import (
    PARTIAL,
    PR,
    REPLICATED,
    RR,
    RZ,
    value_placement,
)
from msrun.parallel.search.graph.program import Program, Step
from msrun.parallel.search.graph.random_ops import draw_of
from msrun.parallel.search.graph.rules import Choice, ShardingRule, Site
from msrun.parallel.search.graph.views import dim_map
from msrun.parallel.search.mesh.stages import runs
from msrun.parallel.search.solve.edges import base_codes
from msrun.parallel.search.solve.problem import Setting, layout_node
from msrun.parallel.search.solve.uses import Uses
from msrun.parallel.settings.plan_rules import Dims, PlanRule

EXECUTOR = "executor"

# Losses whose mean is over the targets that count, and what else can be a mean.
BY_CLASS = ("cross_entropy_loss", "nll_loss", "nll_loss_nd")
AVERAGES = (
    "mean",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy_with_logits",
    "kl_div",
)
# Classes of modules that rules can divide, each with the input that is its first argument.
_DIVIDED = {"Linear": "input", "Embedding": "indices", "LayerNorm": "input", "RMSNorm": "input"}
# Operators that run on shards between them as the plan has it; `guard` verifies their functions.
_FOLLOWED = """
    add add_ div gelu leaky_relu mul neg pow relu relu_ rsqrt scaled_dot_product_attention sigmoid
    silu sqrt sub tanh to
"""
FOLLOWING = frozenset(_FOLLOWED.split())
# Their other arguments are sizes, which the shapes of their outputs say too.
_SIZED = frozenset(
    ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "expand", "broadcast_to")
)

# Placement of a tensor on each axis.
LayoutRow = tuple[int, ...]


class Lowering(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of the runtime that does what a plan says.

    Args:
        rules: Of modules; none for data parallel alone.
        optimizer: What is sharded over the data axis.
        means: Numbers of the outputs that are means over the data axis.
    """

    rules: list[PlanRule] = []
    optimizer: Optimizer = Optimizer()
    means: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """How reports name what the model runs on."""
        return "styles" if self.rules else "data parallel"


class Modules(msgspec.Struct, frozen=True, kw_only=True):
    """What lowering must know of a model beside its program.

    Args:
        owners: Every name of each parameter -> its value in the program.
        kinds: Module -> name of its class.
    """

    owners: dict[str, str]
    kinds: dict[str, str]


class Planned(msgspec.Struct, frozen=True):
    """A plan.

    Args:
        program: For the samples of all ranks.
        setting: What the plan is for.
        axes: Names of the mesh axes.
        rules: Node -> its rule, those of constants included.
        chosen: Node -> its choice on every axis.
    """

    program: Program
    setting: Setting
    axes: Sequence[str]
    rules: Mapping[str, ShardingRule]
    chosen: Mapping[str, tuple[int, ...]]

    def choices(self, node: str) -> list[Choice]:
        """Return the choice of a node on each axis."""
        return [self.rules[node].choices[at] for at in self.chosen[node]]


class UserDecisions(msgspec.Struct, frozen=True, kw_only=True):
    """What the user has decided beside the search, which only the runtime does.

    Args:
        optimizer: What is sharded over the data axis; None is what the plan says.
    """

    optimizer: Optimizer | None = None


def lower(
    planned: Planned,
    modules: Modules,
    local: Callable[[], Program],
    decided: UserDecisions | None = None,
) -> Lowering | None:
    """Return the configuration with which the runtime executes a plan; None if there is none.

    Args:
        planned: The plan.
        modules: Of the model.
        local: Returns the program for the samples of one rank.
        decided: By the user.  Then dropout draws its masks as the runtime has it.
    """
    try:
        return _Lowerer(planned, modules, decided).lowering(local)
    except _NotLowerableError:
        return None


def runs_on(planned: Planned, modules: Modules, local: Callable[[], Program]) -> str:
    """Return how reports name what a plan runs on; see `lower`."""
    lowering = lower(planned, modules, local)
    return lowering.name if lowering else EXECUTOR


def dividing_steps(program: Program, modules: Modules) -> dict[str, Step]:
    """Return steps that are the only one of a module that a rule can divide, by their names."""
    steps_of: dict[str, list[Step]] = {}
    for step in program.steps:
        steps_of.setdefault(step.module, []).append(step)
    owners, kinds = modules.owners, modules.kinds
    return {
        steps[0].name: steps[0]
        for module, steps in steps_of.items()
        if len(steps) == 1
        and kinds.get(module) in _DIVIDED
        and first_slot(kinds[module]) in steps[0].inputs
        and all(
            owners.get(f"{module}.{slot}") == value
            for slot, value in steps[0].inputs.items()
            if value in program.params
        )
    }


def first_slot(kind: str) -> str:
    """Return the input of its operator that is the first argument of a module of class `kind`."""
    return _DIVIDED[kind]


class _NotLowerableError(Exception):
    """The runtime does not do what the plan says."""


def _require(condition: object) -> None:
    if not condition:
        raise _NotLowerableError


class _Read(NamedTuple):
    """One use of a value.

    Args:
        step: The consumer; None is the caller of the model.
        slot: Name of the step's input; of an output its number.
        name: What is read.
        wanted: IntArray.
    """

    step: Step | None
    slot: str
    name: str
    wanted: LayoutRow


class _Lowerer:
    def __init__(self, planned: Planned, modules: Modules, decided: UserDecisions | None) -> None:
        self._planned, self._modules, self._decided = planned, modules, decided
        self._program, sizes = planned.program, planned.setting.sizes
        self._uses = Uses(self._program, planned.setting, planned.rules)
        axes = [axis for axis, size in enumerate(sizes) if size > 1]
        self._data = [axis for axis in axes if planned.axes[axis] == DATA_AXIS]
        self._others = [axis for axis in axes if axis not in self._data]
        self._dividing = dividing_steps(self._program, modules)
        # Only these outputs may change their layout: a rule has one for them.
        self._ends = {step.outputs[0] for step in self._dividing.values()}
        self._made: dict[str, LayoutRow] = {}
        self._stored: dict[str, LayoutRow] = {}
        self._handed: dict[str, LayoutRow] = {}
        self._means: set[str] = set()

    def lowering(self, local: Callable[[], Program]) -> Lowering:
        """Return the configuration.

        Raises:
            _NotLowerableError: The runtime would do something else.
        """
        self._place()
        outputs = [self._check(read) for read in self._reads()]
        if self._data:
            self._compare(local())
        return Lowering(
            rules=self._rules(),
            optimizer=self._optimizer(),
            means=tuple(at for at in outputs if at is not None),
        )

    # The layout of every value.

    def _place(self) -> None:
        """Find the layout in which each value is made, and the one that consumers get."""
        for value in self._program.params:
            if value in self._planned.chosen:
                self._stored[value] = tuple(c.outs[0] for c in self._planned.choices(value))
                self._made[value] = _placed(self._stored[value])
        for step in self._program.steps:
            packet = step.packet
            _require(draw_of(step) is None or (packet == "dropout" and self._decided))
            if step.attrs.get("sparse"):
                # The runtime reduces the rows of replicated tables alone.
                stored = self._stored.get(step.inputs["weight"], ())
                _require(all(code == RR for code in stored))
            if runs(step, self._uses):
                choices = self._planned.choices(step.name)
                for port, name in enumerate(step.outputs):
                    self._made[name] = _placed([c.outs[port] for c in choices])
                    self._check_partial(step, choices, name)
        for value in self._made:
            node = layout_node(value)
            if node in self._planned.chosen:
                self._handed[value] = _placed([c.outs[0] for c in self._planned.choices(node)])
                self._check_layout_node(value)

    def _check_partial(self, step: Step, choices: Sequence[Choice], name: str) -> None:
        """Require that a pending sum is a mean over samples, or is what a divided module makes."""
        made = self._made[name]
        _require(step.name in self._dividing or all(made[axis] != PARTIAL for axis in self._others))
        for axis in self._data:
            if made[axis] != PARTIAL:
                continue
            given = [
                self._uses.base_of(value)[0]
                for value, code in zip(step.inputs.values(), choices[axis].ins, strict=True)
                if code == PR
            ]
            is_mean = step.packet in (*AVERAGES, *BY_CLASS) and step.attrs.get("reduction", 1) == 1
            _require(self._means.issuperset(given) if not choices[axis].divides else is_mean)
            self._means.add(name)

    def _check_layout_node(self, value: str) -> None:
        """Require that only modules that rules divide hand on another layout than they make."""
        made, handed = self._made[value], self._handed[value]
        for axis in self._data:
            _require(handed[axis] == (REPLICATED if value in self._program.params else made[axis]))
        for axis in self._others:
            _require(handed[axis] == made[axis] or value in self._ends)

    # The layout that every consumer reads.

    def _reads(self) -> Iterator[_Read]:
        for step in self._program.steps:
            if runs(step, self._uses):
                choices = self._planned.choices(step.name)
                for port, (slot, name) in enumerate(step.inputs.items()):
                    yield _Read(step, slot, name, tuple(c.ins[port] for c in choices))
            elif self._uses.constants.issuperset(step.outputs):
                self._check_constant(step)
        for number, name in enumerate(self._program.outputs):
            if name not in self._uses.constants:
                choices = self._planned.choices(f"out:{number}")
                yield _Read(None, str(number), name, tuple(c.ins[0] for c in choices))

    def _check_constant(self, step: Step) -> None:
        """Require that what is computed from each rank's samples stays sharded by them."""
        layouts = self._uses.layouts
        for axis in self._data:
            is_cut = [layouts[name][0][axis] != RR for name in step.inputs.values()]
            _require(not any(is_cut) or all(layouts[name][0][axis] != RR for name in step.outputs))

    def _check(self, read: _Read) -> int | None:
        """Require that nothing moves for `read`; return the number of an output that is a mean."""
        base, view = self._uses.base_of(read.name)
        if base in self._uses.constants:
            _require(_placed(self._uses.layouts[read.name][0].tolist()) == _placed(read.wanted))
            return None
        at_base, at_view = base_codes(self._planned.setting.sizes, np.array([read.wanted]), view)
        _require(at_view is None)
        wanted = _placed(at_base[0].tolist())
        own = self._dividing.get(read.step.name) if read.step else None
        if base in self._program.params:
            self._check_param(base, wanted, is_divided=own is not None)
            return None
        if own is None:
            self._check_following(read, wanted)
        handed = self._handed.setdefault(base, wanted if base in self._ends else self._made[base])
        is_first = own is not None and read.slot == _DIVIDED[self._modules.kinds[own.module]]
        for axis in self._others:
            _require(handed[axis] != PARTIAL and (is_first or wanted[axis] == handed[axis]))
        is_mean = False
        for axis in self._data:
            made = self._made[base][axis]
            is_mean = read.step is None and made == PARTIAL and wanted[axis] == REPLICATED
            _require(is_mean or wanted[axis] == made)
        return int(read.slot) if is_mean else None

    def _check_param(self, value: str, wanted: LayoutRow, *, is_divided: bool) -> None:
        """Require that a parameter is read as it is stored, or gathered over the data axis alone.

        A bias that a module adds to a pending sum is added once by the runtime too.
        """
        for axis in self._data:
            _require(wanted[axis] == REPLICATED)
        for axis in self._others:
            made = self._made[value][axis]
            _require(self._stored[value][axis] != RZ and (is_divided or wanted[axis] == REPLICATED))
            _require(wanted[axis] in (made, PARTIAL if made == REPLICATED else made))

    def _check_following(self, read: _Read, wanted: LayoutRow) -> None:
        """Require that sharded values are read by operators that run on shards in the runtime."""
        if read.step and any(wanted[axis] != REPLICATED for axis in self._others):
            _require(read.step.packet in FOLLOWING and not read.slot.startswith("attn_mask"))

    # The program of one rank's samples.

    def _compare(self, local: Program) -> None:
        """Require that a model does with one rank's samples what the plan has a rank do."""
        # Sizes in arguments differ with the samples; shapes of the outputs, below, show them too.
        _require(len(local.steps) == len(self._program.steps))
        for ours, theirs in zip(self._program.steps, local.steps, strict=True):
            _require(
                (ours.name, ours.target, ours.inputs, ours.outputs)
                == (theirs.name, theirs.target, theirs.inputs, theirs.outputs)
                and (ours.attrs == theirs.attrs or ours.packet in _SIZED)
            )
        data_dims = self._data_dims()
        for name, value in self._program.values.items():
            shape = list(value.shape)
            if name in data_dims:
                for axis in self._data:
                    shape[data_dims[name]] //= self._planned.setting.sizes[axis]
            _require(local.values[name].shape == tuple(shape))

    def _data_dims(self) -> dict[str, int]:
        """Return value -> the dim that the data axis shards, if it shards one."""
        dims: dict[str, int] = {}
        for axis in self._data:
            for name, layout in self._uses.layouts.items():
                if layout[0][axis] != RR:
                    dims[name] = int(layout[0][axis])
            for name, made in self._made.items():
                if made[axis] >= 0 and name not in self._program.params:
                    dims[name] = made[axis]
            for step in self._program.steps:
                if step.outputs[0] in self._uses.views:
                    view = dim_map(Site(step, self._program))
                    (source,) = step.inputs.values()
                    for dim, (base_dim, _) in (view.dims if view else {}).items():
                        if dims.get(source) == base_dim:
                            dims[step.outputs[0]] = dim
        return dims

    # The configuration of the runtime.

    def _rules(self) -> list[PlanRule]:
        """Return the rules of modules that are divided."""
        rules = map(self._rule, self._dividing.values())
        return [rule for rule in rules if _is_divided(rule)]

    def _rule(self, step: Step) -> PlanRule:
        """Return the rule of one module."""
        first = _DIVIDED[self._modules.kinds[step.module]]
        choices = self._planned.choices(step.name)
        ins = _placed([c.ins[list(step.inputs).index(first)] for c in choices])
        out = self._handed.get(step.outputs[0], self._made[step.outputs[0]])
        return PlanRule(
            match=step.module,
            params={
                slot: self._dims(self._made[value], value)
                for slot, value in step.inputs.items()
                if value in self._program.params
            },
            inputs=self._dims(ins, step.inputs[first]),
            out=self._dims(out, step.outputs[0]),
        )

    def _dims(self, placed: LayoutRow, value: str) -> Dims:
        """Return the names of the axes that shard each dim."""
        names = self._planned.axes
        return [
            dim_of([names[axis] for axis in self._others if placed[axis] == dim])
            for dim in range(len(self._program.values[value].shape))
        ]

    def _optimizer(self) -> Optimizer:
        """Return the ZeRO level and threshold that shard what the plan does over the data axis."""
        if self._decided and self._decided.optimizer:
            return self._decided.optimizer
        sharded: dict[str, int] = {}
        replicated: list[int] = [0]
        for value, stored in self._stored.items():
            nbytes = self._program.values[value].nbytes
            for axis in self._others:
                nbytes //= self._planned.setting.sizes[axis] if stored[axis] not in (RR, RZ) else 1
            if any(stored[axis] != RR for axis in self._data):
                sharded[value] = nbytes
            else:
                replicated.append(nbytes)
        if not sharded:
            return Optimizer()
        # The runtime shards what is at least this large, so no replicated one may be.
        threshold = max(replicated) + 1 if len(replicated) > 1 else 0
        _require(min(sharded.values()) >= threshold)
        _require(len({self._program.values[value].itemsize for value in sharded}) == 1)
        is_state = all(self._stored[value][axis] == RZ for value in sharded for axis in self._data)
        return Optimizer(zero=1 if is_state else 2, threshold=threshold)


_PLACED: list[int] = value_placement(np.arange(RZ + 1)).tolist()


def _placed(codes: Sequence[int]) -> LayoutRow:
    return tuple(_PLACED[code] for code in codes)


def _is_divided(rule: PlanRule) -> bool:
    return any(map(any, (rule.inputs or (), rule.out or (), *rule.params.values())))
