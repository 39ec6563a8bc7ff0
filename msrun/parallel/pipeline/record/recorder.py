"""A forward as it runs: every torch function and every call of a unit, in order.

The model's own code runs once on tensors without values.  Whatever decides about its flow (shapes,
flags, None, configuration) is concrete then, so any code can be followed that reads no value of a
tensor.  What torch functions read of values is refused with the line that reads it.
"""

from __future__ import annotations

import operator
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from inspect import ismodule
from pathlib import Path
from types import BuiltinFunctionType, FrameType, FunctionType, GetSetDescriptorType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from msrun.errors import ModelError
from msrun.parallel.pipeline.chunks import STAGES
from msrun.parallel.pipeline.record.guard import PythonRandom
from msrun.parallel.pipeline.record.modes import Modes
from msrun.parallel.pipeline.record.structure import (
    Held,
    Rebuild,
    flatten,
    is_container,
    leaves,
    same,
)
from msrun.parallel.pipeline.record.values import known_value
from msrun.parallel.pipeline.record.watch import restore_profile
from msrun.parallel.torch_compat import (
    GENERATED,
    is_fake,
    reads_values,
    with_values,
    write_count,
)

_TORCH = Path(torch.__file__).parent
_OURS = Path(__file__).parents[3]

# Written in source as they are; not so what is of a subclass, such as a number of numpy.
_WRITTEN = frozenset([bool, int, float, complex, str, bytes, type(None), type(...)])
_PLAIN = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
# Neither source nor changing: every run may use the object itself.
_CONSTANT = (type, FunctionType, BuiltinFunctionType, Enum, range, frozenset)

_READS = {
    "__array__",
    "__bool__",
    "__complex__",
    "__contains__",
    "__float__",
    "__index__",
    "__int__",
    "is_nonzero",
    "item",
    "numpy",
    "tolist",
}


def _values() -> tuple[type, ...]:
    """Return the types of values that do not change, and may be of a class of their own."""
    numpy = sys.modules.get("numpy")
    return (int, float, complex, str, bytes, *([numpy.generic] if numpy else []))


# Methods that call themselves otherwise, such as `__pow__`: a graph finds no function of that name.
_RENAMED: dict[Any, str] = {
    method: name
    for name, method in vars(Tensor).items()
    if isinstance(method, FunctionType) and method.__name__ != name
}


