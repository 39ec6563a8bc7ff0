"""Steps of a traced model, assigned to chunks that send each other tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import fx

from msrun.errors import ModelError
from msrun.parallel.pipeline.chunks import STAGES, Chunks
from msrun.parallel.pipeline.trace import is_value, shown

Places = Mapping[fx.Node, int]


@dataclass(frozen=True, slots=True)
class ChunkProgram:
    """The program of one chunk.

    Args:
        graph: Takes all inputs of the model, then `received`; returns `sent`, or the output.
        received: Steps of the whole model whose values the chunk before sends.
        sent: Steps whose values it sends to the next chunk; none in the last chunk.
        modules: Names of the modules it calls.
        attributes: Names of the parameters, buffers and constants it uses by itself.
    """

    graph: fx.Graph
    received: tuple[fx.Node, ...]
    sent: tuple[fx.Node, ...]
    modules: tuple[str, ...]
    attributes: tuple[str, ...]


def assign(patterns: Mapping[str, int], names: Sequence[str]) -> dict[str, int]:
    """Return the chunk of each module that has one: by its own name, else that of its parent.

    Args:
        patterns: Pattern -> chunk; the first that matches counts.
        names: Names of all modules, each after its parent.
    """
    chunk_of: dict[str, int] = {}
    for name in filter(None, names):
        own = next((chunk for key, chunk in patterns.items() if fnmatchcase(name, key)), None)
        chunk = chunk_of.get(name.rpartition(".")[0]) if own is None else own
        if chunk is not None:
            chunk_of[name] = chunk
    return chunk_of


def place(
    graph: fx.Graph,
    modules: Mapping[fx.Node, int],
    chunks: Chunks,
    movable: Collection[fx.Node] = (),
) -> dict[fx.Node, int]:
    """Return the chunk of each step: the given one, else that of the latest step that it uses.

    A step that uses nothing but inputs of the model is in the chunk of its first consumer.

    Args:
        graph: All steps.
        modules: Calls of modules whose chunk is given.
        chunks: The chunks there are.
        movable: Those of them that may also come later.

    Raises:
        ModelError: A module runs before something it uses.
    """
    places: dict[fx.Node, int] = {}
    free: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        used = [n for n in node.all_input_nodes if n in places]
        latest = max(used, key=places.__getitem__, default=None)
        if node in modules:
            places[node] = modules[node]
            if latest is None or places[latest] <= places[node]:
                continue
            if node not in movable:
                raise ModelError(
                    f"{STAGES}: {shown(node)} is in {chunks.shown(places[node])}, "
                    f"and uses {shown(latest)} of {chunks.shown(places[latest])}",
                    hint=_order_hint(chunks),
                )
            places[node] = places[latest]
        elif latest is not None:
            places[node] = places[latest]
        else:
            free.append(node)
    for node in reversed(free):
        users = [chunks.count - 1 if user.op == "output" else places[user] for user in node.users]
        places[node] = min(users, default=0)
    return places


def _order_hint(chunks: Chunks) -> str:
    if chunks.schedule in ("gpipe", "1f1b"):
        return "stages follow each other in the order of execution"
    return "chunks follow each other in the order of execution: give each its `[stage, segment]`"


def cut(graph: fx.Graph, places: Places, chunks: Chunks) -> list[ChunkProgram]:
    """Return the program of each chunk.

    A value that a later chunk uses is sent through all chunks in between.

    Raises:
        ModelError: A chunk does nothing, or uses nothing of the one before.
    """
    steps = [_Steps(graph, places, chunk, chunks.count) for chunk in range(chunks.count)]
    borders: list[list[fx.Node]] = []
    for chunk in range(chunks.count - 1):
        wanted = {node for later in steps[chunk + 1 :] for node in later.wanted}
        borders.append([n for n in graph.nodes if n in wanted and places[n] <= chunk])
    for chunk in range(chunks.count):
        if chunk not in places.values():
            raise ModelError(f"{STAGES}: nothing in {chunks.shown(chunk)} runs in forward")
        if chunk and not borders[chunk - 1]:
            raise ModelError(f"{STAGES}: {chunks.shown(chunk)} uses nothing that runs before it")
    borders = [[], *borders, []]
    return [_program(graph, steps[c], borders[c], borders[c + 1]) for c in range(chunks.count)]


class _Steps:
    """Steps of one chunk, and the tensors of earlier chunks that it uses.

    Shapes and sizes are not sent but computed again from their tensor.
    """

    def __init__(self, graph: fx.Graph, places: Places, chunk: int, count: int) -> None:
        self.own = {node for node in graph.nodes if places.get(node) == chunk}
        self.attributes: set[fx.Node] = set()
        self.wanted: set[fx.Node] = set()
        self.is_last = chunk == count - 1
        pending = list(self.own)
        if self.is_last:
            pending += [node for node in graph.nodes if node.op == "output"]
        while pending:
            for node in pending.pop().all_input_nodes:
                if node.op == "get_attr":
                    self.attributes.add(node)
                elif node.op != "placeholder" and node not in self.own:
                    if is_value(node):
                        self.own.add(node)
                        pending.append(node)
                    else:
                        self.wanted.add(node)


def _program(
    graph: fx.Graph, steps: _Steps, received: Sequence[fx.Node], sent: Sequence[fx.Node]
) -> ChunkProgram:
    result = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        made[node] = result.placeholder(node.name)
    for node in received:
        made[node] = result.placeholder(node.name)
    for node in graph.nodes:
        if node in steps.own or node in steps.attributes:
            made[node] = result.node_copy(node, made.__getitem__)
        elif node.op == "output" and steps.is_last:
            result.output(fx.map_arg(node.args[0], made.__getitem__))
    if not steps.is_last:
        result.output(tuple(made[node] for node in sent))
    calls = [node.target for node in result.nodes if node.op == "call_module"]
    return ChunkProgram(
        graph=result,
        received=tuple(received),
        sent=tuple(sent),
        modules=tuple(dict.fromkeys(calls)),
        attributes=tuple(node.target for node in result.nodes if node.op == "get_attr"),
    )
