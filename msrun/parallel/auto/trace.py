"""From a module to its program: the graph of `torch.export`, as data without torch."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from msrun.errors import ModelError
from msrun.parallel.auto.export import Exported, export
from msrun.parallel.search.graph.operators import rules_of_steps
from msrun.parallel.search.graph.program import Program, Step, Value
from msrun.parallel.search.plan.lowering import Modules

_NOTHING = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "_log_api_usage")


class Traced:
    """A program with the graph that it came from.

    Args:
        program: The forward pass as data.
        nodes: Step -> its node in the graph.
        graph: The graph, as `torch.export` made it.
        rules: Step -> its rule.
        buffers: Values of the program that are buffers, or constants of the graph -> their names.
        dtypes: Value -> its type.
        modules: What `lowering` must know of the model.
    """

    def __init__(self, exported: Exported, model: nn.Module) -> None:
        self.graph = exported.graph
        self._inputs = [str(name) for name in exported.inputs]
        self._returned = list(exported.returned)
        self._spec = exported.spec
        self.nodes: dict[str, fx.Node] = {}
        self.buffers = dict(exported.buffers)
        self._constants = dict(exported.constants)
        self._names: dict[str, str] = {}
        self._values: dict[str, Value] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._steps: list[Step] = []
        self._user_outputs = set(self._returned)
        params = self._read_params(exported.params, model)
        outputs: list[str] = []
        for node in self.graph.nodes:
            match node.op:
                case "placeholder":
                    self._add_value(node.name, node.meta.get("val"))
                case "call_function":
                    self._add_step(node)
                case "output":
                    outputs = self._outputs(node)
        trained = {name for name, param in model.named_parameters() if param.requires_grad}
        self.program = Program(
            values=self._values,
            params=params,
            inputs=tuple(name for name in self._inputs if name in self._values),
            steps=tuple(self._steps),
            outputs=tuple(outputs),
            frozen=frozenset(name for name, full in params.items() if full not in trained),
        )
        self.rules = rules_of_steps(self.program)

    # For the executor.

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return value -> tensor of the arguments of one call.

        Raises:
            ModelError: They are not as many as those of the sample.
        """
        leaves = list(_flat([list(args), list(kwargs.values())]))
        if len(leaves) != len(self._inputs):
            raise ModelError(
                f"the model got {len(leaves)} inputs, and the sample of rt.shard had "
                f"{len(self._inputs)}"
            )
        pairs = zip(self._inputs, leaves, strict=True)
        return {name: leaf for name, leaf in pairs if isinstance(leaf, Tensor)}

    def buffer(self, model: nn.Module, name: str) -> Tensor:
        """Return a buffer of `model`, or a constant of its forward."""
        tensor: Tensor = (
            self._constants[name] if name in self._constants else model.get_buffer(name)
        )
        return tensor

    def arguments(
        self, name: str, tensors: Mapping[str, Tensor]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a step, with `tensors` for what it reads, by their names."""
        node = self.nodes[name]
        schema = getattr(node.target, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema else []

        def filled(item: Any, slot: str) -> Any:
            if isinstance(item, fx.Node):
                return tensors[slot]
            if isinstance(item, list | tuple):
                return [filled(one, f"{slot}.{at}") for at, one in enumerate(item)]
            return item

        args = [filled(x, names[at] if names else str(at)) for at, x in enumerate(node.args)]
        return args, {key: filled(item, key) for key, item in node.kwargs.items()}

    def rebuild(self, outputs: Sequence[Tensor]) -> Any:
        """Return the model's output, in its structure, from the outputs of the program."""
        remaining = iter(outputs)
        leaves = [next(remaining) if name is not None else None for name in self._returned]
        return self._spec.unflatten(leaves)

    def changed(
        self, output: Any, numbers: Collection[int], change: Callable[[Tensor], Tensor]
    ) -> Any:
        """Return the model's output with some of the program's outputs changed."""
        if not numbers:
            return output
        leaves = self._spec.flatten_up_to(output)
        where = [at for at, name in enumerate(self._returned) if name is not None]
        for number in numbers:
            leaves[where[number]] = change(leaves[where[number]])
        return self._spec.unflatten(leaves)

    def _read_params(self, names: Mapping[str, str], model: nn.Module) -> dict[str, str]:
        """Return value -> name in the model; a tied parameter has one of each."""
        first: dict[int, str] = {}
        params: dict[str, str] = {}
        tensors = dict(model.named_parameters(remove_duplicate=False))
        for value, name in names.items():
            same = first.setdefault(id(tensors[name]), value)
            self._names[value] = same
            if same == value:
                params[value] = name
        self.modules = Modules(
            owners={name: first[id(x)] for name, x in tensors.items() if id(x) in first},
            kinds={name: type(module).__name__ for name, module in model.named_modules()},
        )
        return params

    def _outputs(self, node: fx.Node) -> list[str]:
        outputs = []
        for item in _flat(node.args):
            if isinstance(item, fx.Node) and item.name in self._user_outputs:
                name = self._name(item)
                if name in self._values:
                    outputs.append(name)
        return outputs

    def _name(self, node: fx.Node) -> str:
        """Return the value of a node, through all nodes that only rename it."""
        name = node.name
        while self._names.get(name, name) != name:
            name = self._names[name]
        return name

    def _add_value(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and name not in self._values:
            self.dtypes[name] = value.dtype
            self._values[name] = Value(
                tuple(int(size) for size in value.shape),
                value.element_size(),
                value.is_floating_point(),
            )

    def _add_step(self, node: fx.Node) -> None:
        """Add the step of a node; `getitem` of several results is one of those results."""
        if node.target is operator.getitem:
            source, index = node.args
            if isinstance(source, fx.Node):
                self._names[node.name] = f"{source.name}.{index}"
            return
        target = str(node.target)
        packet = target.split(".")[1] if "." in target else target
        if packet in _NOTHING:
            return
        value = node.meta.get("val")
        if packet == "broadcast_tensors" and isinstance(value, tuple | list):
            self._add_broadcast(node, value)
            return
        slots, attrs = _arguments(node)
        inputs = {slot: self._name(item) for slot, item in slots.items()}
        inputs = {slot: name for slot, name in inputs.items() if name in self._values}
        if _is_identity(packet, node, value):
            self._names[node.name] = next(iter(inputs.values()))
            return
        made = value if isinstance(value, tuple | list) else [value]
        names = [
            f"{node.name}.{i}" if value is not made[0] else node.name for i in range(len(made))
        ]
        for name, tensor in zip(names, made, strict=True):
            self._add_value(name, tensor)
        outputs = tuple(name for name in names if name in self._values)
        step = Step(
            name=node.name,
            target=target,
            inputs=inputs,
            outputs=outputs,
            attrs=attrs,
            module=_module(node),
        )
        self._steps.append(step)
        self.nodes[node.name] = node

    def _add_broadcast(self, node: fx.Node, made: Sequence[Tensor]) -> None:
        """Let equal shapes pass; others are expanded, which `getitem` finds by number."""
        for index, (source, tensor) in enumerate(zip(_flat(node.args), made, strict=True)):
            name = self._name(source)
            if self._values[name].shape == tuple(tensor.shape):
                self._names[f"{node.name}.{index}"] = name
                continue
            raise ModelError(f"search: {node.name} broadcasts tensors, which is not supported")


def trace(model: nn.Module, sample: Sequence[Any]) -> Traced:
    """Return the forward pass of `model` on a batch such as `sample`; nothing is computed.

    Raises:
        ModelError: `torch.export` cannot follow its forward.
    """
    distinct = [item.clone() if isinstance(item, Tensor) else item for item in sample]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = export(model, distinct)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"search: the forward of {type(model).__name__} cannot be traced: {reason}",
            hint="torch.export needs a forward whose steps do not depend on values of tensors",
        ) from error
    return Traced(exported, model)


def _is_identity(packet: str, node: fx.Node, value: Any) -> bool:
    """Return whether a step returns its input unchanged."""
    if packet in ("lift_fresh_copy", "detach_", "alias"):
        return True
    if packet not in ("to", "dropout", "contiguous", "float", "type_as"):
        return False
    source = node.args[0]
    if not isinstance(source, fx.Node) or not isinstance(value, Tensor):
        return False
    if packet == "dropout":
        return bool(node.args[1] == 0.0 or node.args[2] is False)
    given: Tensor = source.meta["val"]
    return bool(given.dtype == value.dtype) and packet != "contiguous"


def _arguments(node: fx.Node) -> tuple[dict[str, fx.Node], dict[str, Any]]:
    """Return the tensors that a node reads, and its other arguments, by their names."""
    schema = getattr(node.target, "_schema", None)
    named: dict[str, Any] = {}
    if schema is None:
        named = {str(index): item for index, item in enumerate(node.args)}
    else:
        for index, argument in enumerate(schema.arguments):
            if index < len(node.args):
                named[argument.name] = node.args[index]
            elif argument.name in node.kwargs:
                named[argument.name] = node.kwargs[argument.name]
            elif argument.has_default_value():
                named[argument.name] = argument.default_value
    slots: dict[str, fx.Node] = {}
    attrs: dict[str, Any] = {}
    for name, item in named.items():
        if isinstance(item, fx.Node):
            slots[name] = item
        elif isinstance(item, list | tuple) and any(isinstance(one, fx.Node) for one in item):
            slots |= {f"{name}.{at}": x for at, x in enumerate(item) if isinstance(x, fx.Node)}
        else:
            attrs[name] = _plain(item)
    return slots, attrs


def _plain(item: Any) -> Any:
    if isinstance(item, bool | int | float | str) or item is None:
        return item
    if isinstance(item, list | tuple):
        return [_plain(one) for one in item]
    return str(item)


def _flat(item: Any) -> Iterator[Any]:
    if isinstance(item, list | tuple):
        for one in item:
            yield from _flat(one)
    else:
        yield item


def _module(node: fx.Node) -> str:
    """Return the name of the innermost module that runs a node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""
