"""From a module to its program: the graph of `torch.export`, as data without torch."""

from __future__ import annotations

import operator
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from msrun.errors import ModelError
from msrun.parallel.auto.tracing.calls import CallForm
from msrun.parallel.auto.tracing.data_dependence import grouped_experts, reads_values
from msrun.parallel.auto.tracing.export import Exported, export
from msrun.parallel.auto.tracing.modes import StepMode, mode_of
from msrun.parallel.auto.tracing.plain_values import Change, PlainValues, without_draws
from msrun.parallel.auto.tracing.sample_marks import are_means, known_values
from msrun.parallel.auto.tracing.structure import leaf_tensors, mapped, with_tensors
from msrun.parallel.local import takes_gradients
from msrun.parallel.pipeline.record.recorder import where
from msrun.parallel.search.graph.operators import rules_of_steps
from msrun.parallel.search.graph.program import Program, Step, Value
from msrun.parallel.search.graph.random_ops import DROPS, DrawKind, base_name, draw_of
from msrun.parallel.search.plan.lowering import Modules

_DETACHES = ("detach", "detach_")
_NOTHING = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "_log_api_usage")
_OTHER_MODE = "choose a configuration without mode: auto"


class Evaluation(NamedTuple):
    """What a model does in evaluation, beside what it does in training.

    Args:
        difference: Where it does more than leave out dropout, batch statistics and writes to
            buffers; empty if nowhere.
        evaluated: Steps that do something else there: batch norms take their running statistics,
            and `rrelu` and attention draw no numbers.
        unwritten: Buffers that only training writes.
    """

    difference: str = ""
    evaluated: frozenset[str] = frozenset()
    unwritten: frozenset[str] = frozenset()


