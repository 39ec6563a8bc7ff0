"""In-place writes to tensors that a graph reads by other names, such as a view: made functional.

An executor runs every step on new tensors.  So a write must show where the written tensor is read:
a write to a view becomes a new version of its base (`o[:, :4] = x` is `slice_scatter`), and what is
read afterwards, the base or another view of it, is taken from that version.

Writes to tensors that nothing else refers to stay as they are.  Writes to buffers become results of
the graph.  What has no functional form that trains alike is reported and left.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from msrun.parallel.auto.tracing.modes import mode_of
from msrun.parallel.local import takes_gradients
from msrun.parallel.search.graph.random_ops import DROPS

_ATEN = torch.ops.aten
# Changes nothing but the graph of autograd.
_DETACHES = ("detach", "detach_")
_SAME = ("alias", "contiguous", "to", "float", "type_as", *DROPS, *_DETACHES)
_RESHAPES = (
    *("view", "reshape", "_unsafe_view", "view_as", "flatten", "unflatten"),
    *("squeeze", "unsqueeze", "_reshape_alias"),
)
_SWAPS = ("transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT", "adjoint")
# Whose functional form has another name.
_FUNCTIONAL = {"normal_": "normal_functional"}
_PARTS = ("split", "chunk", "split_with_sizes", "tensor_split", "unsafe_split", "unsafe_chunk")


@dataclass(frozen=True, slots=True)
class Writes:
    """The writes of a graph, after `make_functional`.

    Args:
        buffers: Input of the graph that is a buffer -> the node whose result it gets.
        refused: What the graph does that no executor can; empty if there is nothing.
    """

    buffers: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    refused: str = ""


def packet_of(node: fx.Node) -> str:
    """Return the operator of a node without namespace and overload; empty if it is none."""
    target = str(node.target)
    return target.split(".")[1] if "." in target and node.op == "call_function" else ""


def is_write(node: fx.Node) -> bool:
    """Return whether a node changes the values of a tensor that it is given."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable and packet_of(node) not in _DETACHES)


def make_functional(
    graph: fx.Graph,
    *,
    given: Mapping[fx.Node, str],
    buffers: Collection[fx.Node],
    trained: Collection[fx.Node],
    is_opaque: Callable[[fx.Node], bool] = lambda _: False,
) -> Writes:
    """Replace the writes that are read by other names; see the module.

    Args:
        graph: It is changed.
        given: Inputs of the graph -> how a sentence names them.
        buffers: Those that are buffers.
        trained: Those that need gradients.
        is_opaque: Whether a node may return memory that it was given.
    """
    writers = [node for node in graph.nodes if is_write(node)]
    if not writers:
        return Writes()
    aliases = _Aliases(graph)
    differentiable = _differentiable(graph, trained)
    bases: set[fx.Node] = set()
    for node in writers:
        base = aliases.base(_target(node))
        refused = _refused(node, aliases, differentiable)
        if base in given and base not in buffers:
            refused = f"writes to {given[base]}"
        if aliases.is_known_to(is_opaque, node):
            refused = "writes to a tensor of a module that is followed once"
        if refused:
            return Writes(refused=refused)
        if base in given or aliases.is_read_otherwise(node):
            bases.add(base)
    if not bases:
        return Writes()
    rewriter = _Rewriter(graph, aliases, bases)
    try:
        rewriter.run()
    except _NoInverseError as error:
        return Writes(refused=f"writes to a tensor through {error}")
    return _writes(graph, {base: rewriter.current[base] for base in bases & {*buffers}}, given)


def _writes(
    graph: fx.Graph, buffers: Mapping[fx.Node, fx.Node], given: Mapping[fx.Node, str]
) -> Writes:
    """Return the new values of buffers, which the graph returns after its outputs.

    So nothing removes them as unused.
    """
    for buffer, value in buffers.items():
        if _depends(value, [node for node in given if not given[node].startswith("buffer")]):
            what = f"what it computes from inputs or parameters to {given[buffer]}"
            return Writes(refused=f"writes {what}")
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    output.args = (*output.args, *buffers.values())
    return Writes(buffers=buffers)


