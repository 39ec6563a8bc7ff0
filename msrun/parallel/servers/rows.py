"""The rows of one server and their optimizer state: what the actions of its machine act upon.

Each slice is a parameter of its own with an optimizer of its own, torch's.  Gradients of workers
are added in the order in which they are given, so that a step that is done again gives the same
bits.  A slice of which no row was used gets a gradient without rows: in one process, too, the
optimizer would see the table.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from msrun.cluster.servers.events import Committed
from msrun.cluster.servers.ownership import Slice
from msrun.parallel.servers.recipe import Recipe, Value, build_optimizer
from msrun.parallel.servers.touches import Touches

# Places in a slice and their gradients; None for all of its rows.
_Part = tuple[Tensor | None, Tensor]
# Makes a tensor of a shape and type.
Empty = Callable[[Sequence[int], torch.dtype], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGradients:
    """The gradients of some rows of one table, on one worker.

    Args:
        ids: Rows, each at most once, as numbers of the whole table.
        values: Their gradients, one row each.
        is_sparse: The optimizer is to see these rows only, as for `sparse=True`; else it sees
            zeros for all others.
    """

    ids: Tensor
    values: Tensor
    is_sparse: bool = False


@dataclass(frozen=True, slots=True)
class SliceGradients:
    """The gradients of all rows of some slices of one table: number of the slice -> gradients."""

    values: Mapping[int, Tensor]

    @property
    def is_sparse(self) -> bool:
        """Whether the optimizer is to see some rows only."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPush:
    """What a worker sends to one server for one step.

    Args:
        gradients: Table -> the gradients of rows of this server; a table that the worker did not
            use has no entry.
        options: Table -> the options of its group, which a scheduler may change each step.
        factors: Table -> by what its gradients are multiplied; 1 where it has no entry.
    """

    gradients: Mapping[str, RowGradients | SliceGradients]
    options: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)


def push_of(payload: Any) -> WorkerPush:
    """Return a push from its payload."""
    commit: Mapping[str, Any] = {}
    if isinstance(payload, Committed):
        payload, commit = payload.gradients, payload.commit
    gradients: dict[str, RowGradients | SliceGradients] = {}
    for table, part in payload["gradients"].items():
        if isinstance(part, dict):
            gradients[table] = SliceGradients(part)
        else:
            ids, values, is_sparse = part
            gradients[table] = RowGradients(ids=ids, values=values, is_sparse=is_sparse)
    words = commit or payload
    return WorkerPush(
        gradients=gradients,
        options=words.get("options", {}),
        factors=words.get("factors", {}),
    )


@dataclass(frozen=True, slots=True)
class SliceState:
    """A slice at rest: its rows, and the optimizer's state of them."""

    rows: Tensor
    state: dict[str, object]


@dataclass(slots=True)
class _Live:
    """A slice that is trained."""

    parameter: nn.Parameter
    optimizer: torch.optim.Optimizer

    def at_rest(self) -> SliceState:
        here = self.here()
        return SliceState(here.rows.clone(), _copied(here.state))

    def here(self) -> SliceState:
        state = self.optimizer.state.get(self.parameter, {})
        return SliceState(self.parameter.detach(), state)


def _copied(state: Mapping[str, object]) -> dict[str, object]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()
    }


