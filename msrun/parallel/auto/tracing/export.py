"""From a module to a graph by `torch.export`, which follows equal modules once.

`module_dedup` has the first module of each kind traced between two marks and every other one as a
single mark.  `_Expansion` then copies the nodes between the two marks to the place of each single
one, with the parameters of that module, and renames the modules around them.  The result is the
graph that tracing every module gives.

Labels are found by trying: all possible ones are hidden in the first trace.  If the forward reads
one it is no label: the kinds are determined anew and the model is traced again, until a trace reads
no further one.  Any failure of this path (a module that cannot be repeated, marks that do not fit)
falls back to following every module, which is slower, and reports errors of the model itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx.node import map_arg

from msrun.errors import ModelError
from msrun.parallel.auto.tracing.data_dependence import KnownValues, reads_values
from msrun.parallel.auto.tracing.functional import is_write, make_functional
from msrun.parallel.auto.tracing.labels import Labels
from msrun.parallel.auto.tracing.modes import enters_autocast, inlined, recorded_modes
from msrun.parallel.auto.tracing.module_dedup import (
    ENTER,
    LEAVE,
    ModuleDeduplicator,
    NotRepeatableError,
    tensors_of,
)
from msrun.parallel.auto.tracing.own_gradients import own_gradient
from msrun.parallel.auto.tracing.structure import OutputForm, leaf_tensors
from msrun.parallel.torch_compat import (
    without_forward_hooks,
    without_graph_dumps,
    without_reentrant_checkpoints,
    without_stack_traces,
)

_NUMBER = re.compile(r"_\d+$")


@dataclass(frozen=True, slots=True)
class Exported:
    """The forward of a model as a graph.

    Args:
        graph: Its nodes.
        params: Input of the graph -> the parameter that it is.
        buffers: Input of the graph -> the buffer that it is, or the constant.
        constants: Tensors that the forward makes without inputs, by name.
        inputs: Names of the inputs of a call.
        returned: Names of the nodes whose results are the tensors in the output.
        form: The output without its tensors.
        written: Input of the graph that is a buffer -> name of the node whose result it gets.
        refused: What no executor can do as one process does; empty if there is nothing.
    """

    graph: fx.Graph
    params: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, Any]
    inputs: Sequence[Any]
    returned: Sequence[Any]
    form: OutputForm
    written: Mapping[str, str]
    refused: str


def export(
    model: nn.Module, sample: Sequence[Any], at_end: Callable[[], None] = lambda: None
) -> Exported:
    """Return the forward of `model` on `sample`, without the forward hooks of `model` itself.

    Args:
        model: The model.
        sample: Its arguments.
        at_end: Called at the end of the forward, before `torch.export` takes back what it changed.
    """
    patched = without_reentrant_checkpoints()
    with without_stack_traces(), without_forward_hooks(model), patched, torch.enable_grad():
        return _repeated(model, sample, at_end) or followed(model, sample, at_end)


def _repeated(
    model: nn.Module, sample: Sequence[Any], at_end: Callable[[], None]
) -> Exported | None:
    """Return the forward with equal modules followed once; None where that fails."""
    labels, known = Labels(), -1
    while len(labels.read) > known:  # a forward has read an attribute: it is no label
        known = len(labels.read)
        dedup = ModuleDeduplicator(model, labels)
        if not dedup.groups:
            break
        # An error of the model itself is reported better by following every call.
        with suppress(Exception):
            with dedup.deduplicated():
                marked = _traced(model, sample, at_end)
            if len(labels.read) == known:
                found = _exported(model, *marked)
                # What crosses the marks may be right when every call is followed.
                return None if found.refused else _Expansion(found, model, dedup).run()
    return None


def followed(
    model: nn.Module, sample: Sequence[Any], at_end: Callable[[], None] = lambda: None
) -> Exported:
    """Return the forward of `model` on `sample`, with every module followed."""
    return _exported(model, *_traced(model, sample, at_end))


def _traced(
    model: nn.Module, sample: Sequence[Any], at_end: Callable[[], None]
) -> tuple[ExportedProgram, OutputForm, str]:
    """Return what `torch.export` makes of a model that returns the tensors of its output alone.

    Also the form of its output, and the name of a function in it that has its own gradient.
    """
    forms: list[OutputForm] = []
    buffers: dict[str, Tensor] = {}
    own: list[str] = []

    def begun(_: nn.Module, __: Any) -> None:
        buffers.update(model.named_buffers(remove_duplicate=False))

    def flattened(_: nn.Module, __: Any, output: Any) -> tuple[Tensor, ...]:
        _write_rebound(model, buffers)
        at_end()
        forms.append(OutputForm(output))
        own.append(own_gradient(leaf_tensors(output)))
        return tuple(leaf_tensors(output))

    hooks = [
        model.register_forward_pre_hook(begun),
        model.register_forward_hook(flattened),
    ]
    try:
        # What few forwards need comes second: notes of modes alone cost 8 % of a trace.
        reading: AbstractContextManager[Any] = nullcontext()
        try:
            with without_graph_dumps():
                program = torch.export.export(model, tuple(sample), strict=False)
        except Exception as error:
            if not reads_values(error):
                raise
            reading = KnownValues()
            with reading, without_graph_dumps():
                program = torch.export.export(model, tuple(sample), strict=False)
        if enters_autocast(program.graph_module):
            with recorded_modes(), reading:
                program = torch.export.export(model, tuple(sample), strict=False)
    finally:
        for hook in hooks:
            hook.remove()
    return program, forms[-1], own[-1]


def _write_rebound(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Have the trace write what forward set in place of a buffer; torch follows the root's alone.

    Args:
        model: The model, at the end of its forward.
        before: Its buffers at the begin.
    """
    for name, buffer in before.items():
        owner, _, key = name.rpartition(".")
        now = getattr(model.get_submodule(owner), key, None)
        if owner and isinstance(now, Tensor) and now is not buffer:
            if now.shape != buffer.shape:
                raise ModelError(
                    f"parallel.mode: auto cannot run a forward that sets {name} of shape "
                    f"{tuple(buffer.shape)} to a tensor of shape {tuple(now.shape)}"
                )
            setattr(model.get_submodule(owner), key, buffer.copy_(now.detach()))


