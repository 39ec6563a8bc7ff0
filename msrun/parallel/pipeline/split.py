"""Steps of a traced model, assigned to chunks that send each other tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import fx

from msrun.errors import ModelError
from msrun.parallel.pipeline.chunks import STAGES, Chunks
from msrun.parallel.pipeline.record.modes import Enter, Modes, leave_modes
from msrun.parallel.pipeline.trace import Memory, Trace, is_value, shown

_CHOSEN = (
    "name modules that every batch runs; if an input chooses modules, such as the number of a "
    "head, compute all and take one: torch.stack([head(x) for head in self.heads])[task]"
)

NO_MEMORY = Memory()

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
    memory: Memory = NO_MEMORY,
) -> dict[fx.Node, int]:
    """Return the chunk of each step: the given one, else that of the latest step that it uses.

    A step that uses nothing but inputs of the model is in the chunk of its first consumer.

    Args:
        graph: All steps.
        modules: Calls of modules whose chunk is given.
        chunks: The chunks there are.
        movable: Those of them that may also come later.
        memory: A step that writes comes after those that used the memory before.

    Raises:
        ModelError: A module runs before something it uses.
    """
    places: dict[fx.Node, int] = {}
    before = _users_of_memory(graph, memory)
    free: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        used = [n for n in (*node.all_input_nodes, *before.get(node, ())) if n in places]
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


def _users_of_memory(graph: fx.Graph, memory: Memory) -> dict[fx.Node, list[fx.Node]]:
    """Return, for each step that writes, the steps before it that use what it writes to."""
    if not memory.writes:
        return {}
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for storage in memory.writes.get(node, ()):
            found.setdefault(node, []).extend(seen.get(id(storage), ()))
        for part in (node, *node.all_input_nodes):
            for storage in memory.of.get(part, ()):
                seen.setdefault(id(storage), []).append(node)
    return found


def check_writes(
    graph: fx.Graph, places: Mapping[fx.Node, int], chunks: Chunks, memory: Memory
) -> None:
    """Refuse tensors that one chunk writes to in place and another uses by another name.

    Each chunk has a copy of what it receives, and of parameters and buffers, so the other chunk
    would not see what was written.

    Raises:
        ModelError: There is one.
    """
    writers: dict[int, fx.Node] = {}
    attributes: dict[int, list[fx.Node]] = {}  # steps that use one, by its memory
    for node in graph.nodes if memory.writes else ():
        for used in node.all_input_nodes:
            for storage in memory.of.get(used, ()):
                if used.op == "get_attr":
                    attributes.setdefault(id(storage), []).append(node)
                writer = writers.get(id(storage))
                if writer is not None and places.get(used, -1) < places[writer]:
                    _refuse_write(writer, node, places, chunks)
        for storage in memory.writes.get(node, ()):
            writers[id(storage)] = node
    for key, writer in writers.items():
        for node in attributes.get(key, ()):
            _refuse_write(writer, node, places, chunks)


def _refuse_write(
    writer: fx.Node, node: fx.Node, places: Mapping[fx.Node, int], chunks: Chunks
) -> None:
    chunk = places.get(node, chunks.count - 1)
    if chunk != places[writer]:
        raise ModelError(
            f"{STAGES}: {shown(writer)} of {chunks.shown(places[writer])} writes in place to what "
            f"{shown(node)} of {chunks.shown(chunk)} uses",
            hint="write `x = x + y` in place of `x += y`",
        )


def _order_hint(chunks: Chunks) -> str:
    if chunks.schedule in ("gpipe", "1f1b"):
        return "stages follow each other in the order of execution"
    return "chunks follow each other in the order of execution: give each its `[stage, segment]`"


def cut(
    graph: fx.Graph, places: Places, chunks: Chunks, outside: Modes | None = None
) -> list[ChunkProgram]:
    """Return the program of each chunk.

    A value that a later chunk uses is sent through all chunks in between.

    Args:
        graph: All steps.
        places: Chunk of each step.
        chunks: The chunks there are.
        outside: Modes in which steps were recorded that switched none.

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
            raise ModelError(
                f"{STAGES}: nothing in {chunks.shown(chunk)} runs in forward", hint=_CHOSEN
            )
        if chunk and not borders[chunk - 1]:
            raise ModelError(f"{STAGES}: {chunks.shown(chunk)} uses nothing that runs before it")
    borders = [[], *borders, []]
    return [
        _program(graph, steps[c], borders[c], borders[c + 1], outside) for c in range(chunks.count)
    ]


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
    graph: fx.Graph,
    steps: _Steps,
    received: Sequence[fx.Node],
    sent: Sequence[fx.Node],
    outside: Modes | None,
) -> ChunkProgram:
    result = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        made[node] = result.placeholder(node.name)
    for node in received:
        made[node] = result.placeholder(node.name)
    modes = outside
    for node in graph.nodes:
        if node in steps.own:
            modes = _switch(result, modes, node.meta.get("modes", outside), outside)
        if node in steps.own or node in steps.attributes:
            made[node] = result.node_copy(node, made.__getitem__)
        elif node.op == "output" and steps.is_last:
            _switch(result, modes, outside, outside)
            result.output(fx.map_arg(node.args[0], made.__getitem__))
    if not steps.is_last:
        _switch(result, modes, outside, outside)
        result.output(tuple(made[node] for node in sent))
    calls = [node.target for node in result.nodes if node.op == "call_module"]
    return ChunkProgram(
        graph=result,
        received=tuple(received),
        sent=tuple(sent),
        modules=tuple(dict.fromkeys(calls)),
        attributes=tuple(node.target for node in result.nodes if node.op == "get_attr"),
    )


def _switch(
    graph: fx.Graph, before: Modes | None, after: Modes | None, outside: Modes | None
) -> Modes | None:
    """Add the steps that change the modes, if they are others; return the new ones."""
    if before == after or outside is None or after is None:
        return before
    if before != outside:
        graph.call_function(leave_modes)
    if after != outside:
        graph.call_function(Enter(after, outside))
    return after


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRule:
    """Where the calls of modules are, in any forward of one model.

    Args:
        chunks: The chunks there are.
        calls: Chunk of each call: of a module by name, the first, second and so on.
        movable: Modules whose calls may also come later.
    """

    chunks: Chunks
    calls: Mapping[str, Sequence[int]]
    movable: Collection[str]

    def programs(self, trace: Trace) -> list[ChunkProgram]:
        """Return the program of each chunk.

        Raises:
            ModelError: The forward cannot be cut so.
        """
        modules: dict[fx.Node, int] = {}
        counts: dict[str, int] = {}
        for node in trace.graph.nodes:
            name = str(node.target)
            if node.op == "call_module" and name in self.calls:
                index = counts.get(name, 0)
                counts[name] = index + 1
                modules[node] = self.calls[name][min(index, len(self.calls[name]) - 1)]
        movable = [node for node in modules if str(node.target) in self.movable]
        places = place(trace.graph, modules, self.chunks, movable, trace.memory)
        check_writes(trace.graph, places, self.chunks, trace.memory)
        return cut(trace.graph, places, self.chunks, trace.outside)
