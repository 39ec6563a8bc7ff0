"""Runs the forwards of several copies in turns, so that one computes while another communicates.

The problem.  Under an operator plan a layer computes, waits for a collective, computes, and waits.
With the batch in slices, one slice can compute while the collective of another is on its way.  But
the model is anybody's Python, which knows no slices, and nobody can cut it into blocks from outside
without guessing what depends on the batch.

The idea.  Each copy runs the whole, unmodified forward in a thread of its own.  Only one thread
runs at a time: where a copy has begun a collective, it hands over to the next copy (`begun`), and
waits for the result when its turn comes again.  So copies advance collective by collective, in an
order that is the same on all ranks.

Backward.  Autograd runs, of the nodes that are ready, the one with the highest number, and numbers
nodes in the order in which a thread made them.  Nodes of copies would run alternately, and one that
waits for a collective would follow the one that began it.  So nodes get new numbers: the forward of
each copy is cut where backward begins a collective (`mark`), and the nodes of one cut of one copy
stand together.  Then backward computes a cut of one copy while the collective of another runs.

Each thread gets modes of torch, gradient mode, autocast, device and stream of the thread that calls
`run`.  What there is only once, copies would disturb each other in:

- Random generators.  Each copy has a stream of its own.  So a recomputation, which begins with the
  state of the beginning of a region and runs alone, draws what its copy drew.
- What the guard shares between modules that read one tensor, and what units of ZeRO note while
  their forward runs (`own`): a unit that another copy has left would count as left by all.
- Attributes that modules set, and generators of Python and numpy: `attributes` refuses them.

Invariant: no thread is left behind, whatever a copy raises.
"""

from __future__ import annotations

import bisect
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

from msrun.parallel import torch_compat

_ResultT = TypeVar("_ResultT")
# Nodes that one cut of one copy may have.
_CUT_BITS = 32


class _Place(threading.local):
    turns: Turns[Any] | None = None
    index = 0


_PLACE = _Place()


class _Ended(BaseException):
    """Ends the forward of a copy, since another one failed."""


def is_in_copy() -> bool:
    """Return whether this thread computes a copy, so that others can compute meanwhile."""
    return _PLACE.turns is not None


def begun() -> None:
    """Let the other copies compute: this one has begun a collective."""
    if _PLACE.turns is not None:
        _PLACE.turns.hand_over(_PLACE.index)


def mark() -> None:
    """Note that backward begins a collective here."""
    if _PLACE.turns is not None:
        _PLACE.turns.marks[_PLACE.index].append(torch_compat.next_node_number())


class Turns(Generic[_ResultT]):
    """One forward of each copy.

    Args:
        tasks: What each copy computes; the first in the thread that calls `run`.
        device: Of this rank.
        own: Objects and names of attributes that each copy has a value of its own for.

    Attributes:
        marks: Of each copy, the numbers of nodes of autograd where backward begins a collective.
    """

    def __init__(
        self,
        tasks: Sequence[Callable[[], _ResultT]],
        device: torch.device,
        own: Sequence[tuple[object, str]] = (),
    ) -> None:
        self._tasks = tasks
        self._batons = [threading.Semaphore(0) for _ in tasks]
        self._alive = list(range(len(tasks)))
        self._results: dict[int, _ResultT] = {}
        self._error: BaseException | None = None
        self._states = _States(device, own, len(tasks))
        self._device = device
        self.marks: list[list[int]] = [[] for _ in tasks]

    def run(self) -> list[_ResultT]:
        """Return the result of each task, or raise the first error of one."""
        surroundings = _Surroundings(self._device)
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._run_in_thread, index, surroundings),
                name=f"copy {index}",
                daemon=True,
            )
            for index in range(1, len(self._tasks))
        ]
        for thread in threads:
            thread.start()
        try:
            with contextlib.suppress(_Ended):
                self._run_copy(0)
        finally:
            for thread in threads:
                thread.join()
            self._states.restore()
        if self._error is not None:
            raise self._error
        return [self._results[index] for index in range(len(self._tasks))]

    def hand_over(self, index: int) -> None:
        """Let the next copy run, until its turn is over; `index` is the copy of this thread."""
        if self._error is not None:
            raise _Ended
        following = self._next(index)
        if following == index:
            return
        self._states.leave(index)
        self._batons[following].release()
        self._batons[index].acquire()
        if self._error is not None:
            raise _Ended
        self._states.enter(index)

    def _next(self, index: int) -> int:
        """Return the copy that runs after `index`."""
        at = bisect.bisect_right(self._alive, index)
        return self._alive[at % len(self._alive)]

    def _run_in_thread(self, index: int, surroundings: _Surroundings) -> None:
        self._batons[index].acquire()
        if self._error is not None:
            self._end(index)
            return
        # `run` raises the first error.
        with contextlib.suppress(BaseException), surroundings.entered():
            self._states.enter(index)
            self._run_copy(index)

    def _run_copy(self, index: int) -> None:
        _PLACE.turns, _PLACE.index = self, index
        try:
            self._results[index] = self._tasks[index]()
        except _Ended:
            raise
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            _PLACE.turns = None
            self._states.leave(index)
            self._end(index)

    def _end(self, index: int) -> None:
        """Have the next copy run, now that `index` has ended."""
        self._alive.remove(index)
        if self._alive:
            self._batons[self._next(index)].release()


