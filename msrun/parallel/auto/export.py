"""From a module to a graph by `torch.export`, which follows modules that are alike once.

It takes milliseconds an operator, and the hundred blocks of a model differ in their parameters
alone.  What was found between the marks of the first is put in the place of the others, which
gives the graph that following all of them gives.  Where that fails, all are followed.
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
        constants: Tensors that the forward makes of nothing, by name.
        inputs: Those that a call gives; other values are kept as they are.
        returned: What it returns: nodes, or None where it is none.
        spec: How what it returns is put together.
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
    """Return the forward where modules that are alike are followed once; None where that fails."""
    labels, heard = Labels(), -1
    while len(labels.read) > heard:  # more is known of what layers read
        heard = len(labels.read)
        alike = ModuleDeduplicator(model, labels)
        if not alike.groups:
            break
        # Whatever goes wrong here is what following every call says better.
        with suppress(Exception):
            with alike.left_out():
                found = _followed(model, sample)
            if len(labels.read) == heard:
                return _Expansion(found, model, alike).run()
    return None


def _followed(model: nn.Module, sample: Sequence[Any]) -> ExportedProgram:
    return torch.export.export(model, tuple(sample), strict=False)


def exported(found: ExportedProgram) -> Exported:
    """Return what `torch.export` found."""
    signature = found.graph_signature
    return Exported(
        graph=found.graph,
        params=signature.inputs_to_parameters,
        buffers={**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants},
        constants=found.constants,
        inputs=signature.user_inputs,
        returned=signature.user_outputs,
        spec=found.call_spec.out_spec,
    )


@dataclass(slots=True)
class _Template:
    """What lies between two marks.

    Args:
        given: What the module gets: what is taken out of the first mark -> its number.
        nodes: What it does.
        returned: What it returns; None as long as it runs.
    """

    given: dict[fx.Node, int]
    nodes: list[fx.Node] = field(default_factory=list)
    returned: Sequence[fx.Node] | None = None


class _Expansion:
    """Puts copies in the place of marks.

    Args:
        program: With marks.
        model: Whose it is.
        alike: Its modules that are alike.
    """

    def __init__(
        self, program: ExportedProgram, model: nn.Module, alike: ModuleDeduplicator
    ) -> None:
        self._found, self._model = exported(program), model
        self._names = {**self._found.params, **self._found.buffers}
        self._like = {
            f"{one.full}.{name}": f"{first.full}.{name}"
            for first, *others in alike.groups.values()
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
            NotRepeatableError: What is between two marks is not all that a module does.
        """
        nodes = list(self._found.graph.nodes)
        self._add_inputs([node for node in nodes if node.op == "placeholder"])
        for node in nodes:
            if node.target is torch.ops.msrun.mark.default:
                self._pass(node)
            elif node not in self._made:
                self._made[node] = self._copied(node, self._made.__getitem__)
                self._take(node)
        self._graph.eliminate_dead_code()
        names = {old.name: new.name for old, new in self._made.items()}
        returned = [names.get(name, name) for name in self._found.returned]
        return replace(
            self._found,
            graph=self._graph,
            params=self._params,
            buffers=self._buffers,
            returned=returned,
        )

    def _add_inputs(self, nodes: Sequence[fx.Node]) -> None:
        """Add the inputs, those of modules that were left out among them, in the usual order."""
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
            kept = self._params if node.name in self._found.params else self._buffers
            kept[name] = full
            self._inputs[full] = made
        return made

    def _take(self, node: fx.Node) -> None:
        """Take note of a node that stands between two marks."""
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
        """Have what is taken out of `mark` be what it stands for."""
        given, _, role, words = mark.args
        if (self._open is None) == (role == LEAVE):
            raise NotRepeatableError(f"{words} is called by another")
        name, _, of = str(words).partition(" ")
        parts = {part: int(part.args[1]) for part in mark.users}  # type: ignore[arg-type]
        found = [self._made[node] for node in given]  # type: ignore[union-attr, index]
        if role == ENTER:
            self._open = self._templates[name] = _Template(parts)
        elif role == LEAVE:
            self._templates[name].returned = given  # type: ignore[assignment]
            self._open = None
        else:
            found = self._repeated(self._templates[of], found, of, name)
        self._made.update({part: found[at] for part, at in parts.items()})

    def _repeated(
        self, template: _Template, given: Sequence[fx.Node], of: str, name: str
    ) -> list[fx.Node]:
        """Add a copy of `template` and return what it returns."""
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
        """Add a node such as `node`, with a number of its own in its name."""
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