class Traced:
    """A program with the graph that it came from.

    Args:
        program: The forward pass as data.
        nodes: Step -> its node in the graph.
        graph: The graph, as `torch.export` made it.
        rules: Step -> its rule.
        buffers: Values of the program that are buffers, or constants of the graph -> their names.
        written: Buffer -> the value that a forward leaves in it; it depends on buffers alone.
        refused: What the forward does that no executor can; empty if there is nothing.
        dtypes: Value -> its type.
        modules: What `lowering` must know of the model.
        known: Of each tensor of the output, what would mix samples in a micro-batch.
        has_plain_losses: Whether each number of the output is the mean of those of micro-batches.
    """

    def __init__(self, exported: Exported, model: nn.Module, sample: Sequence[Any]) -> None:
        self._call = CallForm(model, sample)
        self.graph = exported.graph
        self._inputs = [str(name) for name in exported.inputs]
        self._returned = list(exported.returned)
        self._form = exported.form
        self.refused = exported.refused
        self.nodes: dict[str, fx.Node] = {}
        self.buffers = dict(exported.buffers)
        self._constants = dict(exported.constants)
        self._names: dict[str, str] = {}
        self._values: dict[str, Value] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._steps: list[Step] = []
        # Values that have a gradient.
        self._trained: set[str] = set()
        params = self._read_params(exported.params, model)
        trained = {name for name, param in model.named_parameters() if param.requires_grad}
        self._trained.update(value for value, full in params.items() if full in trained)
        nodes = {node.name: node for node in self.graph.nodes}
        for node in nodes.values():
            match node.op:
                case "placeholder":
                    self._add_value(node.name, node.meta.get("val"))
                case "call_function":
                    self._add_step(node)
        outputs = [self._name(nodes[name]) for name in self._returned]
        self.written = {
            self.buffers[buffer]: self._name(nodes[value])
            for buffer, value in exported.written.items()
        }
        self.program = Program(
            values=self._values,
            params=params,
            inputs=tuple(name for name in self._inputs if name in self._values),
            steps=tuple(self._steps),
            outputs=tuple(outputs),
            frozen=frozenset(name for name, full in params.items() if full not in trained),
            kept=tuple(self.written.values()),
        )
        self.rules = rules_of_steps(self.program)
        samples = next((len(x) for x in leaf_tensors(list(sample)) if x.dim()), 0)
        self.known = known_values(self.graph, self._inputs, self._returned, samples)
        self.has_plain_losses = are_means(self.graph, self._returned)

    # For the executor.

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return value -> tensor of the arguments of one call.

        Raises:
            ModelError: They are not as many as those of the sample, or a plain value differs.
        """
        leaves = self._call.leaves(args, kwargs)
        pairs = zip(self._inputs, leaves, strict=True)
        return {name: leaf for name, leaf in pairs if isinstance(leaf, Tensor)}

    def positional(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the arguments of one call by position.

        Raises:
            ModelError: There are others than the sample has.
        """
        return self._call.positional(args, kwargs)

    @property
    def of_whole_batch(self) -> str:
        """What one process would do otherwise in micro-batches or stages; empty without it."""
        trained, found = self.program.trained(), ""
        for (mark, mixture), name in zip(self.known, self.program.outputs, strict=True):
            if name in trained and mixture:
                found = found or mixture.name
            elif name in trained and mark and self._values[name].shape:
                found = found or mark.statistic
        return self.program.of_whole_batch or found

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
        if "sparse" in names[: len(args)]:
            # Sparse gradients cannot be redistributed.  `rt.optimizer` refuses what needs them.
            args[names.index("sparse")] = False
        return args, {key: filled(item, key) for key, item in node.kwargs.items()}

    def mode(self, name: str) -> StepMode:
        """Return the mode that a step runs under."""
        return mode_of(self.nodes[name])

    def rebuild(self, outputs: Sequence[Tensor]) -> Any:
        """Return the model's output, in its structure, from the outputs of the program."""
        return self._form.filled(outputs)

    def changed(
        self, output: Any, numbers: Collection[int], change: Callable[[Tensor], Tensor]
    ) -> Any:
        """Return the model's output with some of the program's outputs changed."""
        if not numbers:
            return output
        tensors = leaf_tensors(output)
        for number in numbers:
            tensors[number] = change(tensors[number])
        return with_tensors(output, tensors)

    def evaluation(self, other: Traced) -> Evaluation:
        """Return what this trace, of training, does beside another of the model in evaluation."""
        same: dict[str, str] = {}
        evaluated: set[str] = set()
        unwritten = set(self.written) - set(other.written)
        skipped = self._only_for([self.written[buffer] for buffer in unwritten])
        theirs = iter(other.program.steps)
        for step in self.program.steps:
            inputs = {slot: same.get(name, name) for slot, name in step.inputs.items()}
            if draw_of(step) is DrawKind.DROP:
                same[step.outputs[0]] = next(iter(inputs.values()))
                continue
            if step.name in skipped:
                continue
            found = next(theirs, None)
            attrs = step.attrs
            if found and found.packet == step.packet and (other_attrs := _evaluated(step, found)):
                attrs = attrs | other_attrs
                evaluated.add(step.name)
            if found is None or (step.target, inputs, attrs) != (
                found.target,
                found.inputs,
                found.attrs,
            ):
                return Evaluation(f"{step.packet} in {step.module or 'the model'}")
            same |= zip(step.outputs, found.outputs, strict=True)
        if next(theirs, None) is not None:
            return Evaluation("more steps than in training")
        ours = [same.get(name, name) for name in self.program.outputs]
        if ours != list(other.program.outputs):
            return Evaluation("its outputs")
        return Evaluation("", frozenset(evaluated), frozenset(unwritten))

    def _only_for(self, names: Sequence[str]) -> set[str]:
        """Return the steps whose results nothing but the values `names` depends on."""
        ends = {*self.program.outputs, *self.written.values()}.difference(names)
        found: set[str] = set()
        for step in reversed(self.program.steps):
            if ends.isdisjoint(step.outputs):
                found.add(step.name)
            else:
                ends.update(step.inputs.values())
        return found if names else set()

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

    def _name(self, node: fx.Node) -> str:
        """Return the value of a node, through all nodes that only rename it."""
        name = node.name
        while self._names.get(name, name) != name:
            name = self._names[name]
        return name

    def _add_value(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and name not in self._values:
            if any(isinstance(size, torch.SymInt) for size in value.shape):
                raise ModelError(
                    f"search: the shape of {name} depends on values of tensors, and mode auto "
                    "plans with shapes",
                    hint="compute on all samples and choose with torch.where",
                )
            self.dtypes[name] = value.dtype
            self._values[name] = Value(
                tuple(int(size) for size in value.shape),
                value.element_size(),
                takes_gradients(value),
            )

    def _add_step(self, node: fx.Node) -> None:
        """Add the step of a node; `getitem` of several results is one of those results."""
        if node.target is operator.getitem:
            source, index = node.args
            if isinstance(source, fx.Node):
                self._names[node.name] = f"{source.name}.{index}"
            return
        target = str(node.target)
        if "functorch" in str(getattr(node.target, "__module__", "")):
            raise ModelError(
                f"search: the forward of {_module(node) or 'the model'} uses torch.func or "
                "torch.vmap, which mode auto does not follow",
                hint="choose a configuration without mode: auto",
            )
        packet = target.split(".")[1] if "." in target else target
        if packet in _NOTHING:
            return
        value = node.meta.get("val")
        if packet == "broadcast_tensors" and isinstance(value, tuple | list):
            self._add_broadcast(node, value)
            return
        slots, attrs = _arguments(node)
        if "generator" in slots:
            attrs["generator"] = slots["generator"].name
        inputs = {slot: self._name(item) for slot, item in slots.items()}
        inputs = {slot: name for slot, name in inputs.items() if name in self._values}
        has_gradient = not self._trained.isdisjoint(inputs.values())
        is_off = packet in _DETACHES or mode_of(node).is_grad_enabled is False
        is_detached = has_gradient and is_off
        if not is_detached and _is_identity(packet, node, value):
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
            is_detached=is_detached,
        )
        if has_gradient and not is_detached:
            self._trained.update(name for name in outputs if self._values[name].is_float)
        self._steps.append(step)
        self.nodes[node.name] = node

    def _add_broadcast(self, node: fx.Node, made: Sequence[Tensor]) -> None:
        """Let equal shapes pass; others are expanded, which `getitem` finds by number."""
        for index, (source, tensor) in enumerate(zip(_flat(node.args), made, strict=True)):
            name = self._name(source)
            if self._values[name].shape != tuple(tensor.shape):
                with self.graph.inserting_after(node):
                    expand = torch.ops.aten.expand.default
                    wide = self.graph.call_function(expand, (source, list(tensor.shape)))
                wide.meta = {**node.meta, "val": tensor}
                self._add_step(wide)
                name = wide.name
            self._names[f"{node.name}.{index}"] = name