class ServerRows:
    """All slices of one server.

    Args:
        slices: Table -> into how many slices it is cut.
        recipe: The optimizer.
    """

    def __init__(self, slices: Mapping[str, int], recipe: Recipe) -> None:
        """Own nothing yet."""
        self._counts = dict(slices)
        self._recipe = recipe
        self._live: dict[Slice, _Live] = {}
        # Table -> who used its rows, where ranks have caches.
        self._touches: dict[str, Touches] = {}
        # Those whose rows are in shared memory.
        self._near: dict[Slice, Tensor] = {}
        self.traffic: dict[Slice, float] = {}
        """Slice -> bytes of its rows that were pulled and pushed since it is here."""

    @property
    def nbytes(self) -> int:
        """Bytes of rows and optimizer state."""
        kept = [
            value
            for live in self._live.values()
            for value in (live.parameter, *live.optimizer.state[live.parameter].values())
        ]
        return sum(value.nbytes for value in kept if isinstance(value, Tensor))

    def replace(self, contents: dict[Slice, SliceState]) -> None:
        """Own these slices, and no other; `contents` is empty then.

        One after the other, so that no two copies of all of them are in memory at once.
        """
        self._live, self._near, self._touches = {}, {}, {}
        for piece in list(contents):
            self._live[piece] = self._revive(piece, contents.pop(piece))
        self.traffic.clear()

    def _revive(self, piece: Slice, at_rest: SliceState) -> _Live:
        parameter = nn.Parameter(at_rest.rows.clone())
        options = self._recipe.options[piece.table]
        optimizer = build_optimizer(self._recipe.kind, parameter, options)
        if at_rest.state:
            optimizer.state[parameter] = _copied(at_rest.state)
        return _Live(parameter, optimizer)

    def contents(self) -> dict[Slice, SliceState]:
        """Return copies of all slices."""
        return {piece: live.at_rest() for piece, live in self._live.items()}

    def copy(self, piece: Slice) -> SliceState:
        """Return a slice as it is now, which no step changes."""
        return self._live[piece].at_rest()

    def here(self, table: str | None = None) -> dict[Slice, SliceState]:
        """Return all slices, or those of a table, which the next step changes in place."""
        return {
            piece: live.here()
            for piece, live in self._live.items()
            if table is None or piece.table == table
        }

    def lend(self, slices: Iterable[Slice], empty: Empty, *, is_live: bool) -> dict[Slice, Tensor]:
        """Return the rows of slices in memory that `empty` makes: the live ones, or copies."""
        found = {}
        for piece in slices:
            live = self._live[piece]
            rows = self._near.get(piece)
            if rows is None or not is_live:
                rows = empty(live.parameter.shape, live.parameter.dtype)
                rows.copy_(live.parameter.detach())
            if is_live:
                self._near[piece] = live.parameter.data = rows
            found[piece] = rows
            self.count_bytes(piece, rows)
        return found

    def read(self, table: str, ids: Tensor, empty: Empty | None = None) -> Tensor:
        """Return rows of a table by their numbers in it, all of which are here."""
        count = self._counts[table]
        pieces = self._pieces(table)
        first = next(iter(pieces.values())).parameter
        found = (empty or _empty)((len(ids), *first.shape[1:]), first.dtype)
        if count == 1:
            torch.index_select(first.detach(), 0, ids, out=found)
            self.count_bytes(next(iter(pieces)), found)
            return found
        for piece, live in pieces.items():
            places = (ids % count == piece.index).nonzero().flatten()
            rows = live.parameter.detach()[ids[places] // count]
            found[places] = rows
            self.count_bytes(piece, rows)
        return found

    def read_state(self, table: str, ids: Tensor) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Return the optimizer's state of rows, and what it has of the whole table."""
        count = self._counts[table]
        state: dict[str, Tensor] = {}
        of_all: dict[str, object] = {}
        for piece, live in self._pieces(table).items():
            places = (ids % count == piece.index).nonzero().flatten()
            for name, value in live.here().state.items():
                if not isinstance(value, Tensor) or value.shape != live.parameter.shape:
                    of_all[name] = value
                    continue
                if name not in state:
                    state[name] = value.new_empty((len(ids), *value.shape[1:]))
                state[name][places] = value[ids[places] // count]
        return state, of_all

    def are_fresh(
        self, table: str, rank: int, ids: Tensor, versions: Tensor, version: int
    ) -> Tensor:
        """Return of which rows no other rank had a gradient since `versions`."""
        if table not in self._touches:
            pieces = [live.parameter for live in self._pieces(table).values()]
            rows, nbytes = sum(map(len, pieces)), sum(each.nbytes for each in pieces)
            self._touches[table] = Touches(rows, nbytes, version)
        return self._touches[table].are_fresh(rank, ids, versions)

    def note(self, rank: int, push: WorkerPush, version: int) -> None:
        """Note what a rank has used in the step from `version` on."""
        for table, touches in self._touches.items():
            gradients = push.gradients.get(table)
            if isinstance(gradients, RowGradients):
                touches.note(rank, gradients.ids, version)

    def _pieces(self, table: str) -> dict[Slice, _Live]:
        return {piece: live for piece, live in self._live.items() if piece.table == table}

    def apply(self, pushes: Sequence[WorkerPush]) -> None:
        """Add the gradients in this order, and do one step."""
        for table in sorted({piece.table for piece in self._live}):
            mine = [push for push in pushes if table in push.gradients]
            if not mine:  # in one process its gradient would be None
                continue
            parts = [(push.gradients[table], push.factors.get(table, 1.0)) for push in mine]
            options = next((push.options[table] for push in pushes if table in push.options), {})
            for piece, live in self._pieces(table).items():
                terms = [_times(self._part(piece, part), factor) for part, factor in parts]
                is_sparse = all(part.is_sparse for part, _ in parts)
                live.parameter.grad = added(live.parameter, terms, is_sparse=is_sparse)
                live.optimizer.param_groups[0].update(options)
                live.optimizer.step()
                live.parameter.grad = None

    def powers(
        self, pushes: Sequence[WorkerPush], order: float, pieces: Iterable[Slice]
    ) -> dict[str, float]:
        """Return by table the `power_of` the sum of gradients in some slices."""
        found: dict[str, float] = {}
        for piece in pieces:
            here = [push.gradients[piece.table] for push in pushes if piece.table in push.gradients]
            if not here:
                continue
            terms = [self._part(piece, part) for part in here]
            is_rows = all(places is not None for places, _ in terms)
            total = added(self._live[piece].parameter, terms, is_sparse=is_rows)
            power = power_of(total.values() if is_rows else total, order)
            before = found.get(piece.table, 0.0)
            found[piece.table] = max(before, power) if math.isinf(order) else before + power
        return found

    def _part(self, piece: Slice, part: RowGradients | SliceGradients) -> _Part:
        """Return the places in a slice of the rows that are in it, and their gradients."""
        if isinstance(part, SliceGradients):
            self.count_bytes(piece, part.values[piece.index])
            return None, part.values[piece.index]
        count = self._counts[piece.table]
        is_here = part.ids % count == piece.index
        values = part.values[is_here]
        self.count_bytes(piece, values)
        return part.ids[is_here] // count, values

    def count_bytes(self, piece: Slice, moved: Tensor) -> None:
        """Note rows of a slice that were pulled or pushed."""
        self.traffic[piece] = self.traffic.get(piece, 0.0) + moved.nbytes


def power_of(values: Tensor, order: float) -> float:
    """Return the sum of powers of magnitudes, whose root is a norm; of order inf the largest."""
    if not values.numel():
        return 0.0
    norm = float(torch.linalg.vector_norm(values, order, dtype=torch.float64))
    try:
        return norm if math.isinf(order) else norm**order
    except OverflowError:
        return math.inf


def _times(part: _Part, factor: float) -> _Part:
    return part if factor == 1.0 else (part[0], part[1] * factor)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def added(parameter: nn.Parameter, parts: Iterable[_Part], *, is_sparse: bool) -> Tensor:
    """Return the sum of gradients; of one worker's whole slice, its own memory."""
    parts = list(parts)
    wholes = [values.to(parameter.dtype) for places, values in parts if places is None]
    if len(wholes) == len(parts):
        if len(wholes) == 1:
            return wholes[0]
        total = torch.add(wholes[0], wholes[1])
        for values in wholes[2:]:
            total.add_(values)
        return total
    if not is_sparse:
        dense = torch.zeros_like(parameter, requires_grad=False)
        for places, values in parts:
            if places is None:
                dense.add_(values.to(dense.dtype))
            else:
                dense.index_add_(0, places, values.to(dense.dtype))
        return dense
    rows = [(places, values) for places, values in parts if places is not None]
    used, where = torch.cat([places for places, _ in rows]).unique(return_inverse=True)
    total = parameter.new_zeros((len(used), *parameter.shape[1:]), requires_grad=False)
    begin = 0
    for places, values in rows:
        total.index_add_(0, where[begin : begin + len(places)], values.to(total.dtype))
        begin += len(places)
    return torch.sparse_coo_tensor(
        used[None], total, parameter.shape, is_coalesced=True, check_invariants=True
    )


def trim() -> None:
    """Return freed memory to the kernel, which keeps it otherwise where tensors lay beside it."""
    with contextlib.suppress(AttributeError):  # of the C library of GNU
        ctypes.CDLL(None).malloc_trim(0)


def cut(weight: Tensor, table: str, count: int) -> dict[Slice, SliceState]:
    """Return the slices of a weight that no optimizer has stepped yet."""
    rows = weight.detach().reshape(1) if weight.dim() == 0 else weight.detach()
    return {
        Slice(table, index): SliceState(rows[index::count].clone(), {}) for index in range(count)
    }


def join(slices: Mapping[Slice, SliceState], table: str, count: int) -> Tensor:
    """Return the weight that `cut` has cut."""
    parts = [slices[Slice(table, index)].rows for index in range(count)]
    whole = parts[0].new_empty((sum(map(len, parts)), *parts[0].shape[1:]))
    for index, part in enumerate(parts):
        whole[index::count] = part
    return whole