def _exported(
    model: nn.Module, program: ExportedProgram, form: OutputForm, own: str = ""
) -> Exported:
    """Return the graph of `program` in operators without side effects."""
    signature = program.graph_signature
    graph = inlined(program.graph_module)
    params = signature.inputs_to_parameters
    buffers = signature.inputs_to_buffers
    constants = signature.inputs_to_lifted_tensor_constants
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    trained = {name for name, param in _named_parameters(model) if param.requires_grad}
    writes = make_functional(
        graph,
        given={
            node: f"parameter {params[name]}"
            if name in params
            else f"buffer {buffers[name]}"
            if name in buffers
            else f"tensor {constants[name]}, which is no buffer"
            if name in constants
            else f"input {name}"
            for name, node in nodes.items()
        },
        buffers=[nodes[name] for name in buffers],
        trained=[nodes[name] for name, full in params.items() if full in trained],
        is_opaque=lambda node: node.target is torch.ops.msrun.mark.default,
    )
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    return Exported(
        graph=graph,
        params=params,
        buffers={**buffers, **constants},
        constants=program.constants,
        inputs=signature.user_inputs,
        returned=[node.name for node in output.args[0]],
        form=form,
        written={buffer.name: node.name for buffer, node in writes.buffers.items()},
        refused=writes.refused or (own and f"calls {own}, which has a gradient of its own"),
    )


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return model.named_parameters(remove_duplicate=False)


@dataclass(slots=True)
class _Template:
    """The trace between two marks.

    Args:
        given: Inputs of the module: result of the first mark -> its number.
        nodes: Nodes of the module.
        returned: Outputs of the module; None before its second mark.
    """

    given: dict[fx.Node, int]
    nodes: list[fx.Node] = field(default_factory=list)
    returned: Sequence[fx.Node] | None = None