def _target(node: fx.Node) -> fx.Node:
    target = node.args[0] if node.args else node.kwargs.get("self")
    if not isinstance(target, fx.Node):
        raise TypeError(f"{node.name} writes to no tensor")
    return target


def _differentiable(graph: fx.Graph, trained: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes through which gradients flow to `trained`."""
    found = set(trained)
    for node in graph.nodes:
        if packet_of(node) in _DETACHES or mode_of(node).is_grad_enabled is False:
            continue
        value = node.meta.get("val")
        is_float = not isinstance(value, Tensor) or takes_gradients(value)
        if is_float and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _depends(node: fx.Node, sources: Collection[fx.Node]) -> bool:
    """Return whether a node is computed from one of `sources`."""
    seen, left = set[fx.Node](), [node]
    while left:
        here = left.pop()
        if here in sources:
            return True
        if here not in seen:
            seen.add(here)
            left += here.all_input_nodes
    return False


def _refused(node: fx.Node, aliases: _Aliases, differentiable: Collection[fx.Node]) -> str:
    """Return what autograd does not see of a write; empty if it sees all."""
    target = _target(node)
    base = aliases.base(target)
    if base not in differentiable:
        return ""
    if mode_of(node).is_grad_enabled is False:
        return f"writes to a tensor with a gradient under torch.no_grad ({packet_of(node)})"
    if any(packet_of(view) in _DETACHES for view in aliases.chain(target)):
        return f"writes to a tensor with a gradient through .detach() or .data ({packet_of(node)})"
    return ""


class _Aliases:
    """Which nodes of a graph are the same memory.

    Args:
        graph: The graph.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._order = {node: at for at, node in enumerate(graph.nodes)}
        self._chains: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._bases: dict[fx.Node, fx.Node] = {}
        self.members: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            source = _viewed(node)
            base, chain = (self.base(source), self.chain(source)) if source else (node, ())
            if source and not is_write(node):
                chain = (*chain, node)
            self._bases[node], self._chains[node] = base, chain
            self.members.setdefault(base, []).append(node)

    def base(self, node: fx.Node) -> fx.Node:
        """Return the node that made the memory of a node."""
        return self._bases[node]

    def chain(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the views from the base to a node."""
        return self._chains[node]

    def is_read_otherwise(self, writer: fx.Node) -> bool:
        """Return whether what `writer` changes is read later, but not as its result."""
        at = self._order[writer]
        return any(
            self._order[user] > at
            for other in self.members[self.base(writer)]
            if self._order[other] < at
            for user in other.users
        )

    def is_known_to(self, is_opaque: Callable[[fx.Node], bool], writer: fx.Node) -> bool:
        """Return whether an opaque node made what `writer` changes, or read it before."""
        at, base = self._order[writer], self.base(writer)
        is_made = base.target is operator.getitem and is_opaque(base.args[0])  # type: ignore[arg-type]
        return is_made or any(
            is_opaque(user) and self._order[user] < at
            for other in self.members[base]
            for user in other.users
        )


def _viewed(node: fx.Node) -> fx.Node | None:
    """Return the node whose memory a node has, or may have; None if it has its own."""
    if node.target is operator.getitem:
        source = node.args[0]
        made = isinstance(source, fx.Node) and packet_of(source) in (*_PARTS, "unbind")
        return source.args[0] if made else None  # type: ignore[union-attr, return-value]
    packet = packet_of(node)
    if packet in (*_PARTS, "unbind") or not packet:
        return None
    if packet in DROPS:
        source = node.args[0]
        is_same = node.args[1] == 0.0 or node.args[2] is False
        return source if is_same and isinstance(source, fx.Node) else None
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(result.alias_info for result in schema.returns):
        return None
    source = next((arg for arg in node.args if isinstance(arg, fx.Node)), None)
    return source if source is not None and _has_memory_of(node, source) else None


def _has_memory_of(node: fx.Node, source: fx.Node) -> bool:
    """Return whether an operator that may copy returns a view."""
    made, given = node.meta.get("val"), source.meta.get("val")
    if not isinstance(made, Tensor) or not isinstance(given, Tensor):
        return True
    packet = packet_of(node)
    if packet in _SAME and (made.dtype, made.device) != (given.dtype, given.device):
        return False
    match packet:
        case "contiguous":
            return made.stride() == given.stride()
        case "to":
            return node.kwargs.get("copy") is not True
        case "reshape" | "flatten":
            return _can_view(given, made)
    return True


def _can_view(given: Tensor, made: Tensor) -> bool:
    """Return whether `made` is a view of `given` that has another shape."""
    try:
        torch.empty_strided(given.shape, given.stride(), device="meta").view(made.shape)
    except RuntimeError:
        return False
    return True


class _NoInverseError(Exception):
    """A view through which a write cannot be carried to its base."""


class _Rewriter:
    """Replaces the writes to some bases by versions of these.

    Args:
        graph: It is changed.
        aliases: Of the graph.
        bases: The tensors.

    Attributes:
        current: Base -> its last version.
    """

    def __init__(self, graph: fx.Graph, aliases: _Aliases, bases: Collection[fx.Node]) -> None:
        self._graph, self._aliases = graph, aliases
        self.current = {base: base for base in bases}
        self._fresh: dict[fx.Node, dict[fx.Node, fx.Node]] = {base: {} for base in bases}
        self._written: set[fx.Node] = set()

    def run(self) -> None:
        """Replace them.

        Raises:
            _NoInverseError: A write goes through a view that has no inverse.
        """
        stale = {view for base in self.current for view in self._aliases.members[base][1:]}
        for node in list(self._graph.nodes):
            if node.op in ("output", "call_function"):
                with self._graph.inserting_before(node):
                    if is_write(node) and self._aliases.base(node) in self.current:
                        self._write(node)
                    else:
                        self._read(node)
        for node in reversed(list(self._graph.nodes)):
            if node in stale and not node.users:
                self._graph.erase_node(node)

    def _read(self, node: fx.Node) -> None:
        """Have a node read the last versions."""
        if _viewed(node) is None or self._aliases.base(node) not in self._written:
            node.args = map_arg(node.args, self._value)
            node.kwargs = map_arg(node.kwargs, self._value)

    def _value(self, node: fx.Node) -> fx.Node:
        """Return the node that has the last version of what `node` refers to."""
        base = self._aliases.base(node)
        if base not in self._written:
            return node
        return self._version(base, self._aliases.chain(node))

    def _version(self, base: fx.Node, chain: Sequence[fx.Node]) -> fx.Node:
        """Return the last version of a base through views."""
        value = self.current[base]
        for view in chain:
            fresh = self._fresh[base]
            if view not in fresh:
                fresh[view] = self._viewed_again(view, value)
            value = fresh[view]
        return value

    def _viewed_again(self, view: fx.Node, source: fx.Node) -> fx.Node:
        if packet_of(view) in _DETACHES:
            return self._made(_ATEN.detach.default, (source,), view)
        if view.target is not operator.getitem:
            return self._made(view.target, (source, *view.args[1:]), view, view.kwargs)
        parts = view.args[0]
        if not isinstance(parts, fx.Node):
            raise TypeError(view.name)
        again = self._made(parts.target, (source, *parts.args[1:]), parts, parts.kwargs)
        return self._made(operator.getitem, (again, view.args[1]), view)

    def _write(self, node: fx.Node) -> None:
        """Add the version that a write makes."""
        target = _target(node)
        base, chain = self._aliases.base(target), self._aliases.chain(target)
        values = [self._version(base, chain[:at]) for at in range(len(chain) + 1)]
        new = self._functional(node, values[-1])
        for view, source in zip(reversed(chain), reversed(values[:-1]), strict=True):
            new = self._written_back(view, source, new, node)
        self.current[base], self._fresh[base] = new, {}
        self._written.add(base)

    def _functional(self, node: fx.Node, target: fx.Node) -> fx.Node:
        """Return the values that a write leaves in its target."""
        packet, overload = packet_of(node), str(node.target).rpartition(".")[2]
        args = map_arg(tuple(node.args[1:]), self._value)
        kwargs = map_arg(dict(node.kwargs), self._value)
        made, given = node.meta.get("val"), args[0] if args else None
        if packet == "copy_" and isinstance(given, fx.Node) and _is_like(given.meta["val"], made):
            return given
        operators = getattr(_ATEN, _FUNCTIONAL.get(packet, packet.removesuffix("_")), None)
        if not packet.endswith("_") or not hasattr(operators, overload):
            raise _NoInverseError(packet)
        return self._made(getattr(operators, overload), (target, *args), node, kwargs)

    def _written_back(
        self, view: fx.Node, source: fx.Node, new: fx.Node, writer: fx.Node
    ) -> fx.Node:
        """Return `source` with what `view` shows of it replaced by `new`."""
        if packet_of(view) in _SAME:
            return new
        target, args = _inverse(view, source, new)
        return self._made(target, args, source, mode_from=writer)

    def _made(
        self,
        target: Any,
        args: tuple[Any, ...],
        like: fx.Node,
        kwargs: Mapping[str, Any] | None = None,
        mode_from: fx.Node | None = None,
    ) -> fx.Node:
        """Add a node whose result has the form of that of `like`."""
        made = self._graph.call_function(target, args, dict(kwargs or {}))
        made.meta = {**(mode_from or like).meta, "val": like.meta["val"]}
        return made


def _is_like(one: Any, other: Any) -> bool:
    """Return whether two tensors have the same shape, type and device."""
    return bool(
        one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    )


def _inverse(view: fx.Node, source: fx.Node, new: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return operator and arguments that write `new` to what `view` shows of `source`.

    Raises:
        _NoInverseError: There is none.
    """
    packet, rest = packet_of(view), view.args[1:]
    shape = tuple(source.meta["val"].shape)
    if view.target is operator.getitem:
        return _inverse_of_part(view, source, new)
    made: tuple[Any, tuple[Any, ...]]
    match packet, rest:
        case (("slice" | "select" | "diagonal"), _):
            made = getattr(_ATEN, f"{packet}_scatter").default, (source, new, *rest)
        case "narrow", (dim, int() as start, int() as length):
            made = _ATEN.slice_scatter.default, (source, new, dim, start, start + length)
        case "movedim", (before, after):
            made = view.target, (new, after, before)
        case "permute", (list() | tuple() as dims,):
            order = [int(dim) % len(shape) for dim in dims]
            made = _ATEN.permute.default, (new, [order.index(dim) for dim in range(len(shape))])
        case _ if packet in _SWAPS:
            made = view.target, (new, *rest)
        case _ if packet in _RESHAPES and not str(view.target).endswith(".dtype"):
            made = _ATEN.reshape.default, (new, list(shape))
        case _:
            raise _NoInverseError(packet or str(view.target))
    return made


def _inverse_of_part(view: fx.Node, source: fx.Node, new: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the same for one of the results of `split` and its like."""
    parts, index = view.args
    if not isinstance(parts, fx.Node) or not isinstance(index, int):
        raise TypeError(view.name)
    at = 1 if packet_of(parts) == "unbind" else 2
    dim = parts.args[at] if at < len(parts.args) else parts.kwargs.get("dim", 0)
    if packet_of(parts) == "unbind":
        return _ATEN.select_scatter.default, (source, new, dim, index)
    sizes = [int(part.shape[dim]) for part in parts.meta["val"]]
    start = sum(sizes[:index])
    return _ATEN.slice_scatter.default, (source, new, dim, start, start + sizes[index])
