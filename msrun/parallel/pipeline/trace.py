"""The steps of a model's forward, traced with `torch.fx` down to given modules."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from msrun.errors import ModelError
from msrun.parallel.pipeline.chunks import STAGES

_TORCH = Path(torch.__file__).parent
_OURS = Path(__file__).parent

# Attributes and methods that follow from a tensor's shape and type, and are no tensors.
_ATTRIBUTES = {"device", "dtype", "is_cuda", "itemsize", "layout", "nbytes", "ndim", "shape"}
_METHODS = {
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_floating_point",
    "ndimension",
    "nelement",
    "numel",
    "size",
    "stride",
}


@dataclass(frozen=True, slots=True)
class Trace:
    """The steps of a `forward`.

    Args:
        graph: Its steps.
        inputs: Parameters of `forward` that a batch fills.
        constants: Tensors that `forward` makes from plain numbers, by the name of their step.
    """

    graph: fx.Graph
    inputs: tuple[str, ...]
    constants: dict[str, Tensor]


def trace(model: nn.Module, is_leaf: Callable[[str], bool], inputs: Sequence[str]) -> Trace:
    """Return the steps of `model.forward`, with modules that `is_leaf` names as single steps.

    Args:
        model: Nothing in it changes.
        is_leaf: Whether the module of this name is one step.
        inputs: As of `Trace`; other parameters keep their defaults.

    Raises:
        ModelError: `forward` depends on values, or has other steps in evaluation.
    """
    with _mode(model, training=True):
        trained = _trace(model, is_leaf, inputs)
    with _mode(model, training=False):
        evaluated = _trace(model, is_leaf, inputs)
    # Where one is shorter, its last step differs.
    for node, other in zip(trained.graph.nodes, evaluated.graph.nodes, strict=False):
        if _written(node) != _written(other):
            raise ModelError(
                f"{STAGES}: the forward of {type(model).__name__} is not the same in training "
                f"and in evaluation ({shown(node)})",
                hint="let modules such as nn.Dropout tell the two apart",
            )
    return trained


def input_names(model: nn.Module, sample: Sequence[Any] | None) -> list[str]:
    """Return the parameters of `model.forward` that a batch fills.

    Args:
        sample: Inputs of one batch; None means one for each parameter without a default.

    Raises:
        ModelError: `forward` takes fewer than there are in `sample`.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [
        parameter
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.kind in kinds
    ]
    if sample is None:
        return [p.name for p in parameters if p.default is inspect.Parameter.empty]
    if len(sample) > len(parameters):
        raise ModelError(
            f"the sample has {len(sample)} inputs, "
            f"and the forward of {type(model).__name__} takes {len(parameters)}"
        )
    return [p.name for p in parameters[: len(sample)]]


def is_value(node: fx.Node) -> bool:
    """Return whether `node` yields no tensor but a shape, a size or what is computed from them."""
    if node.op == "call_method":
        return node.target in _METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _ATTRIBUTES
    module = getattr(node.target, "__module__", None)
    is_plain = module in ("_operator", "operator", "math", "builtins")
    return is_plain and bool(node.all_input_nodes) and all(map(is_value, node.all_input_nodes))


def shown(node: fx.Node) -> str:
    """Return how messages name `node`: by its module, or as what follows which module."""
    if node.op in ("call_module", "get_attr", "placeholder"):
        return str(node.target)
    name = getattr(node.target, "__name__", node.target)
    before = node.prev
    while before.op not in ("call_module", "root"):
        before = before.prev
    return f"{name} after {before.target}" if before.op == "call_module" else f"{name} at the start"


class _Tracer(fx.Tracer):
    """Records calls of modules; gives the parameters `inputs` of `forward` proxies."""

    def __init__(self, is_leaf: Callable[[str], bool], inputs: Sequence[str]) -> None:
        super().__init__()
        self.proxy_buffer_attributes = True
        self._is_leaf = is_leaf
        self._inputs = inputs

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether `m` is one step."""
        del m
        return self._is_leaf(module_qualified_name)

    def create_args_for_root(
        self,
        root_fn: Callable[..., Any],
        is_module: bool,  # noqa: FBT001 - as torch calls it
        concrete_args: dict[str, Any] | tuple[Any, ...] | None = None,
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Return what to call and its arguments; torch would replace defaults by proxies too."""
        del root_fn, is_module, concrete_args
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self._inputs]

        def call(root: Any, *values: Any) -> Any:
            return root.forward(*values)

        return call, [self.root, *proxies]


def _trace(model: nn.Module, is_leaf: Callable[[str], bool], inputs: Sequence[str]) -> Trace:
    before = set(vars(model))
    constants: dict[str, Tensor] = {}
    try:
        graph = _Tracer(is_leaf, inputs).trace(model)
    except Exception as error:  # noqa: BLE001 - the model's own code may raise anything
        problem = str(error).partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"{STAGES}: the forward of {type(model).__name__} cannot be traced: "
            f"{problem}{_where(error)}",
            hint="move what depends on values into a module of its own, and give that one a stage",
        ) from None
    finally:
        for name in set(vars(model)) - before:  # the tracer keeps them there
            constants[name] = vars(model)[name]
            delattr(model, name)
    return Trace(graph, tuple(inputs), constants)


def _where(error: BaseException) -> str:
    """Return the line of the model's own code at which `error` arose."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if _TORCH not in path.parents and path.parent != _OURS:
            return f" ({path.name}, line {frame.lineno})"
    return ""


def _written(node: fx.Node) -> tuple[str, object, str]:
    return node.op, node.target, f"{node.args} {node.kwargs}"


@contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set the mode of all modules, and restore each afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