class ForwardRecorder(TorchFunctionMode):
    """Records what runs inside as the steps of a graph.

    Args:
        tensors: Name of each parameter, buffer and tensor attribute of the model.
        originals: Objects of the model that the code may hand to a unit, by their copies' ids.
        device: Of the model.
        materialize: Runs a call of a unit that needs values.
        counts: Whether operations are counted.

    Attributes:
        graph: The steps.
        values: The value of each step, without values.
        constants: Tensors that are not the model's, by the name under which steps get them.
        flops: Floating-point operations of each step.
        writes: Steps -> the memory that they write to.
        memory: Steps -> the memory of what they yield.
        refusal: Why the forward cannot be recorded.
    """

    def __init__(
        self,
        tensors: Mapping[int, str],
        originals: Mapping[int, Any],
        device: torch.device,
        materialize: Callable[..., Any],
        *,
        counts: bool = False,
    ) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        self.constants: dict[str, Tensor] = {}
        self.flops: dict[fx.Node, int] = {}
        self.writes: dict[fx.Node, list[torch.UntypedStorage]] = {}
        self.memory: dict[fx.Node, list[torch.UntypedStorage]] = {}
        self.refusal: ModelError | None = None
        self.outside = Modes.current(device)
        self._device = device
        self._tensors = tensors
        self._originals = originals
        self._materialize = materialize
        self._counts = counts
        self._inside = False
        self._attributes: dict[str, fx.Node] = {}
        # Tensor -> its step, and how to get it of the value of the step.  Tensors are kept: an id
        # must not be used again.
        self._nodes: dict[int, tuple[fx.Node, tuple[Any, ...]]] = {}
        self._kept: list[Any] = []

    def add_input(self, tensor: Tensor) -> None:
        """Make `tensor` the next input."""
        node = self.graph.placeholder(f"input_{len(self.values)}")
        self._bind(node, tensor)

    def finish(self, output: Any) -> None:
        """Make `output` what the graph returns.

        Raises:
            ModelError: The forward cannot be recorded.
        """
        self.graph.output(self._argument(output, "the caller"))
        if self.refusal:  # and the model's own code went on
            raise self.refusal

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func` and record it."""
        del types
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        profile = sys.getprofile()
        sys.setprofile(None)  # of torch's own functions nothing is noted, and they are many
        try:
            return self._record(func, args, kwargs)
        finally:
            restore_profile(profile)

    def _record(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__") and isinstance(
            getattr(func, "__self__", None), GetSetDescriptorType | property
        ):
            return self._attribute(func, name, args)
        if name in _READS:
            return self._read(name, args[0])
        if func is Tensor.__iter__:
            return iter(args[0].unbind(0)) if self._is_idle(args) else self._unbound(args[0])
        if func is Tensor.__len__:
            return func(*args)
        return self._step(func, name, args, kwargs)

    def call(self, name: str, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a unit, and record the call."""
        if self._inside:
            return run(*args, **kwargs)
        with self._paused():
            node = self._node("call_module", name, args, kwargs, name)
            before = self._versions((args, kwargs))
            with self._counted(node):
                try:
                    value = run(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 - the model's own code
                    value = self._materialize(name, error, args, kwargs)
            self._bind(node, value)
            self._note_writes(node, before, value)
        return value

    def refuse(self, problem: str, hint: str) -> NoReturn:
        """Refuse what the model's code does now; the first refusal counts.

        Raises:
            ModelError: Always.
        """
        self.note(problem, hint)
        raise self.refusal or AssertionError

    def note(self, problem: str, hint: str) -> None:
        """Refuse the forward once it has run; the first refusal counts."""
        line = where(traceback.extract_stack())
        self.refusal = self.refusal or ModelError(f"{STAGES}: {problem}{line}", hint=hint)

    def check_outside(self, name: str) -> None:
        """Refuse to set the attribute `name` of a unit outside of the unit.

        Raises:
            ModelError: The unit does not run.
        """
        if not self._inside:
            self.refuse(f"forward sets {name}", "let that module set it")

    def refuse_weights(self, name: str) -> None:
        """Refuse a call of the unit `name` with tensors in place of its parameters.

        Raises:
            ModelError: It is called by code that other stages have a part of.
        """
        if not self._inside:
            self.refuse(
                f"forward calls {name} with other tensors in place of its parameters",
                "do it in a module that has a stage",
            )

    @contextmanager
    def _paused(self) -> Iterator[None]:
        profile = sys.getprofile()
        sys.setprofile(None)
        self._inside = True
        try:
            with PythonRandom.unchanged():
                yield
        finally:
            self._inside = False
            restore_profile(profile)

    @contextmanager
    def _counted(self, node: fx.Node) -> Iterator[None]:
        counter = FlopCounterMode(display=False) if self._counts else None
        with counter or nullcontext():
            yield
        if counter:
            self.flops[node] = counter.get_total_flops()

    def _is_idle(self, args: Sequence[Any]) -> bool:
        return not isinstance(args[0], Tensor)

    def _unbound(self, tensor: Tensor) -> Iterator[Tensor]:
        return iter(self._step(Tensor.unbind, "unbind", (tensor, 0), {}))

    def _step(
        self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        before = self._versions((args, kwargs))
        method = name if getattr(Tensor, name, None) is func else _RENAMED.get(func)
        node = self._node(
            "call_method" if method else "call_function",
            method or func,
            args,
            kwargs,
            name,
        )
        try:
            with self._counted(node):
                value = func(*args, **kwargs)
        except Exception as error:
            self.graph.erase_node(node)
            if reads_values(error):
                self._refuse_read(name)
            raise
        if not leaves(value) and not self._note_writes(node, before, value):
            self.graph.erase_node(node)  # a size, a type
            return value
        self._bind(node, value)
        self._note_writes(node, before, value)
        return value

    def _attribute(self, func: Callable[..., Any], kind: str, args: Sequence[Any]) -> Any:
        """Record the reading or writing of an attribute of a tensor."""
        name = func.__self__.__name__ if hasattr(func.__self__, "__name__") else ""  # type: ignore[attr-defined]
        if kind == "__get__":
            value = func(*args)
            if isinstance(value, Tensor):
                self._bind(self._node("call_function", getattr, (args[0], name), {}, name), value)
            return value
        return self.refuse(
            f"forward sets the attribute {name} of a tensor", "do it in a module that has a stage"
        )

    def _read(self, name: str, tensor: Tensor) -> Any:
        """Return the value of a tensor that does not depend on the batch; refuse others."""
        node = self._node_of(tensor)
        known = known_value(node)
        if known is None:
            self._refuse_read(name)
        with with_values():
            return getattr(known, name)()

    def _refuse_read(self, name: str) -> NoReturn:
        self.refuse(
            f"forward reads the value of a tensor ({name}), which other stages do not have",
            "move what depends on values into a module of its own, and give that one a stage; "
            "layers dropped at random (layerdrop) need a rate of 0",
        )

    def _node(
        self, op: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
    ) -> fx.Node:
        arguments = tuple(self._argument(arg, name) for arg in args)
        named = {key: self._argument(arg, name) for key, arg in kwargs.items()}
        node = self.graph.create_node(op, target, arguments, named)
        node.meta["modes"] = Modes.current(self._device)
        return node

    def _argument(self, value: Any, receiver: str) -> Any:
        """Return `value` as an argument of a step."""
        if isinstance(value, Tensor):
            result: Any = self._node_of(value)
        elif type(value) in _WRITTEN or isinstance(value, _PLAIN):
            result = value
        elif isinstance(value, _values()):
            result = self._free("call_function", Held(value), ())
        elif isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            result = slice(*(self._argument(part, receiver) for part in parts))
        elif type(value) in (tuple, list, torch.Size):
            items = [self._argument(item, receiver) for item in value]
            result = items if type(value) is list else tuple(items)
        elif type(value) is dict and all(isinstance(key, str) for key in value):
            result = {key: self._argument(item, receiver) for key, item in value.items()}
        elif is_container(value):
            found, template = flatten(value)
            result = self._free(
                "call_function", Rebuild(template), tuple(map(self._node_of, found))
            )
        else:
            result = self._held(value, receiver)
        return result

    def _held(self, value: Any, receiver: str) -> fx.Node:
        if not isinstance(value, _CONSTANT):
            if id(value) not in self._originals:
                self.refuse(
                    f"forward hands {receiver} an object of {type(value).__name__}",
                    "only tensors and plain values go to and between stages; make the object in "
                    "the module that uses it, or train without pp",
                )
            value = self._originals[id(value)]
        return self._free("call_function", Held(value), ())

    def _free(self, op: str, target: Any, args: tuple[Any, ...]) -> fx.Node:
        node = self.graph.create_node(op, target, args)
        node.meta["modes"] = Modes.current(self._device)
        return node

    def _node_of(self, tensor: Tensor) -> fx.Node:
        if id(tensor) in self._nodes:
            node, path = self._nodes[id(tensor)]
            for key in path:
                get = getattr if isinstance(key, _Field) else operator.getitem
                node = self._free(
                    "call_function", get, (node, str(key) if isinstance(key, _Field) else key)
                )
            if path:
                self._set(tensor, node)
                self.values[node] = tensor
                self.memory[node] = [tensor.untyped_storage()]
            return node
        name = self._tensors.get(id(tensor))
        if name is None:
            name = self._constant(tensor)
        if name not in self._attributes:
            node = self.graph.create_node("get_attr", name)
            self._attributes[name] = node
            self.values[node] = tensor
            self.memory[node] = [tensor.untyped_storage()]
        self._set(tensor, self._attributes[name])
        return self._attributes[name]

    def _constant(self, tensor: Tensor) -> str:
        if is_fake(tensor) or isinstance(tensor, Parameter):
            if name := _scripted(sys._getframe()):  # noqa: SLF001 - as `inspect` does
                self.refuse(
                    f"forward calls {name}, a function of torch.jit.script, whose steps cannot be "
                    "recorded",
                    f"call it in a module that has a stage, or leave {name} a function of Python",
                )
            self.refuse(
                "forward uses a tensor that no torch function returned and no module has",
                "make it in a module that has a stage; what torch.jit.script or an extension in "
                "C++ computes is not recorded elsewhere",
            )
        name = f"constant_{id(tensor)}"
        self.constants[name] = tensor
        return name

    def _set(self, tensor: Tensor, node: fx.Node, path: tuple[Any, ...] = ()) -> None:
        self._nodes[id(tensor)] = node, path
        self._kept.append(tensor)

    def _bind(self, node: fx.Node, value: Any) -> None:
        """Note which step yields the tensors in `value`."""
        self.values[node] = value
        found = leaves(value)
        self.memory[node] = [tensor.untyped_storage() for tensor in found]
        for tensor, path in _paths(value):
            self._set(tensor, node, path)

    def _versions(self, value: Any) -> list[tuple[Tensor, int]]:
        return [
            (tensor, write_count(tensor)) for tensor in leaves(value) if not tensor.is_inference()
        ]

    def _note_writes(self, node: fx.Node, before: list[tuple[Tensor, int]], value: Any) -> bool:
        """Note what `node` wrote to, and let steps that use it come after `node`."""
        written = [tensor for tensor, version in before if write_count(tensor) != version]
        if not written:
            return False
        if node not in self.values:
            self._bind(node, value)
        self.writes[node] = [tensor.untyped_storage() for tensor in written]
        returned = {id(tensor) for tensor in leaves(value)}
        for tensor in written:
            if id(tensor) not in returned:
                after = self._free("call_function", same, (self._node_of(tensor), node))
                self.writes[after] = [tensor.untyped_storage()]
                self._bind(after, tensor)
        return True


class _Field(str):
    """The name of a field of a data class."""

    __slots__ = ()


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Tensor, tuple[Any, ...]]]:
    """Yield the tensors in `value`, and how to get each."""
    if isinstance(value, Tensor):
        yield value, path
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _paths(item, (*path, index))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _paths(item, (*path, key))
    elif is_container(value):
        for name in value.__dataclass_fields__:
            yield from _paths(getattr(value, name), (*path, _Field(name)))


def _scripted(frame: FrameType | None) -> str:
    """Return the name of a function of TorchScript that the model's own code around names."""
    while frame is not None and not _is_of_model(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    names = set(frame.f_code.co_names) | set(frame.f_locals)
    owners = [frame.f_locals, frame.f_globals, vars(frame.f_locals.get("self", object))]
    owners += [
        vars(found) for of in owners[:2] for name in names if ismodule(found := of.get(name))
    ]
    kind: Any = torch.jit  # whose types leave it out
    for name in sorted(names):
        if any(isinstance(owner.get(name), kind.ScriptFunction) for owner in owners):
            return name
    return ""


def _is_of_model(filename: str) -> bool:
    parents = Path(filename).parents
    is_program = filename.startswith(GENERATED)  # of a chunk
    return _TORCH not in parents and _OURS not in parents and not is_program


def where(stack: traceback.StackSummary) -> str:
    """Return the line of the model's own code in `stack` that was reached last."""
    for frame in reversed(stack):
        if _is_of_model(frame.filename):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""
