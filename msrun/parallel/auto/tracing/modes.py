"""Where a forward changes modes: `torch.no_grad` and `torch.autocast` around some of its steps.

`torch.export` puts such steps into a subgraph, which one step of the graph calls under the mode.
`inlined` puts them back and notes on each the mode that it runs under.  A `no_grad` inside of an
`autocast` gets lost in the export.  A forward that enters an `autocast` is exported once more under
`recorded_modes`, which notes on each node, while it is made, whether gradients are off.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx import traceback
from torch.fx.node import map_arg

from msrun.errors import ModelError
from msrun.parallel.auto.tracing.function_mode import FunctionMode
from msrun.parallel.torch_compat import is_higher_order

_KEY = "msrun_mode"
_IS_GRAD_ENABLED = "msrun_is_grad_enabled"


class StepMode(NamedTuple):
    """What a step runs under, beside what the caller of the model set.

    Args:
        is_grad_enabled: As `torch.set_grad_enabled` was called; None leaves it.
        autocasts: Arguments of the calls of `torch.autocast`, the outermost first.
    """

    is_grad_enabled: bool | None = None
    autocasts: tuple[tuple[str, torch.dtype | None, bool, bool | None], ...] = ()

    def entered(self) -> AbstractContextManager[Any]:
        """Return the context in which the step runs."""
        stack = ExitStack()
        if self.is_grad_enabled is not None:
            stack.enter_context(torch.set_grad_enabled(self.is_grad_enabled))
        for arguments in self.autocasts:
            stack.enter_context(torch.autocast(*arguments))
        return stack


_NONE = StepMode()


def mode_of(node: fx.Node) -> StepMode:
    """Return the mode that a node of an inlined graph runs under."""
    mode: StepMode = node.meta.get(_KEY, _NONE)
    return mode


@contextmanager
def recorded_modes() -> Iterator[None]:
    """Inside, have a trace note on its nodes whether gradients are off."""
    with traceback.preserve_node_meta(), _GradModeNotes():
        yield


class _GradModeNotes(FunctionMode):
    """Notes on the nodes of functions that are called without gradients that they are."""

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run `function`; see the class."""
        if torch.is_grad_enabled():
            return function(*args, **kwargs)
        with traceback.annotate({_IS_GRAD_ENABLED: False}):
            return function(*args, **kwargs)


def enters_autocast(module: fx.GraphModule) -> bool:
    """Return whether the graph of `module`, or a graph that it calls, enters `torch.autocast`."""
    return any(
        str(node.target) == "wrap_with_autocast"
        for part in module.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
        if node.op == "call_function"
    )


def inlined(module: fx.GraphModule) -> fx.Graph:
    """Return the graph of `module` with the steps of its subgraphs.

    Raises:
        ModelError: A step calls subgraphs in another way, such as a loop.
    """
    nodes = module.graph.nodes
    if not any(node.op == "call_function" and is_higher_order(node.target) for node in nodes):
        return module.graph
    inliner = _Inliner()
    inliner.copy(module, None, StepMode())
    return inliner.graph


class _Inliner:
    """Copies a graph together with its subgraphs.

    Attributes:
        graph: The copy.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def copy(
        self, module: fx.GraphModule, given: Sequence[Any] | None, mode: StepMode
    ) -> dict[fx.Node, Any]:
        """Add the nodes of a graph; return what each of them became.

        Args:
            module: The graph.
            given: What its inputs are; None for the outermost graph, which keeps its inputs.
            mode: What calls it.
        """
        made: dict[fx.Node, Any] = {}
        inputs = iter(given or ())
        for node in module.graph.nodes:
            if node.op == "placeholder":
                made[node] = self._placeholder(node) if given is None else next(inputs)
            elif node.op == "get_attr":
                made[node] = getattr(module, str(node.target))
            elif node.op == "output" and given is not None:
                made[node] = map_arg(node.args[0], made.__getitem__)
            elif is_higher_order(node.target):
                made[node] = self._called(node, made, mode)
            elif node.target is operator.getitem and isinstance(made[node.args[0]], tuple | list):
                made[node] = made[node.args[0]][node.args[1]]
            else:
                made[node] = self._copied(node, made, mode)
        return made

    def _placeholder(self, node: fx.Node) -> fx.Node:
        made = self.graph.placeholder(node.name)
        made.meta = node.meta
        return made

    def _copied(self, node: fx.Node, made: Mapping[fx.Node, Any], mode: StepMode) -> fx.Node:
        args: Any = map_arg(node.args, made.__getitem__)
        kwargs: Any = map_arg(node.kwargs, made.__getitem__)
        copied = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        is_off = (node.meta.get("custom") or {}).get(_IS_GRAD_ENABLED) is False
        own = mode._replace(is_grad_enabled=False) if is_off else mode
        copied.meta = {**node.meta, _KEY: own}
        return copied

    def _called(self, node: fx.Node, made: Mapping[fx.Node, Any], mode: StepMode) -> Any:
        """Add what a node calls; return its results."""
        args: list[Any] = [map_arg(arg, made.__getitem__) for arg in node.args]
        match str(node.target):
            case "wrap_with_set_grad_enabled":
                is_enabled, called, *given = args
                mode = mode._replace(is_grad_enabled=is_enabled)
            case "wrap_with_autocast":
                *options, called = args[:5]
                given = args[5:]
                device, dtype, is_enabled, keeps = options
                autocasts = (*mode.autocasts, (device, dtype, is_enabled, keeps))
                mode = mode._replace(autocasts=autocasts)
            case other:
                raise ModelError(
                    f"search: the forward calls {other}, which mode auto does not follow",
                    hint="torch.cond, loops and compiled functions have no plan; write them in "
                    "operators on tensors",
                )
        inside = self.copy(called, given, mode)
        return next(inside[at] for at in inside if at.op == "output")
