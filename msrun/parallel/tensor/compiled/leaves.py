"""The calls of a guarded module that stand in the compiler's graph as they are.

The compiler reads the model's Python.  It cannot read the guard, whose Python has a state of its
own, so each guarded function and each placement of a rule is one call in its graph.  The compiler
runs such a call when it works out shapes, and again when it lowers the graph to operators on this
rank's shards.  There the guard decides as it does without a compiler, and the collectives that it
needs become part of the graph.

Calls name the guard, the function and the placement by numbers and strings, which a graph can hold.
They mean nothing in another process, and torch's caches on disk take no graph with a call that is
not of torch; what such a graph is lowered to may be cached.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from msrun.parallel.tensor import guard_refusals
from msrun.parallel.tensor.guard import INSPECTING, Guard
from msrun.parallel.tensor.outputs import given
from msrun.parallel.tensor.placements import Placed, WantedPlacement, on_mesh, part_of

_FUNCTIONS: dict[str, Callable[..., Any]] = {}
_NUMBERS = itertools.count()
# Methods of tensors in Python that the compiler knows where no mode is on, and cannot read.
_UNREAD = frozenset(["unflatten"])
# Functions that draw what the guard draws: argument -> its position.
_DROPPING: dict[Callable[..., Any], dict[str, int]] = {
    functional.dropout: {"p": 1, "training": 2},
    functional.scaled_dot_product_attention: {"dropout_p": 4},
}


class _NoViews(guard_refusals.Views):
    """Notes no views: `guarded` refuses to write one."""

    def note(self, base: DTensor, result: Any, *, is_detached: bool = False) -> None:
        """Do nothing."""


class Followed:
    """The guard of a model, and the placements of its rules, as the compiler's graphs name them.

    Attributes:
        number: Of this object.
        problem: The first error of a call; empty if there is none.
        hooks: Of each module whose rule the compiler can follow, by name.
    """

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.hooks: dict[str, FollowedHooks] = {}
        self.problem = ""
        self._places: list[WantedPlacement] = []
        self._register()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "number": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._register()

    def _register(self) -> None:
        self.number = next(_NUMBERS)
        _FOLLOWED[self.number] = self

    def add(self, wanted: WantedPlacement) -> int:
        """Return the number of a placement, the same for modules that want the same."""
        for index, other in enumerate(self._places):
            if other.is_same(wanted):
                return index
        self._places.append(wanted)
        return len(self._places) - 1

    def place(self, index: int) -> WantedPlacement:
        """Return the placement of a number."""
        return self._places[index]

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note an error inside: the compiler raises one of its own."""
        try:
            yield
        except Exception as error:
            self.problem = self.problem or str(error) or type(error).__name__
            raise

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run a compiled forward inside: it shares inputs with no module that is not."""
        guard = self.guard
        kept = guard.shared, guard.late, guard.views
        guard.shared, guard.late, guard.views = [], None, _NoViews()
        try:
            yield
        finally:
            guard.shared, guard.late, guard.views = kept


_PLACES: weakref.WeakValueDictionary[int, ResultPlace] = weakref.WeakValueDictionary()
_FOLLOWED: weakref.WeakValueDictionary[int, Followed] = weakref.WeakValueDictionary()


class FollowedHooks:
    """The hooks of one module as the compiler follows them.

    Args:
        followed: Of the model.
        inputs: Placement of the first input.
        output: Placement of the output; None leaves it as it comes.
        is_new: Whether nothing else has the memory of an output whose placement is right.
    """

    def __init__(
        self,
        followed: Followed,
        inputs: WantedPlacement,
        output: WantedPlacement | None,
        *,
        is_new: bool,
    ) -> None:
        self._followed = followed
        self._input = followed.add(inputs)
        self._output = None if output is None else followed.add(output)
        self._is_new = is_new

    @property
    def key(self) -> tuple[Any, ...]:
        """What modules have in common whose hooks do the same."""
        return self._input, self._output, self._is_new

    def before(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the first tensor placed."""
        number = self._followed.number
        for at, value in enumerate(args):
            if isinstance(value, Tensor):
                placed = placed_input(number, self._input, value)
                return (*args[:at], placed, *args[at + 1 :]), kwargs
        for key, value in kwargs.items():
            if isinstance(value, Tensor):
                return args, {**kwargs, key: placed_input(number, self._input, value)}
        raise NotImplementedError("a module with a rule gets no tensor")

    def after(self, output: Any) -> Any:
        """Return the output, placed."""
        if self._output is None:
            return output
        if isinstance(output, Tensor):
            return placed_output(self._followed.number, self._output, self._is_new, output)
        raise NotImplementedError("a module with a rule returns no single tensor")