def order_backward(roots: Sequence[Sequence[Any]], marks: Sequence[Sequence[int]]) -> None:
    """Have backward run cut by cut, one copy after the other in each.

    Args:
        roots: Of each copy, the last nodes of its forward.
        marks: Of `Turns`.
    """
    seen: set[Any] = set()
    for index, ends in enumerate(roots):
        left = list(ends)
        while left:
            node = left.pop()
            if node is None or node in seen or hasattr(node, "variable"):
                continue  # a leaf runs at once
            seen.add(node)
            left += [inside for inside, _ in node.next_functions]
            number = torch_compat.node_number(node)
            cut = bisect.bisect_right(marks[index], number) * len(roots) + index
            torch_compat.set_node_number(node, (cut << _CUT_BITS) + number % (1 << _CUT_BITS))


class _States:
    """What each copy has of its own, exchanged where copies take turns."""

    def __init__(self, device: torch.device, own: Sequence[tuple[object, str]], count: int) -> None:
        self._own = own
        self._generators = [torch.default_generator]
        if device.type != "cpu":
            self._generators.append(
                torch.get_device_module(device).default_generators[device.index]
            )
        self._states: list[list[Any]] = [[] for _ in range(count)]
        seeds = torch.randint(2**62, (count,)).tolist()
        values = self._values()
        for index in range(1, count):
            drawn = [
                torch.Generator(generator.device).manual_seed(seeds[index]).get_state()
                for generator in self._generators
            ]
            self._states[index] = [*drawn, *values]
        self._before = values

    def leave(self, index: int) -> None:
        """Keep the state of the copy that ran."""
        drawn = [generator.get_state() for generator in self._generators]
        self._states[index] = [*drawn, *self._values()]

    def enter(self, index: int) -> None:
        """Put back the state of the copy that runs now."""
        states = self._states[index]
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)
        for (owner, name), value in zip(self._own, states[len(self._generators) :], strict=True):
            setattr(owner, name, value)

    def restore(self) -> None:
        """Go on as the first copy would."""
        if self._states[0]:
            self.enter(0)
        for (owner, name), value in zip(self._own, self._before, strict=True):
            setattr(owner, name, value)

    def _values(self) -> list[Any]:
        return [getattr(owner, name) for owner, name in self._own]


class _Surroundings:
    """What a thread of torch has of its own, as it is in the thread that makes this.

    Args:
        device: Of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._modes = torch_compat.modes()
        self._has_grad = torch.is_grad_enabled()
        self._autocasts = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in sorted({"cpu", device.type})
            if torch.is_autocast_enabled(kind)
        ]
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this thread like that."""
        if self._stream is not None:
            torch.accelerator.set_stream(self._stream)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._has_grad))
            for kind, dtype in self._autocasts:
                stack.enter_context(torch.autocast(kind, dtype))
            stack.enter_context(torch_compat.with_modes(self._modes))
            yield
