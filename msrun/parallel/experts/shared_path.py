"""A shared expert beside experts on ranks: it computes while rows travel to them.

A mixture often calls, beside its experts, a module that all tokens share, with its own input or
with the rows of the experts.  Once that is known, `routed` runs this module as soon as its rows are
on their way.  In the backward pass the gradients of the rows travel while those of the module are
computed (`travel`).  The forward of the mixture is unmodified and runs once.  What moves is learned
from calls in the ordinary order.  Modules with buffers are left alone.

A module behind the experts is early, and the mixture gets the result where it calls the module.  It
is the first that is called after them, with one argument, which is a tensor that was there when the
experts were called.  If a later call is another, or gradients or autocast are switched in between,
the module computes again.

A module before the experts is late: its call returns a tensor that is computed once rows travel, or
before that if something looks at it (`later`).  It is one that draws no random numbers, whose
output nothing has looked at before the experts are called.

When it begins.  A recomputation has to save what its forward has saved, in the same order.  So the
module moves only once no graph of a call in the ordinary order is alive, and from then on.  All
ranks have to begin in the same call, since the module may gather parameters.  Of an early one the
numbers that they exchange about their rows say so.  A late one is called before these, so ranks ask
each other at the start of calls, from the step that has shown it to the next.

Experts that are called without their mixture, as a recomputation of them alone does, would have to
do without the module: then nothing moves.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from msrun.parallel import torch_compat
from msrun.parallel.exchange.generators import torch_states
from msrun.parallel.experts.later import CallModes, later, modes_of, postponed, settle
from msrun.parallel.experts.rehearsal import called_parts, memory_of
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.notation.mesh_layout import EXPERT_AXIS
from msrun.parallel.torch_compat import is_in_backward, write_count

# More than a forward has arguments; the last stands for a module before the experts.
_PLACES = 1000
_BEFORE = _PLACES - 1

# Graphs that a script keeps would have ranks ask in each call.
_ASKED_MOST = 100


class _Early(NamedTuple):
    """What a module has returned before it is called.

    Args:
        part: Number of the module.
        given: What it got.
        written: How often that was written in place.
        modes: As of `modes_of`.
        output: What it returned.
    """

    part: int
    given: Tensor
    written: int
    modes: CallModes
    output: Any


class _Before(NamedTuple):
    """A module that was called before the experts, in the ordinary order.

    Args:
        part: Number of the module.
        given: What it got.
        output: What it returned.
        written: How often either was written in place.
    """

    part: int
    given: Tensor
    output: Tensor
    written: tuple[int, int]


class SharedPath:
    """The forward of a mixture whose experts are on ranks; see the module.

    Args:
        mixture: The mixture.
        experts: The module of its experts.
        mesh: Its axis `ep` has the ranks that share them.
    """

    def __init__(self, mixture: nn.Module, experts: nn.Module, mesh: DeviceMesh) -> None:
        self._parts = [
            part
            for part in called_parts(mixture, [experts])
            if not any(True for _ in part.buffers())
        ]
        self.__wrapped__ = mixture.forward  # `inspect.signature` follows it
        self._mesh = mesh
        self._learned, self._is_looked, self._is_moved = 0, False, False
        # Of modules before the experts.
        self._is_watched, self._is_agreed, self._asked = False, False, 0
        # Of calls in the ordinary order.
        self._graphs: list[weakref.ref[Any]] = []
        self._had_graphs = False
        self._given: list[Any] | None = None
        self._calls: list[Callable[..., Any]] = []
        self._forget()

    def _forget(self) -> None:
        self._counts: list[int] = []  # of what was there when the experts were called
        self._early: _Early | None = None
        self._late: Tensor | None = None
        self._before: list[_Before] = []
        self._seen: set[int] | None = None  # memory that was read, where that is watched

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the mixture does."""
        if torch.is_inference_mode_enabled():  # torch does not count writes there
            return self.__wrapped__(*args, **kwargs)
        self._calls = [torch_compat.call_of(part) for part in self._parts]
        calls = {part: partial(self._run, at) for at, part in enumerate(self._parts)}
        self._given = [*args, *kwargs.values()]
        self._forget()
        self._ask()
        watching: Any = contextlib.nullcontext()
        if not self._learned and not self._is_watched and torch.is_grad_enabled():
            self._seen, watching = set(), torch_compat.dispatching(self._see)
        try:
            with torch_compat.calls_replaced(calls), watching:
                found = self.__wrapped__(*args, **kwargs)
            if self._late is not None:
                settle(self._late)
            return found
        finally:
            self._given = None
            self._forget()

    def offered(self, tokens: Tensor) -> int:
        """Return the number of what this rank can move in a call of experts with `tokens`.

        It is 0 if there is nothing, or not yet.
        """
        if self._given is None or self._counts:
            return 0
        self._learn_before()
        place = self._learned % _PLACES
        if not self._learned or place == _BEFORE:
            return self._learned
        values = [*self._given, tokens]
        is_there = place < len(values) and isinstance(values[place], Tensor)
        return self._learned if is_there and self._is_free() else 0

    def begin(self, number: int, tokens: Tensor) -> None:
        """Run what all ranks have offered; call it while rows travel.

        Args:
            number: As of `offered`, equal on all ranks; 0 runs nothing.
            tokens: As of `offered`.
        """
        is_alone = self._given is None and not torch.is_inference_mode_enabled()
        if is_alone and not self._is_moved:
            self._learned, self._is_looked, self._is_watched, self._is_agreed = 0, True, True, False
        if self._given is None or self._counts:
            return
        self._given.append(tokens)
        self._counts = [write_count(x) if isinstance(x, Tensor) else 0 for x in self._given]
        part, place = divmod(number, _PLACES)
        if self._late is not None:
            settle(self._late)
        if place == _BEFORE:
            self._is_agreed = True
        elif number:
            self._is_moved = self._is_moved or torch.is_grad_enabled()
            given, modes = self._given[place], modes_of(tokens)
            output = self._calls[part - 1](given)
            self._early = _Early(part - 1, given, self._counts[place], modes, output)

    def end(self, output: Tensor) -> None:
        """Note what the experts return, by which the graph of the call is known."""
        self._graphs = [graph for graph in self._graphs if graph() is not None]
        if not self._is_moved and output.grad_fn is not None:
            self._had_graphs = True
            self._graphs.append(weakref.ref(output.grad_fn))

    def _is_free(self) -> bool:
        """Return whether no recomputation of a call in the ordinary order can follow.

        Before the first of these, which may be one of the experts alone, only calls that leave no
        graph are free.
        """
        is_over = self._had_graphs or not torch.is_grad_enabled()
        return self._is_moved or (is_over and all(graph() is None for graph in self._graphs))

    def _ask(self) -> None:
        """Ask the other ranks whether a module before the experts can be late from now on."""
        is_due = self._is_agreed and not self._is_moved and self._asked < _ASKED_MOST
        if not is_due or not torch.is_grad_enabled() or is_in_backward():
            return
        self._asked += 1
        answers = torch.tensor(int(self._is_free()), device=self._mesh.device_type)
        dist.all_reduce(answers, dist.ReduceOp.MIN, self._mesh.get_group(EXPERT_AXIS))
        self._is_moved = bool(answers)

    def _run(self, part: int, *args: Any, **kwargs: Any) -> Any:
        """Run a module inside, or return what it has returned before, or will."""
        is_alone = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        if not self._counts:
            return (
                self._run_before(part, args[0]) if is_alone else self._calls[part](*args, **kwargs)
            )
        early, self._early = self._early, None
        if early is None:
            self._learn(part, args[0] if is_alone else None)
        elif is_alone and part == early.part and args[0] is early.given:
            given = early.given
            if (write_count(given), modes_of(given)) == (early.written, early.modes):
                return early.output
        return self._calls[part](*args, **kwargs)

    def _run_before(self, part: int, given: Tensor) -> Any:
        """Run a module that is called before the experts, now or later."""
        call = self._calls[part]
        is_late = self._is_moved and self._learned == (part + 1) * _PLACES + _BEFORE
        if is_late and self._late is None:
            self._late = later(postponed(call, given), given)
            return self._late
        if self._seen is None:
            return call(given)
        states = torch_states(given.device)
        output = call(given)
        is_drawn = not all(map(torch.equal, states, torch_states(given.device)))
        if type(output) is Tensor and output.numel() and not is_drawn:
            self._seen.discard(memory_of(output))
            written = write_count(given), write_count(output)
            self._before.append(_Before(part, given, output, written))
        return output

    def _see(self, func: Any, _: Any, args: Any, kwargs: Any) -> Any:
        if self._seen is not None and not self._counts:
            self._seen.update(map(memory_of, tensors_in((args, kwargs))))
        return func(*args, **kwargs)

    def _learn_before(self) -> None:
        """Note a module before the experts whose output nothing has looked at."""
        seen, self._seen = self._seen, None
        if seen is None:
            return
        self._is_watched = True
        for part, given, output, written in self._before:
            is_kept = written == (write_count(given), write_count(output))
            if is_kept and memory_of(output) not in seen and self._parts[part].training:
                self._learned = (part + 1) * _PLACES + _BEFORE
                return

    def _learn(self, part: int, given: Any) -> None:
        """Note the first module after the experts, if it could run before they end."""
        if self._learned or self._is_looked:
            return
        self._is_looked = True
        for place, (value, count) in enumerate(zip(self._given or (), self._counts, strict=False)):
            if value is given and isinstance(value, Tensor) and write_count(value) == count:
                self._learned = (part + 1) * _PLACES + place
                return