def trace(model: nn.Module, sample: Sequence[Any]) -> Traced:
    """Return the forward pass of `model` on a batch such as `sample`; nothing is computed.

    Raises:
        ModelError: `torch.export` cannot follow its forward.
    """
    try:
        return _trace(model, sample)
    except ModelError as error:
        with grouped_experts(model) as is_other:
            if not is_other or not reads_values(error.__cause__ or error):
                raise
            return _trace(model, sample)


def _trace(model: nn.Module, sample: Sequence[Any]) -> Traced:
    values = PlainValues(model)
    try:
        with without_draws() as draws:
            exported, changes = _exported(model, sample, values)
            if changes:
                # What the first call alone sets, such as that a warning was given, is no harm.
                for change in changes:
                    change.repeat()
                exported, changes = _exported(model, sample, PlainValues(model))
    finally:
        values.restore()
    refused = exported.refused
    if changes:
        refused = f"changes {changes[0].name} from {changes[0].before} to {changes[0].now}"
    elif draws.source:
        refused = refused or f"draws numbers from {draws.source}"
    return Traced(replace(exported, refused=refused), model, sample)


def _exported(
    model: nn.Module, sample: Sequence[Any], values: PlainValues
) -> tuple[Exported, list[Change]]:
    """Return the graph, and how plain values differ from `values` at the end of the forward."""
    distinct = mapped(list(sample), lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
    changes: list[Change] = []

    def at_end() -> None:
        changes[:] = values.changes()

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return export(model, distinct, at_end), changes
    except ModelError:
        raise
    except Exception as error:
        raise _refusal(model, error) from error


def _refusal(model: nn.Module, error: Exception) -> ModelError:
    """Return why `torch.export` cannot follow the forward, which ended with `error`."""
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    hint = f"let torch.export trace the forward, or {_OTHER_MODE}"
    if reads_values(error):  # of which torch speaks as of expressions and symbols
        reason = "it reads the value of a tensor"
        hint = f"compute with tensors alone (torch.where), or {_OTHER_MODE}"
    line = where(traceback.extract_tb(error.__traceback__))
    return ModelError(
        f"search: the forward of {type(model).__name__} cannot be traced: {reason}{line}", hint=hint
    )


def _evaluated(step: Step, other: Step) -> dict[str, Any]:
    """Return the arguments by which a step in evaluation, `other`, differs from one in training.

    Those alone that the executor knows to change; empty if these are equal.
    """
    off: dict[str, Any] = {}
    if step.packet == "batch_norm" or base_name(step.packet) == "rrelu":
        off = {"training": False}
    elif draw_of(step) is DrawKind.ATTENTION:
        off = {"dropout_p": 0.0}
    return {name: x for name, x in off.items() if other.attrs[name] == x != step.attrs[name]}


def _is_identity(packet: str, node: fx.Node, value: Any) -> bool:
    """Return whether a step returns its input unchanged."""
    if packet in ("lift_fresh_copy", "detach_", "alias"):
        return True
    is_drop = base_name(packet) in DROPS
    if not is_drop and packet not in ("to", "contiguous", "float", "type_as"):
        return False
    source = node.args[0]
    if not isinstance(source, fx.Node) or not isinstance(value, Tensor):
        return False
    if is_drop:
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
