"""A shared expert beside experts on ranks: it computes while rows travel to them.

A mixture often calls, after its experts, a module that all tokens share, with its own input or with
the rows of the experts.  Once that is known, `routed` runs this module as soon as its rows are on
their way, and the mixture gets the result where it calls the module.  In the backward pass the
gradients of the rows travel while those of the module are computed (`travel`).

What is early is learned from calls in the ordinary order; the forward of the mixture is unmodified
and runs once.  The module is the first that is called after the experts, with one argument, which
is a tensor that was there when the experts were called.  Modules with buffers are left alone.  If a
later call is another, or gradients or autocast are switched in between, the module computes again.

When it begins.  A recomputation has to save what its forward has saved, in the same order.  So the
module is early only once no graph of a call in the ordinary order is alive, and from then on.  All
ranks have to begin in the same call, since the module may gather parameters: the numbers that they
exchange about their rows say so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from msrun.parallel import torch_compat
from msrun.parallel.experts.rehearsal import called_parts
from msrun.parallel.torch_compat import write_count

# More than a forward has arguments.
_PLACES = 1000


class _Early(NamedTuple):
    """What a module has returned before it is called.

    Args:
        part: Number of the module.
        given: What it got.
        written: How often that was written in place.
        modes: As of `_modes`.
        output: What it returned.
    """

    part: int
    given: Tensor
    written: int
    modes: tuple[object, ...]
    output: Any


class SharedPath:
    """The forward of a mixture whose experts are on ranks; see the module.

    Args:
        mixture: The mixture.
        experts: The module of its experts.
    """

    def __init__(self, mixture: nn.Module, experts: nn.Module) -> None:
        self._parts = [
            part
            for part in called_parts(mixture, [experts])
            if not any(True for _ in part.buffers())
        ]
        self.__wrapped__ = mixture.forward  # `inspect.signature` follows it
        self._learned, self._is_looked, self._is_early = 0, False, False
        # Of calls in the ordinary order.
        self._graphs: list[weakref.ref[Any]] = []
        self._given: list[Any] | None = None
        self._forget()

        self._calls: list[Callable[..., Any]] = []
        self._forget()

    def _forget(self) -> None:
        self._counts: list[int] = []  # of what was there when the experts were called
        self._early: _Early | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the mixture does."""
        self._calls = [torch_compat.call_of(part) for part in self._parts]
        calls = {part: partial(self._run, at) for at, part in enumerate(self._parts)}
        self._given = [*args, *kwargs.values()]
        self._forget()
        try:
            with torch_compat.calls_replaced(calls):
                return self.__wrapped__(*args, **kwargs)
        finally:
            self._given = None
            self._forget()

    def offered(self, tokens: Tensor) -> int:
        """Return the number of what this rank can run early in a call of experts with `tokens`.

        It is 0 if there is nothing, or not yet.
        """
        if not self._learned or self._given is None or self._counts:
            return 0
        values, place = [*self._given, tokens], self._learned % _PLACES
        is_there = place < len(values) and isinstance(values[place], Tensor)
        is_free = self._is_early or all(graph() is None for graph in self._graphs)
        return self._learned if is_there and is_free else 0

    def begin(self, number: int, tokens: Tensor) -> None:
        """Run what all ranks have offered; call it while rows travel.

        Args:
            number: As of `offered`, equal on all ranks; 0 runs nothing.
            tokens: As of `offered`.
        """
        if self._given is None or self._counts:
            return
        self._given.append(tokens)
        self._counts = [write_count(x) if isinstance(x, Tensor) else 0 for x in self._given]
        if not number:
            return
        self._is_early = True
        part, place = divmod(number, _PLACES)
        given, modes = self._given[place], _modes(tokens)
        output = self._calls[part - 1](given)
        self._early = _Early(part - 1, given, self._counts[place], modes, output)

    def end(self, output: Tensor) -> None:
        """Note what the experts return, by which the graph of the call is known."""
        self._graphs = [graph for graph in self._graphs if graph() is not None]
        if not self._is_early and output.grad_fn is not None:
            self._graphs.append(weakref.ref(output.grad_fn))

    def _run(self, part: int, *args: Any, **kwargs: Any) -> Any:
        """Run a module inside, or return what it has returned before."""
        if not self._counts:
            return self._calls[part](*args, **kwargs)
        early, self._early = self._early, None
        is_alone = len(args) == 1 and not kwargs
        if early is None:
            self._learn(part, args[0] if is_alone else None)
        elif is_alone and part == early.part and args[0] is early.given:
            given = early.given
            if (write_count(given), _modes(given)) == (early.written, early.modes):
                return early.output
        return self._calls[part](*args, **kwargs)

    def _learn(self, part: int, given: Any) -> None:
        """Note the first module after the experts, if it could run before they end."""
        if self._learned or self._is_looked:
            return
        self._is_looked = True
        for place, (value, count) in enumerate(zip(self._given or (), self._counts, strict=False)):
            if value is given and isinstance(value, Tensor) and write_count(value) == count:
                self._learned = (part + 1) * _PLACES + place
                return


def _modes(x: Tensor) -> tuple[object, ...]:
    """Return what the caller of a module may switch."""
    kind = x.device.type
    is_cast = torch.is_autocast_enabled(kind)
    return torch.is_grad_enabled(), is_cast, torch.get_autocast_dtype(kind) if is_cast else None
