"""The steps of a model's forward, traced with `torch.fx` down to given modules."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from msrun.errors import ModelError
from msrun.parallel.losses.calls.marks import Known
from msrun.parallel.pipeline.chunks import STAGES
from msrun.parallel.pipeline.record.modes import Modes
from msrun.parallel.pipeline.record.structure import Held, Rebuild

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


class NamedInputs(dict[str, Any]):
    """Inputs of a model by name: the last of its inputs, behind those by position."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of tensors in a recorded forward.

    Args:
        of: Step -> the memory of what it yields.
        writes: Step -> the memory that it writes to.
    """

    of: dict[fx.Node, list[torch.UntypedStorage]] = field(default_factory=dict)
    writes: dict[fx.Node, list[torch.UntypedStorage]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """The steps of a `forward`.

    Args:
        graph: Its steps.
        inputs: Parameters of `forward` that a batch fills.
        constants: Tensors that are not the model's, by the name under which steps get them.
        values: The value of each recorded step, without values.
        flops: Floating-point operations of recorded steps.
        memory: Of recorded steps.
        outside: Modes at the begin of a recording.
        known: Of each tensor of the output, what mixed samples; empty where nobody looked.
    """

    graph: fx.Graph
    inputs: tuple[str, ...]
    constants: dict[str, Tensor]
    values: dict[fx.Node, Any] = field(default_factory=dict)
    flops: dict[fx.Node, int] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    outside: Modes | None = None
    known: tuple[Known, ...] = ()


def trace(model: nn.Module, is_leaf: Callable[[str], bool], inputs: Sequence[str]) -> Trace:
    """Return the steps of `model.forward`, with modules that `is_leaf` names as single steps.

    They say where modules are called, and nothing runs them: see `record`.

    Args:
        model: Nothing in it changes.
        is_leaf: Whether the module of this name is one step.
        inputs: As of `Trace`; other parameters keep their defaults.

    Raises:
        ModelError: `forward` depends on values or shapes.
    """
    with _mode(model, training=True):
        return _trace(model, is_leaf, inputs)


def bound(model: nn.Module, inputs: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the arguments of `forward`: by position, and by name.

    A model of transformers that may return a cache of keys and values does not make one, unless
    the inputs ask for it: it is no part of a loss, and its layers are in several stages.

    Raises:
        ModelError: `forward` does not take them.
    """
    named: dict[str, Any] = {}
    if inputs and isinstance(inputs[-1], NamedInputs):
        inputs, named = inputs[:-1], dict(inputs[-1])
    signature = inspect.signature(model.forward)
    if _takes_cache(model, signature, len(inputs)):
        named = {"use_cache": False, **named}
    try:
        signature.bind(*inputs, **named)
    except TypeError as error:
        names = [*signature.parameters]
        count = len(inputs) + len(named)
        if len(inputs) > len(names):
            raise ModelError(
                f"{type(model).__name__} takes {len(names)} input(s) ({', '.join(names)}), "
                f"not {count}, as it was split"
            ) from None
        raise ModelError(
            f"the forward of {type(model).__name__} does not take this batch: {error}"
        ) from None
    return inputs, named


def _takes_cache(model: nn.Module, signature: inspect.Signature, count: int) -> bool:
    """Return whether `forward` may be told to keep no cache, behind `count` inputs by position.

    Models of peft hand on whatever they get by name.
    """
    parameters = signature.parameters
    if "use_cache" in [*parameters][count:]:
        return True
    find_base = getattr(model, "get_base_model", None)
    if find_base is None or not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return False
    return "use_cache" in [*inspect.signature(find_base().forward).parameters][count:]


def program_of(tree: nn.Module, graph: fx.Graph) -> Callable[..., Any]:
    """Return `graph` as a function of `tree` and the inputs of the graph."""
    # The class that torch writes for the graph holds the function; its module would keep
    # parameters of its own, which go stale when those of `tree` are replaced.
    return type(_Program(tree, graph)).forward


class _Program(fx.GraphModule):
    """A graph of a model that may have a buffer of the name `code`, as codebooks do."""

    @property
    def code(self) -> str:
        """The source, once there is one; torch raises what `hasattr` lets through before."""
        try:
            return super().code
        except RuntimeError as error:
            raise AttributeError(str(error)) from None


def input_names(model: nn.Module, sample: Sequence[Any] | None) -> list[str]:
    """Return the parameters of `model.forward` that a batch fills.

    Args:
        sample: Inputs of one batch; None means one for each parameter without a default.

    Raises:
        ModelError: `forward` takes fewer than there are in `sample`.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    every = inspect.signature(model.forward).parameters.values()
    parameters = [parameter for parameter in every if parameter.kind in kinds]
    if sample is None:
        return [p.name for p in parameters if p.default is inspect.Parameter.empty]
    names = [parameter.name for parameter in parameters]
    for parameter in every:
        if parameter.kind is parameter.VAR_POSITIONAL:
            count = len(sample) - len(names)
            names += [f"{parameter.name}[{index}]" for index in range(count)]
    if len(sample) > len(names):
        raise ModelError(
            f"the sample has {len(sample)} inputs, "
            f"and the forward of {type(model).__name__} takes {len(names)}"
        )
    return names[: len(sample)]


def is_value(node: fx.Node) -> bool:
    """Return whether `node` yields no tensor but a shape, a size or what is computed from them."""
    if node.op == "call_method":
        return node.target in _METHODS
    if node.op != "call_function":
        return False
    if isinstance(node.target, Held | Rebuild):
        return True
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
            hint="pass the inputs of one batch: rt.shard(model, sample=batch); or, if an input "
            "chooses modules, compute all of them and take one of the outputs: "
            "torch.stack([head(x) for head in self.heads])[task]",
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
