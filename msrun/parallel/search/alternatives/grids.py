"""Grids of ranks: which modules a grid divides, and what that costs.

The problem.  A product on a grid (styles `2d`, `2.5d` and `3d`, see `notation.grids`) leaves its
output sharded over the same axes in the other order, so the axes of a product follow from where its
input comes from.  One placement code for each axis, as plans have, does not tell the two orders
apart.

The idea.  Walk through the program once and note for each tensor whether it is whole or a part: the
turn says in which order the axes shard its columns, and a number which dim these are.

- A product of a part has the axes of the part's turn; its output has the other turn.  A product of
  a whole tensor begins with turn 0, for which its input is cut without a collective.
- A norm works on a part, and adds up numbers of its rows.
- Other operators run on a part if the rule of the search splits them along the columns (and the
  rows, where the grid shards these) and `tensor.guard` knows their functions.  Else they get whole
  tensors, as in the runtime, and the walk pays for the gather and for whole work.
- Tensors of both turns that meet have no common layout: then there is no such grid.

Each product costs the collectives of `product_transfers`, from which the formula of received bytes
in docs/parallel.md follows, forward and backward; equal inputs are gathered once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from msrun.parallel.config import DATA_AXIS
from msrun.parallel.notation.grids import grid_dims
from msrun.parallel.search.alternatives.grid_shapes import Grid, grids, product_transfers
from msrun.parallel.search.alternatives.one_rank import (
    Alternative,
    Findings,
    OneRank,
    Transfer,
    fitting,
    joined,
    wires_of,
)
from msrun.parallel.search.cost.redistribution import MoveKind
from msrun.parallel.search.graph.axis_placement import SHARD_CODES
from msrun.parallel.search.graph.program import Step
from msrun.parallel.search.graph.random_ops import draw_of
from msrun.parallel.search.graph.rules import Site
from msrun.parallel.search.graph.views import dim_map
from msrun.parallel.search.plan.lowering import FOLLOWING, Modules, dividing_steps
from msrun.parallel.settings.plan_rules import Dim, Dims

_SHAPES = """
    broadcast_to cat chunk clone contiguous expand expand_as narrow select slice split
    split_with_sizes stack unbind cos detach maximum minimum sin square where _to_copy type_as
