"""Which entries of a log are replayed for wanted tensors, in which order, and what is freed when.

Draws stay in their order.  An entry that finishes a tensor runs as soon as its inputs are there,
any other as late as possible: otherwise a model that is cast or scaled at the end of its
constructor would be in memory as a whole before that.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from msrun.parallel.deferred.log import Entry, RandomState, StorageSlot


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What to run.

    Attributes:
        order: Numbers of entries.
        drawn_only: Those whose results are not needed, run for the state of the generator.
        finished: Wanted slots that are final after an entry; None comes before all.
        freed: Slots whose memory is not used after an entry.
    """

    order: list[int]
    drawn_only: set[int]
    finished: dict[int | None, list[StorageSlot]]
    freed: dict[int, list[StorageSlot]]


def make_plan(
    entries: Sequence[Entry], wanted: Collection[StorageSlot], states: Collection[RandomState]
) -> ReplayPlan:
    """Return what to run for the final values of `wanted`, and for `states` to be known."""
    needed: set[int] = set()
    forced: set[int] = set()
    while True:
        needed = _needed(entries, wanted, forced)
        draws = [entries[number].draw for number in needed]
        starts = [draw.before for draw in draws if draw is not None]
        drawn_only = _undrawn(entries, [*states, *starts]) - needed
        dependent = {number for number in drawn_only if not entries[number].draws_alone}
        if not dependent:
            break
        forced |= dependent
    finished: dict[int | None, list[StorageSlot]] = defaultdict(list)
    for slot in sorted(wanted, key=lambda slot: slot.number):
        finished[slot.writers[-1] if slot.writers else None].append(slot)
    order = _order(entries, needed, drawn_only, finished)
    freed = _freed(entries, [number for number in order if number in needed])
    return ReplayPlan(order=order, drawn_only=drawn_only, finished=finished, freed=freed)


def _needed(
    entries: Sequence[Entry], wanted: Iterable[StorageSlot], forced: Iterable[int]
) -> set[int]:
    """Return the entries that the values of `wanted` come from, and those of `forced`."""
    slots_of: dict[int, set[StorageSlot]] = {
        number: set(entries[number].writes) for number in forced
    }
    heap = [-number for number in slots_of]
    heapq.heapify(heap)
    reads = [(slot, len(entries)) for slot in wanted]
    while True:
        for slot, before in reads:
            at = bisect_left(slot.writers, before) - 1
            if at >= 0:
                number = slot.writers[at]
                if number not in slots_of:
                    slots_of[number] = set()
                    heapq.heappush(heap, -number)
                slots_of[number].add(slot)
        if not heap:
            return set(slots_of)
        # The latest first: all that later entries want of an entry is known when it comes.
        number = -heapq.heappop(heap)
        reads = [(slot, number) for slot in _inputs(entries[number], slots_of[number])]


def _inputs(entry: Entry, wanted: Collection[StorageSlot]) -> set[StorageSlot]:
    """Return the slots whose values `entry` needs for those of `wanted`."""
    partly = {slot for slot, is_lost in entry.writes.items() if slot in wanted and not is_lost}
    return partly | entry.reads


def _undrawn(entries: Sequence[Entry], states: Iterable[RandomState]) -> set[int]:
    """Return the draws between states that are known and `states`."""
    draws: set[int] = set()
    for wanted in states:
        state = wanted
        while state.value is None and state.entry is not None and state.entry not in draws:
            draws.add(state.entry)
            draw = entries[state.entry].draw
            if draw is None:
                break
            state = draw.before
    return draws


def _order(
    entries: Sequence[Entry],
    needed: Collection[int],
    drawn_only: Collection[int],
    finishing: Collection[int | None],
) -> list[int]:
    """Return all that is to be run, in an order that keeps each slot's writes and reads apart."""
    after = _dependencies(entries, sorted(needed))
    ready: dict[int, int] = {}
    for number, earlier in after.items():
        is_bound = entries[number].draw is not None or not earlier
        ready[number] = number if is_bound else max(ready[other] for other in earlier)
    due: dict[int, int] = {}
    for number in reversed(after):
        is_early = number in finishing or entries[number].draw is not None
        due[number] = ready[number] if is_early else due.get(number, ready[number])
        for other in after[number]:
            due[other] = min(due.get(other, due[number]), due[number])
    return sorted([*needed, *drawn_only], key=lambda number: (due.get(number, number), number))


def _dependencies(entries: Sequence[Entry], numbers: Iterable[int]) -> dict[int, set[int]]:
    """Return entry -> entries that must have run before it."""
    writer: dict[StorageSlot, int] = {}
    consumers: dict[StorageSlot, set[int]] = defaultdict(set)
    earlier: dict[int, set[int]] = {}
    for number in numbers:
        entry = entries[number]
        touched = entry.reads | entry.writes.keys()
        earlier[number] = {writer[slot] for slot in touched if slot in writer}
        for slot in entry.writes:
            earlier[number] |= consumers.pop(slot, set())
        for slot in entry.reads:
            consumers[slot].add(number)
        for slot in _written(entry):
            writer[slot] = number
        earlier[number].discard(number)
    return earlier


def _written(entry: Entry) -> set[StorageSlot]:
    return {view.slot for view in entry.created if view is not None} | entry.writes.keys()


def _freed(entries: Sequence[Entry], order: Iterable[int]) -> dict[int, list[StorageSlot]]:
    last: dict[StorageSlot, int] = {}
    freed: dict[int, list[StorageSlot]] = defaultdict(list)
    for number in order:
        entry = entries[number]
        for slot in entry.reads | _written(entry):
            if slot in last and entry.writes.get(slot, False):
                freed[last[slot]].append(slot)
            last[slot] = number
    for slot, number in last.items():
        freed[number].append(slot)
    return freed
