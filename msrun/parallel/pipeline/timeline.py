"""A schedule by arithmetic: how long ranks wait, and how many micro-batches are in flight.

A forward, the gradient of inputs and the gradient of weights each take one unit of time, and
sending takes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

Kind = Literal["F", "I", "W", "B"]

_UNITS: dict[Kind, int] = {"F": 1, "I": 1, "W": 1, "B": 2}


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of a rank.

    Args:
        kind: Forward, gradient of inputs, gradient of weights, or both gradients.
        chunk: Chunk of the model.
        part: Micro-batch.
    """

    kind: Kind
    chunk: int
    part: int


def as_actions(order: Sequence[Any]) -> list[Action]:
    """Return the actions of a schedule of torch as ours."""
    steps = chain.from_iterable(step.sub_actions or (step,) for step in order if step is not None)
    return [
        Action(step.computation_type.value, step.stage_index, step.microbatch_index)
        for step in steps
        if step.computation_type.value in ("F", "I", "W", "B")
    ]


def plain_order(stage: int, microbatches: int, *, warm: int) -> list[Action]:
    """Return the actions of a stage of one chunk: `warm` forwards, then one backward, one forward.

    Args:
        stage: Its number, which is that of its chunk.
        microbatches: Parts of a batch.
        warm: All of them for GPipe; for 1F1B as many as there are stages from this one on.
    """
    warm = min(warm, microbatches)
    order = [Action("F", stage, part) for part in range(warm)]
    for part in range(microbatches):
        order.append(Action("B", stage, part))
        if part + warm < microbatches:
            order.append(Action("F", stage, part + warm))
    return order


def bubble(orders: Sequence[Sequence[Action]]) -> float:
    """Return the share of time in which ranks wait, given the actions of each rank in order.

    For GPipe and 1F1B this is (S - 1) / (M + S - 1) with S stages and M micro-batches.

    Raises:
        ValueError: Some action waits for ever.
    """
    ends: dict[Action, int] = {}
    clocks = [0] * len(orders)
    positions = [0] * len(orders)
    chunks = 1 + max(action.chunk for order in orders for action in order)
    pending = sum(map(len, orders))
    while pending:
        before = pending
        for rank, order in enumerate(orders):
            while positions[rank] < len(order):
                action = order[positions[rank]]
                start = _start(action, ends, chunks)
                if start is None:
                    break
                clocks[rank] = max(clocks[rank], start) + _UNITS[action.kind]
                ends[action] = clocks[rank]
                positions[rank] += 1
                pending -= 1
        if pending == before:
            raise ValueError("the order of actions waits for itself")
    busy = sum(_UNITS[action.kind] for order in orders for action in order)
    return 1 - busy / (len(orders) * max(clocks))


def _start(action: Action, ends: dict[Action, int], chunks: int) -> int | None:
    """Return when the inputs of `action` are there; None while they are not."""
    kind, chunk, part = action.kind, action.chunk, action.part
    if kind == "W":
        return ends.get(Action("I", chunk, part))
    if kind == "F":
        return 0 if chunk == 0 else ends.get(Action("F", chunk - 1, part))
    if chunk == chunks - 1:
        return ends.get(Action("F", chunk, part))
    after = ends.get(Action("B", chunk + 1, part))
    return ends.get(Action("I", chunk + 1, part)) if after is None else after


def peak_live(order: Sequence[Action], sizes: Sequence[int] | None = None) -> int:
    """Return the most micro-batches that a rank has in flight, over all its chunks.

    With `sizes`, the bytes that each chunk saves of one, it is the most bytes.
    """
    live = peak = 0
    for action in order:
        size = 1 if sizes is None else sizes[action.chunk]
        live += {"F": 1, "I": 0, "W": -1, "B": -1}[action.kind] * size
        peak = max(peak, live)
    return peak