"""
# Operators whose functions the guard runs on parts.
_ON_PARTS = FOLLOWING | frozenset(_SHAPES.split())
# Norms over rows, each with the numbers of a row that ranks exchange, forward and backward: two are
# gathered forward, and one is added up.
_ROW_NORMS = {"layer_norm": 2, "rms_norm": 1}
_NO_ROW_NORMS = ("Batch", "Group", "Instance")
_NUMBER = 4  # bytes


def grid_alternatives(
    alone: OneRank, modules: Modules, mesh: Mapping[str, int], limit: float | None
) -> Findings:
    """Return the fastest grid on a mesh; see `grids_on`.

    Args:
        alone: The model, for the samples of a data-parallel rank.
        modules: Of the model.
        mesh: Axis -> size.
        limit: Bytes that a rank has; None is any.
    """
    found, notes = grids_on(alone, modules, mesh)
    return fitting(found, limit, [] if found else notes)


def grids_on(
    alone: OneRank, modules: Modules, mesh: Mapping[str, int]
) -> tuple[list[Alternative], list[str]]:
    """Return all grids on a mesh, and why there are no others."""
    every = [*grids(mesh)]
    if not every:
        return [], ["grids: the mesh has no two or three axes beside dp"]
    if problem := _problem(alone):
        return [], [f"grids: {problem}"]
    found, notes = [], dict[str, None]()
    for grid in every:
        walk = _GridWalk(alone, modules, grid, mesh)
        problem = walk.run()
        if problem:
            notes[f"grid {grid.style}: {problem}"] = None
        else:
            found.append(walk.alternative())
    return found, [*notes]


def _problem(alone: OneRank) -> str:
    """Return why no grid runs a program as one process does; empty if one may."""
    for step in alone.program.steps:
        if draw_of(step) is not None:
            where = step.module or "the model"
            return f"{where} draws random numbers ({step.packet}), which mode auto draws itself"
    return alone.program.of_whole_batch


class _GridPart(NamedTuple):
    """How a tensor is sharded on a grid.

    Args:
        turn: 0 as the input of a product with the axes of the first rule, 1 as its output.
        columns: The dim that is cut into columns.
    """

    turn: int
    columns: int


class _ConflictError(Exception):
    """Tensors of both turns meet."""


class _GridWalk:
    """Follows a program on a grid; see the module.

    Args:
        alone: The program.
        modules: Of the model.
        grid: The grid.
        mesh: That it is a part of.
    """

    def __init__(
        self, alone: OneRank, modules: Modules, grid: Grid, mesh: Mapping[str, int]
    ) -> None:
        self._alone, self._modules, self._grid, self._mesh = alone, modules, grid, dict(mesh)
        self._program, self._values = alone.program, alone.program.values
        self._trained = self._program.trained()
        self._products = {
            name: step
            for name, step in dividing_steps(self._program, modules).items()
            if modules.kinds[step.module] == "Linear" and self._is_own(step)
        }
        self._norms = self._row_norms()
        self._parts: dict[str, _GridPart] = {}
        self._rules: dict[str, int] = {}  # module -> turn
        self._shared: set[str] = set()  # nodes whose work all ranks of the grid share
        self._gathered: set[tuple[str, int]] = set()
        self._cut: set[str] = set()
        self._wholes: set[str] = set()
        self._transfers: list[Transfer] = []
        self._extra = 0.0
        names = [name for name in mesh if name in grid.sizes]
        self._all = joined(names)

    def run(self) -> str:
        """Follow the program; return why the grid cannot divide it, empty if it can."""
        constants = self._program.constants()
        try:
            for step in self._program.steps:
                if not constants.issuperset(step.outputs):
                    self._follow(step)
        except _ConflictError as conflict:
            return str(conflict)
        for value in self._program.outputs:
            self._gather(value)
        if not self._rules:
            return f"no Linear has widths that {self._grid.ranks} ranks divide"
        return ""

    def alternative(self) -> Alternative:
        """Return the configuration, and what it costs."""
        alone, grid = self._alone, self._grid
        shares = self._shares()
        if DATA_AXIS in self._mesh:
            self._transfers += alone.averaged(shares, DATA_AXIS)
        if grid.style == "2.5d":
            # Ranks of the first axis have other samples each, for modules on the grid alone.
            others = {name: shares.get(name, 0.0) for name in self._program.params}
            self._transfers += alone.averaged(others, next(iter(grid.sizes)))
        wires = wires_of(self._mesh, alone.setting)
        costs = alone.moved(self._transfers, wires)
        work = alone.starts
        for name, seconds in alone.seconds.items():
            share = shares.get(name, 1.0) if alone.kinds[name] == "param" else self._work(name)
            work += seconds * share
        memory = self._extra
        for name, nbytes in alone.memory.items():
            share = shares.get(name, 1.0) if alone.kinds[name] == "param" else self._kept(name)
            memory += nbytes * share
        costs = {"computation and update": work, **costs}
        plan = [
            {"match": match, "style": grid.style, "axes": grid.axes(turn)}
            for match, turn in _patterns(self._rules, self._modules.kinds)
        ]
        return Alternative(
            name=f"grid {grid.style}",
            config={"mesh": self._mesh, "plan": plan},
            seconds=sum(costs.values()),
            memory=memory,
            sent=alone.sent(self._transfers, wires),
            costs=costs,
            params=self._placed(),
        )

    def _is_own(self, step: Step) -> bool:
        """Return whether the weight of a product belongs to its module alone, and divides."""
        owners = [*self._modules.owners.values()]
        if any(owners.count(name) > 1 for name in step.inputs.values() if name in owners):
            return False
        width, out = self._values[step.inputs["input"]].shape[-1], self._out(step)[-1]
        return width % self._grid.ranks == 0 and out % self._grid.ranks == 0

    def _out(self, step: Step) -> tuple[int, ...]:
        return self._values[step.outputs[0]].shape

    def _row_norms(self) -> set[str]:
        """Return the modules that are norms over rows, with parameters of one dim."""
        found = set()
        for name, kind in self._modules.kinds.items():
            own = [
                self._values[value].shape
                for full, value in self._modules.owners.items()
                if full.rpartition(".")[0] == name
            ]
            is_of_rows = "Norm" in kind and not any(word in kind for word in _NO_ROW_NORMS)
            fits = all(len(s) == 1 and s[0] % self._grid.ranks == 0 for s in own)
            if is_of_rows and own and fits:
                found.add(name)
        return found

    # Following.

    def _follow(self, step: Step) -> None:
        view = dim_map(Site(step, self._program))
        if view is not None:
            self._follow_view(step, {dim: base for dim, (base, _) in view.dims.items()}, view.dims)
            return
        if step.name in self._products and self._can_cut(step.inputs["input"]):
            self._follow_product(step)
            return
        if step.module in self._norms:
            self._begin_norm(step)
        parts = {
            port: self._parts[name]
            for port, name in enumerate(step.inputs.values())
            if name in self._parts
        }
        if not parts:
            return
        turns = {part.turn for part in parts.values()}
        if len(turns) > 1:
            where = step.module or "the model"
            raise _ConflictError(f"{where} joins inputs and outputs of products")
        (turn,) = turns
        columns = self._kept_columns(step, parts, turn)
        if columns is None:
            for name in step.inputs.values():
                self._gather(name)
            return
        self._shared.add(step.name)
        self._wholes -= set(step.outputs)
        for name, dim in zip(step.outputs, columns, strict=True):
            if dim is not None:
                self._parts[name] = _GridPart(turn, dim)

    def _follow_view(
        self, step: Step, bases: Mapping[int, int], dims: Mapping[int, tuple[int, int]]
    ) -> None:
        (source,) = step.inputs.values()
        part = self._parts.get(source)
        if part is None:
            return
        grid = self._grid
        dim = next((dim for dim, base in bases.items() if base == part.columns), None)
        is_cut = dim is not None and dims[dim][1] % grid.columns(part.turn) == 0
        keeps_rows = grid.rows(part.turn) == 1 or bases.get(0) == 0
        if dim is None or not is_cut or not keeps_rows:
            self._gather(source)
            return
        self._parts[step.outputs[0]] = _GridPart(part.turn, dim)

    def _can_cut(self, value: str) -> bool:
        """Return whether a product may read `value` on the grid."""
        shape, part = self._values[value].shape, self._parts.get(value)
        if part is not None and part.columns != len(shape) - 1:
            return False
        return all(shape[0] % self._grid.rows(turn) == 0 for turn in (0, 1))

    def _follow_product(self, step: Step) -> None:
        grid, source = self._grid, step.inputs["input"]
        value, out = self._values[source], self._values[step.outputs[0]]
        turn = self._cut_or_turn(source)
        rows = math.prod(value.shape[:-1])
        moves = product_transfers(grid, turn, rows, (value.shape[-1], out.shape[-1]))
        gather, scatter, weight = moves
        again = source in self._trained
        rounds = self._alone.setting.rounds
        if (source, turn) not in self._gathered:
            self._gathered.add((source, turn))
            self._add(gather, value.itemsize, rounds * (1 + again))
        self._add(scatter, out.itemsize, rounds * 2)
        if weight is not None:
            self._add(weight, value.itemsize, rounds * 2)
            self._extra += weight.nbytes * value.itemsize
        self._rules[step.module] = turn
        self._shared.add(step.name)
        self._parts[step.outputs[0]] = _GridPart(1 - turn, len(out.shape) - 1)

    def _begin_norm(self, step: Step) -> None:
        """Cut what a norm reads whole, and add the numbers of rows that ranks exchange."""
        for slot, name in step.inputs.items():
            is_row = name in self._trained and name not in self._program.params
            if is_row and name not in self._parts and self._is_of_rows(name):
                if slot != "input" and step.packet not in ("pow", "to", "_to_copy", "mul"):
                    continue
                self._cut_or_turn(name)
            if name in self._parts and step.module not in self._rules:
                self._rules[step.module] = self._parts[name].turn

    def _is_of_rows(self, name: str) -> bool:
        shape = self._values[name].shape
        fits = all(shape[0] % self._grid.rows(turn) == 0 for turn in (0, 1)) if shape else False
        return fits and len(shape) > 1 and shape[-1] % self._grid.ranks == 0

    def _cut_or_turn(self, value: str) -> int:
        """Return the turn of `value`, which is cut first if it is whole."""
        part = self._parts.get(value)
        if part is not None:
            return part.turn
        if value in self._trained and value not in self._cut:
            # Its gradient comes back in parts.
            nbytes = self._values[value].nbytes
            rounds = self._alone.setting.rounds
            self._transfers.append(Transfer(MoveKind.GATHER, self._all, nbytes, rounds))
        self._cut.add(value)
        return 0

    def _kept_columns(
        self, step: Step, parts: Mapping[int, _GridPart], turn: int
    ) -> list[int | None] | None:
        """Return the dim of columns of each output; None if the operator gets whole tensors."""
        grid, rule = self._grid, self._alone.rules.get(step.name)
        if rule is None:
            return None
        summed = self._row_sums(step, parts)
        if summed is not None:
            shape = self._values[next(iter(step.inputs.values()))].shape
            axis = joined(n for n in self._mesh if n in grid.column_axes(turn))
            rows = math.prod(shape[:-1]) / grid.rows(turn)
            nbytes, rounds = rows * summed * _NUMBER, self._alone.setting.rounds
            columns = grid.columns(turn)
            forward = (
                Transfer(MoveKind.GATHER, axis, nbytes * columns, rounds)
                if summed > 1
                else Transfer(MoveKind.REDUCE, axis, nbytes, rounds)
            )
            self._transfers += [forward, Transfer(MoveKind.REDUCE, axis, nbytes, rounds)]
            is_mean = step.packet == "mean"
            return [None if is_mean else len(shape) - 1] + [None] * (len(step.outputs) - 1)
        if step.packet not in _ON_PARTS:
            return None
        splits = [choice for choice in rule.choices if choice.divides]
        for choice in splits:
            fits = all(choice.ins[port] == part.columns for port, part in parts.items())
            kept = all(code < SHARD_CODES for code in choice.outs)
            if fits and kept and choice.size % grid.columns(turn) == 0:
                break
        else:
            return None
        if grid.rows(turn) > 1 and not any(
            all(one.ins[port] == 0 for port in parts) and all(code == 0 for code in one.outs)
            for one in splits
        ):
            return None
        return [*choice.outs]

    def _row_sums(self, step: Step, parts: Mapping[int, _GridPart]) -> int | None:
        """Return how many numbers a row a norm over sharded columns adds up; None if it is none."""
        shape = self._values[next(iter(step.inputs.values()))].shape
        part = parts.get(0)
        if part is None or part.columns != len(shape) - 1:
            return None
        if step.packet in _ROW_NORMS:
            normalized = step.attrs.get("normalized_shape", [0])
            return _ROW_NORMS[step.packet] if len(normalized) == 1 else None
        dims = step.attrs.get("dim")
        is_mean = step.packet == "mean" and step.attrs.get("keepdim") and step.module in self._norms
        return 1 if is_mean and dims in (-1, [-1], [len(shape) - 1]) else None

    def _gather(self, value: str) -> None:
        """Pay for the whole of a part, once; its gradient is cut without a collective."""
        if value in self._parts and value not in self._wholes:
            nbytes = self._values[value].nbytes
            rounds = self._alone.setting.rounds
            self._transfers.append(Transfer(MoveKind.GATHER, self._all, nbytes, rounds))
            self._wholes.add(value)

    def _add(self, one: Transfer, itemsize: int, times: float) -> None:
        self._transfers.append(one._replace(nbytes=one.nbytes * itemsize, times=times))

    # Shares.

    def _shares(self) -> dict[str, float]:
        """Return the share that a rank has of each parameter on the grid."""
        return {
            value: 1 / math.prod(self._mesh[axis] for dim in dims for axis in _axes_of(dim))
            for value, dims in self._dims().items()
        }

    def _dims(self) -> dict[str, Dims]:
        """Return the axes that shard each dim of the parameters on the grid."""
        grid, found = self._grid, {}
        for full, value in self._modules.owners.items():
            module, _, name = full.rpartition(".")
            if module in self._rules:
                base = "" if module in self._norms else "Linear"
                axes = grid.axes(self._rules[module])
                found[value] = grid_dims(grid.style, axes, base, [name]).params[name]
        return found

    def _placed(self) -> dict[str, list[str]]:
        """Return the placement of parameters on the grid, on each axis of the mesh."""
        placed = {}
        for value, dims in self._dims().items():
            at = {axis: f"S({dim})" for dim, entry in enumerate(dims) for axis in _axes_of(entry)}
            placed[self._program.params[value]] = [at.get(axis, "R") for axis in self._mesh]
        return placed

    def _work(self, name: str) -> float:
        return 1 / self._grid.ranks if name in self._shared else 1.0

    def _kept(self, name: str) -> float:
        """Return the share of the tensors that a rank keeps of those of a node."""
        grid = self._grid
        value = name.partition(":")[2]
        if value:  # a layout node
            if value in self._wholes:
                return 1.0
            turn = next((turn for source, turn in self._gathered if source == value), None)
            if turn is None:
                return 1 / grid.ranks if value in self._parts else 1.0
            return grid.sizes[self._gathered_axis(turn)] / grid.ranks
        if name in self._products and name in self._shared:
            turn = self._rules[self._products[name].module]
            return grid.sizes[self._gathered_axis(turn)] / grid.ranks
        return self._work(name)

    def _gathered_axis(self, turn: int) -> str:
        return self._grid.axes(turn)[1 if self._grid.style == "3d" else -1]


def _axes_of(entry: Dim) -> Sequence[str]:
    return [] if entry is None else [entry] if isinstance(entry, str) else entry


def _patterns(rules: Mapping[str, int], modules: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return patterns of names and their turns, with one for equal modules of numbered blocks."""
    found: dict[tuple[str, int], list[str]] = {}
    for name, turn in rules.items():
        form = ".".join("*" if word.isdigit() else word for word in name.split("."))
        found.setdefault((form, turn), []).append(name)
    patterns = []
    for (form, turn), names in found.items():
        meant = {name for name in modules if fnmatchcase(name, form)}
        patterns += [(form, turn)] if meant == {*names} else [(name, turn) for name in names]
    return patterns
