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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.fx.node import map_arg

from msrun.parallel.auto.labels import Labels
from msrun.parallel.auto.module_dedup import (
    ENTER,
    LEAVE,
    ModuleDeduplicator,
    NotRepeatableError,
    tensors_of,
)
from msrun.parallel.torch_compat import without_stack_traces

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
        returned: Names of the nodes that it returns; None for outputs that are no tensors.
        spec: The structure of the output.
    """

    graph: fx.Graph
    params: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, Any]
    inputs: Sequence[Any]
    returned: Sequence[Any]
    spec: Any


def export(model: nn.Module, sample: Sequence[Any]) -> Exported:
    """Return the forward of `model` on `sample`."""
    with without_stack_traces():
        return _repeated(model, sample) or exported(_followed(model, sample))


def _repeated(model: nn.Module, sample: Sequence[Any]) -> Exported | None:
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
                program = _followed(model, sample)
            if len(labels.read) == known:
                return _Expansion(program, model, dedup).run()
    return None


def _followed(model: nn.Module, sample: Sequence[Any]) -> ExportedProgram:
    return torch.export.export(model, tuple(sample), strict=False)


def exported(program: ExportedProgram) -> Exported:
    """Return the graph of `program`, with what is needed to call it."""
    signature = program.graph_signature
    return Exported(
        graph=program.graph,
        params=signature.inputs_to_parameters,
        buffers={**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants},
        constants=program.constants,
        inputs=signature.user_inputs,
        returned=signature.user_outputs,
        spec=program.call_spec.out_spec,
    )


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
        program: With marks.
        model: The model that was traced.
        dedup: Its groups of equal modules.
    """

    def __init__(
        self, program: ExportedProgram, model: nn.Module, dedup: ModuleDeduplicator
    ) -> None:
        self._exported, self._model = exported(program), model
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
        return replace(
            self._exported,
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
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or (schema is not None and schema.is_mutable):
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