def placed_input(number: int, place: int, x: Tensor) -> Tensor:
    """Return an input in the placement of a rule, the same for siblings that want it too."""
    followed = _FOLLOWED[number]
    wanted, shared = followed.place(place), followed.guard.shared
    with followed.noting():
        known = next((each for each in shared or () if each.is_right(x, wanted)), None)
        if known is None:
            known = Placed(x, wanted)
            if shared is not None:
                shared[:] = [known]
        placed: Tensor = known.result
        return placed


def placed_output(number: int, place: int, is_new: bool, x: Tensor) -> Tensor:  # noqa: FBT001 - a graph has no names
    """Return an output in the placement of a rule; a plain tensor if that is whole."""
    followed = _FOLLOWED[number]
    with followed.noting():
        return given(x, followed.place(place), is_new=is_new)


class ResultPlace:
    """The placement of a divided result of a graph, which is known once it was lowered.

    Attributes:
        number: By which the graph names it.
    """

    def __init__(self) -> None:
        self.number = next(_NUMBERS)
        self._found: tuple[DeviceMesh, tuple[Placement, ...]]
        _PLACES[self.number] = self

    def note(self, x: DTensor) -> None:
        """Note the placement of `x`."""
        self._found = x.device_mesh, x.placements

    def tensor(self, part: Tensor) -> DTensor:
        """Return the divided tensor whose part on this rank is `part`."""
        return on_mesh(part, *self._found)


def part_result(number: int, place: int, x: DTensor) -> Tensor:
    """Return the part of a result of a graph, and note its placement.

    Raises:
        NotImplementedError: It is a sum that ranks have not added up.
    """
    followed = _FOLLOWED[number]
    with followed.noting():
        if any(placement.is_partial() for placement in x.placements):
            raise NotImplementedError("it returns a sum that ranks have not added up yet")
        _PLACES[place].note(x)
        return part_of(x)


def guarded(number: int, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch as the guard has it.

    Raises:
        NotImplementedError: A graph cannot repeat what the guard does.
    """
    followed, function = _FOLLOWED[number], _FUNCTIONS[name]
    own = name.partition(":")[0]
    with followed.noting():
        if guard_refusals.is_writing(own, kwargs) or kwargs.get("out") is not None:
            raise NotImplementedError(f"{own} writes to a divided tensor")
        if reason := _state_of(function, args, kwargs):
            raise NotImplementedError(reason)
        result = followed.guard.__torch_function__(function, (), args, kwargs)
        if guard_refusals.makes_view(own, args) and not _is_divided(result):
            raise NotImplementedError(f"{own} of a divided tensor is computed whole")
        return result


def _state_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return what the guard's form of a function reads beside its arguments; empty if nothing."""
    if function is functional.cross_entropy:
        return "it computes a loss of divided logits"
    values = {name: args[at] for name, at in _DROPPING.get(function, {}).items() if at < len(args)}
    values = {"training": True, **kwargs, **values}
    is_default = function is functional.dropout and "p" not in values
    drops = is_default or bool(values.get("p") or values.get("dropout_p"))
    if function in _DROPPING and drops and values["training"]:
        return "it drops out of a divided tensor"
    return ""


def _is_divided(result: Any) -> bool:
    results = result if isinstance(result, tuple | list) else [result]
    return all(isinstance(each, DTensor) for each in results)


def name_of(function: Callable[..., Any], *, is_plain: bool) -> str:
    """Return the name by which `guarded` finds a function; empty if the compiler calls it itself.

    Args:
        function: The function.
        is_plain: Whether it gets plain tensors alone.
    """
    own = getattr(function, "__name__", "")
    if own in INSPECTING or (is_plain and own not in _UNREAD):
        return ""
    name = f"{own}:{id(function)}"
    _FUNCTIONS[name] = function  # which keeps its identity
    return name


LEAVES = frozenset([placed_input, placed_output, part_result, guarded])


def prepare() -> None:
    """Have the compiler put these calls in its graphs; it imports the compiler."""
    torch.compiler.assume_constant_result(name_of)
    for leaf in LEAVES:
        torch.compiler.allow_in_graph(leaf)