class _Expansion:
    """Replaces marks by copies of the traced modules.

    Args:
        exported: With marks.
        model: The model that was traced.
        dedup: Its groups of equal modules.
    """

    def __init__(self, exported: Exported, model: nn.Module, dedup: ModuleDeduplicator) -> None:
        self._exported, self._model = exported, model
        self._names = {**self._exported.params, **self._exported.buffers}
        self._like = {
            f"{one.full}.{name}": f"{first.full}.{name}"
            for first, *others in dedup.groups.values()
            for one in others
            for name, _ in tensors_of(one.module)
        }
        self._graph = fx.Graph()
        self._made: dict[fx.Node, fx.Node] = {}
        self._inputs: dict[str, fx.Node] = {}
        self._params: dict[str, str] = {}
        self._buffers: dict[str, str] = {}
        self._templates: dict[str, _Template] = {}
        self._open: _Template | None = None
        self._inside: set[fx.Node] = set()

    def run(self) -> Exported:
        """Return the graph without marks.

        Raises:
            NotRepeatableError: The nodes between two marks are not all of a module.
        """
        nodes = list(self._exported.graph.nodes)
        self._add_inputs([node for node in nodes if node.op == "placeholder"])
        for node in nodes:
            if node.target is torch.ops.msrun.mark.default:
                self._pass(node)
            elif node not in self._made:
                self._made[node] = self._copied(node, self._made.__getitem__)
                self._take(node)
        self._graph.eliminate_dead_code()
        names = {old.name: new.name for old, new in self._made.items()}
        returned = [names.get(name, name) for name in self._exported.returned]
        written = self._exported.written
        return replace(
            self._exported,
            written={names[buffer]: names[value] for buffer, value in written.items()},
            graph=self._graph,
            params=self._params,
            buffers=self._buffers,
            returned=returned,
        )

    def _add_inputs(self, nodes: Sequence[fx.Node]) -> None:
        """Add the inputs, including those of modules with a placeholder, in the usual order."""
        given = {self._names[node.name]: node for node in nodes if node.name in self._names}
        for full, _ in tensors_of(self._model):
            if full in given:
                self._made[given[full]] = self._added(given[full], given[full].name, full)
            elif full in self._like:
                like = given[self._like[full]]
                start = like.name.partition("_")[0]
                self._added(like, f"{start}_{full.replace('.', '_')}", full)
        for node in nodes:
            if node not in self._made:
                self._made[node] = self._added(node, node.name, self._names.get(node.name))

    def _added(self, node: fx.Node, name: str, full: str | None) -> fx.Node:
        """Add an input such as `node`."""
        made = self._graph.placeholder(name)
        if made.name != name:
            raise NotRepeatableError(f"there are two inputs {name}")
        made.meta = node.meta
        if full is not None:
            names = self._params if node.name in self._exported.params else self._buffers
            names[name] = full
            self._inputs[full] = made
        return made

    def _take(self, node: fx.Node) -> None:
        """Note a node between two marks."""
        if self._open is None:
            if not self._inside.isdisjoint(node.all_input_nodes):
                raise NotRepeatableError(f"{node.name} reads what a module keeps to itself")
            return
        if node.op != "call_function" or is_write(node):
            raise NotRepeatableError(f"{node.name} does more than return a value")
        self._open.nodes.append(node)
        self._inside.add(node)

    def _pass(self, mark: fx.Node) -> None:
        """Map the results of `mark` to the nodes that they stand for."""
        given, _, role, words = mark.args
        if (self._open is None) == (role == LEAVE):
            raise NotRepeatableError(f"{words} is called by another")
        name, _, of = str(words).partition(" ")
        parts = {part: int(part.args[1]) for part in mark.users}  # type: ignore[arg-type]
        results = [self._made[node] for node in given]  # type: ignore[union-attr, index]
        if role == ENTER:
            self._open = self._templates[name] = _Template(parts)
        elif role == LEAVE:
            self._templates[name].returned = given  # type: ignore[assignment]
            self._open = None
        else:
            results = self._repeated(self._templates[of], results, of, name)
        self._made.update({part: results[at] for part, at in parts.items()})

    def _repeated(
        self, template: _Template, given: Sequence[fx.Node], of: str, name: str
    ) -> list[fx.Node]:
        """Add a copy of `template` and return its outputs."""
        made = {part: given[at] for part, at in template.given.items()}

        def source(node: fx.Node) -> fx.Node:
            if node not in made:
                if node.op != "placeholder":
                    raise NotRepeatableError(f"{of} reads {node.name}, which it is not given")
                made[node] = self._counterpart(node, of, name)
            return made[node]

        for node in template.nodes:
            made[node] = self._copied(node, source)
            made[node].meta = {**node.meta, "nn_module_stack": _moved(node, of, name)}
        if template.returned is None:
            raise NotRepeatableError(f"{of} does not end")
        return [source(node) for node in template.returned]

    def _counterpart(self, node: fx.Node, of: str, name: str) -> fx.Node:
        """Return what the module `name` reads where the module `of` reads `node`."""
        full = self._names.get(node.name, "")
        if full.startswith(f"{of}."):
            return self._inputs[name + full[len(of) :]]
        return self._made[node]

    def _copied(self, node: fx.Node, source: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """Add a copy of `node`, with a number of its own in its name."""
        args, kwargs = map_arg(node.args, source), map_arg(node.kwargs, source)
        name = _NUMBER.sub("", node.name)
        made = self._graph.create_node(node.op, node.target, args, kwargs, name)
        made.meta = node.meta
        return made


def _moved(node: fx.Node, of: str, name: str) -> dict[str, tuple[str, Any]]:
    """Return the modules around a node, of another than it was made in."""
    stack = node.meta.get("nn_module_stack") or {}
    return {
        key: (name + path[len(of) :] if f"{path}.".startswith(f"{of}.") else path, kind)
        for key, (path, kind) in stack.items()
    }
