"""Forwards of modules under a plan, compiled: the compiler reads a mode in place of the guard.

The problem.  `torch.compile` reads the Python of a model, and of function modes that are on.  The
guard is a mode that it cannot read.  Without it, `DTensor` alone would decide, which is wrong in
silence for some functions.

The idea.  `FollowedMode` is a mode that the compiler can read: each function of a divided tensor
becomes a call in the graph that runs the guard (`leaves`).  The compiler then does what it does
elsewhere.  It notices by itself that a later step takes another branch or another shape, and the
guard is in each graph that it makes.

Invariants:

- A forward is one graph, so no function of it is left to Python, where no guard would be on.
- Each graph is searched: a divided tensor in a call that did not pass through the mode, such as an
  autograd function of the script, keeps the module uncompiled.
- What keeps a module uncompiled follows from its code, and so is the same on all ranks.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any, cast

from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from msrun.parallel import torch_compat
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.tensor.compiled import leaves
from msrun.parallel.tensor.guard import INSPECTING

# Graphs of one kind of module, one for each shape of its inputs; further shapes run uncompiled.
_SHAPES_MAX = 64


class FollowedMode(TorchFunctionMode):
    """Has functions of divided tensors run as the guard has them, in what the compiler reads."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`."""
        del types
        kwargs = kwargs or {}
        name = leaves.name_of(func, is_plain=_is_plain((*args, *kwargs.values())))
        if not name:
            return func(*args, **kwargs)
        return leaves.guarded(self._number, name, *args, **kwargs)


def _is_plain(values: tuple[Any, ...]) -> bool:
    # In words that the compiler reads.
    for value in values:
        if isinstance(value, DTensor):
            return False
        if isinstance(value, tuple | list):
            for each in value:
                if isinstance(each, DTensor):
                    return False
    return True


class Compiler:
    """Compiles forwards of one model, those of modules of one kind to the same graphs.

    Args:
        followed: Of the model.
        mode: As of `torch.compile`.

    Attributes:
        uncompiled: Kinds that run uncompiled.
    """

    def __init__(self, followed: leaves.Followed, mode: str) -> None:
        self.followed, self._mode = followed, mode
        self.uncompiled: set[Hashable] = set()
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        return {"followed": self.followed, "_mode": self._mode, "uncompiled": self.uncompiled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def _begin(self) -> None:
        leaves.prepare()
        self.entered = FollowedMode(self.followed.number)
        # Kind -> shapes of inputs -> what is compiled for them.
        self._known: dict[Hashable, dict[Hashable, Callable[..., Any]]] = {}

    def compiled(
        self, kind: Hashable, shapes: Hashable, function: FunctionType
    ) -> Callable[..., Any] | None:
        """Return `function`, compiled for one kind of module and of input; None for too many."""
        known = self._known.setdefault(kind, {})
        if shapes not in known:
            if len(known) == _SHAPES_MAX:
                return None
            # What the compiler makes belongs to the code that it reads.  It would not tell modules
            # with other hooks apart, and has a limit to the shapes of one code.
            known[shapes] = torch_compat.compiled_whole(
                _copied(function), self._mode, self._look, is_dynamic=False
            )
        return known[shapes]

    def _look(self, graph: fx.GraphModule) -> Callable[[Sequence[Any]], list[Any]] | None:
        """Refuse a graph with a call that the guard has not seen; have it return plain tensors."""
        for part in graph.modules():
            nodes = part.graph.nodes if isinstance(part, fx.GraphModule) else ()
            for node in nodes:
                if not _is_followed(node):
                    self.followed.problem = f"{node.target} gets a divided tensor"
                    raise NotImplementedError(self.followed.problem)
        return self._with_plain_results(graph)

    def _with_plain_results(
        self, graph: fx.GraphModule
    ) -> Callable[[Sequence[Any]], list[Any]] | None:
        """Have a graph return parts, and return what makes divided tensors of them again.

        The compiler takes no other gradient of a divided result than one that is divided alike: no
        zeros for a result that nobody uses.
        """
        output = next(node for node in graph.graph.nodes if node.op == "output")
        results = [*output.args[0]]
        divided = [at for at, result in enumerate(results) if _is_divided(result)]
        if not divided:
            return None
        places = [leaves.ResultPlace() for _ in divided]
        with graph.graph.inserting_before(output):
            for at, place in zip(divided, places, strict=True):
                results[at] = graph.graph.call_function(
                    leaves.part_result, (self.followed.number, place.number, results[at])
                )
        output.args = (tuple(results),)
        graph.recompile()

        def divide(values: Sequence[Any]) -> list[Any]:
            found = [*values]
            for at, place in zip(divided, places, strict=True):
                found[at] = place.tensor(found[at])
            return found

        return divide


def _is_followed(node: fx.Node) -> bool:
    """Return whether the guard has seen what a node of a graph does."""
    if node.op not in {"call_function", "call_method"} or node.target in leaves.LEAVES:
        return True
    if node.target is operator.getitem:  # of what a function returned
        return not _is_divided(node.args[0])
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in INSPECTING or not any(map(_is_divided, node.all_input_nodes))


def _is_divided(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("example_value"), DTensor)


class FollowedForward:
    """The forward of a module, compiled with the guard, or uncompiled where that is impossible.

    Args:
        name: Of the module.
        module: The module.
        compiler: Of the model.

    Attributes:
        has_rules: Whether the module or one inside has a rule.
    """

    def __init__(self, name: str, module: nn.Module, compiler: Compiler) -> None:
        self._name, self._forward, self._compiler = name, module.forward, compiler
        self._first: Any
        own = getattr(self._forward, "__func__", None)
        self._function, self._first = _CALL, self._forward
        if isinstance(own, FunctionType):
            self._function, self._first = own, module
        hooks = [
            compiler.followed.hooks.get(f"{name}.{inner}".rstrip("."))
            for inner, _ in module.named_modules()
        ]
        self.has_rules = any(hooks)
        kinds = ((inner, type(each)) for inner, each in module.named_modules())
        self._kind = self._function, tuple(zip(kinds, (h and h.key for h in hooks), strict=True))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the forward returns."""
        followed, guard = self._compiler.followed, self._compiler.followed.guard
        # Without the guard, the script calls a part of the model.
        is_off = self._kind in self._compiler.uncompiled or not torch_compat.is_active(guard)
        run = None
        if not is_off:
            run = self._compiler.compiled(self._kind, _shapes((args, kwargs)), self._function)
        if run is None:
            return self._forward(*args, **kwargs)
        followed.problem = ""
        try:
            with (
                followed.running(),
                torch_compat.without_mode(guard),
                torch_compat.following(),
                self._compiler.entered,
            ):
                return run(self._first, *args, **kwargs)
        except Exception as error:
            if not (followed.problem or torch_compat.is_of_reader(error)):
                raise
            self._compiler.uncompiled.add(self._kind)
            reason = followed.problem or str(error).strip().partition("\n")[0]
            text = f"msrun: {self._name} and modules like it run uncompiled: {reason}"
            warnings.warn(text, stacklevel=3)
        return self._forward(*args, **kwargs)


def _call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


_CALL = cast("FunctionType", _call)


def _shapes(inputs: Any) -> Hashable:
    return tuple(x.shape for x in tensors_in(inputs))


def _copied(function: FunctionType) -> FunctionType:
    """Return the same function with code of its own."""
    copied = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
