"""The programs of all chunks and what they send, for each shape of micro-batches.

All ranks record the same forward from the same shapes, so they agree without a message.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from msrun.errors import ModelError
from msrun.parallel.local import is_image
from msrun.parallel.losses.batch import map_leaves
from msrun.parallel.losses.calls.marks import Known
from msrun.parallel.pipeline.border import Border, Borders
from msrun.parallel.pipeline.chunks import STAGES
from msrun.parallel.pipeline.plan import SplitPlan
from msrun.parallel.pipeline.record.follower import Follower, Values
from msrun.parallel.pipeline.record.modes import Modes
from msrun.parallel.pipeline.record.structure import leaves
from msrun.parallel.pipeline.skeleton import META, Skeleton
from msrun.parallel.pipeline.split import ChunkProgram
from msrun.parallel.pipeline.trace import shown

# So many are kept: batches of text have many lengths.
_RECORDINGS_MAX = 256


@dataclass(slots=True, kw_only=True, eq=False)
class Recording:
    """A forward for one shape of micro-batches.

    Args:
        programs: Program of each chunk.
        borders: What each chunk but the last sends.
        constants: Tensors that are not the model's, by the name under which programs get them.
        arity: Inputs of the model.
        known: What is known of each tensor of the output, of a forward in training.
        notes: Of what follows the model.
        compiled: Programs of the chunks here as functions, once they are needed.
    """

    programs: list[ChunkProgram]
    borders: Borders
    constants: dict[str, Tensor]
    arity: int
    known: tuple[Known, ...] = ()
    notes: Any = None
    compiled: dict[int, Callable[..., Any]] = field(default_factory=dict)


class Recordings:
    """Records the forward once for each shape of micro-batches, mode and plain value.

    Args:
        plan: Of the whole model.
        skeleton: A copy of it.
    """

    def __init__(self, plan: SplitPlan, skeleton: Skeleton) -> None:
        self._plan = plan
        self._skeleton = skeleton
        self._known: OrderedDict[Hashable, Recording] = OrderedDict()

    @property
    def whole(self) -> nn.Module:
        """The copy of the model."""
        return self._skeleton.whole

    def follow(self, follower: Follower) -> None:
        """Have `follower` follow recordings from now on."""
        self._skeleton.follower = follower

    def find(self, inputs: Sequence[Any], modes: Mapping[str, bool], samples: int) -> Recording:
        """Return the forward of one micro-batch of `inputs`.

        Args:
            inputs: Of the model.
            modes: Whether it trains, and each opened module of it.
            samples: In `inputs`.

        Raises:
            ModelError: It cannot be recorded, or cut where the model was.
        """
        if self._skeleton.watched.changed():
            self._known.clear()
        modes_now = tuple(modes.values()), Modes.current(self._skeleton.device)
        key = (*modes_now, kinds(inputs), self._skeleton.follower.batch_kind)
        recording = self._known.pop(key, None) or self._record(inputs, modes, samples)
        self._known[key] = recording
        if len(self._known) > _RECORDINGS_MAX:
            self._known.popitem(last=False)
        return recording

    def saved_bytes(self, inputs: Sequence[Any], recording: Recording) -> list[int] | None:
        """Return the bytes that each chunk saves of one micro-batch for its backward.

        Without recomputation and sharding inside a stage.  None where the model needs values.

        Args:
            inputs: Of the micro-batch.
            recording: Of its shape.
        """
        saved = []
        try:
            for chunk, program in enumerate(recording.programs):
                borders = recording.borders[chunk - 1] if chunk else ()
                received = self._skeleton.follower.receive(
                    recording.notes, chunk, [border.empty(META) for border in borders]
                )
                values = [*leaves(list(inputs)), *received]
                saved.append(self._skeleton.saved_bytes(program.graph, values, recording.constants))
        except Exception:  # noqa: BLE001 - the model's own code may raise anything
            return None
        return saved

    def _record(self, inputs: Sequence[Any], modes: Mapping[str, bool], samples: int) -> Recording:
        self._skeleton.set_modes(modes)
        traced = self._skeleton.record(inputs, samples=samples if modes[""] else None)
        programs = self._plan.rule.programs(traced)
        self._check(programs, traced.constants)
        sent = [program.sent for program in programs[:-1]]
        values: Values = [[traced.values.get(node) for node in nodes] for nodes in sent]
        _borders(sent, values)  # refuses what is no tensor
        given = leaves(list(inputs))

        def run(chunk: int, received: Sequence[Any]) -> Sequence[Any]:
            graph = programs[chunk].graph
            return self._skeleton.run(graph, [*given, *received], traced.constants)

        notes, values = self._skeleton.follower.end_recording(values, run)
        return Recording(
            programs=programs,
            borders=_borders(sent, values),
            constants=traced.constants,
            arity=len(inputs),
            known=traced.known,
            notes=notes,
        )

    def _check(self, programs: Sequence[ChunkProgram], constants: Mapping[str, Tensor]) -> None:
        """Refuse programs that use what their stage does not have."""
        chunks = self._plan.chunks
        for chunk, program in enumerate(programs):
            stage = chunks.stage(chunk)
            modules = self._plan.modules(stage)
            known = {*modules, *self._plan.attributes(stage), *constants}
            for name in (*program.modules, *program.attributes):
                is_part = any(name.startswith(f"{module}.") for module in modules)
                if name not in known and not is_part:
                    raise ModelError(
                        f"{STAGES}: {chunks.shown(chunk)} uses {name} for this batch, "
                        "and did not when the model was split",
                        hint="pass inputs like this batch as the sample of rt.shard",
                    )


def depends_on_received(
    model: nn.Module, program: ChunkProgram, received: Sequence[Border]
) -> bool:
    """Return whether the chunk has one gradient to send back, and its weights are all on its way.

    Args:
        model: Has the weights.
        program: Of the chunk.
        received: What the chunk receives.
    """
    if sum(border.requires_grad for border in received) > 1:
        return False
    places = [node for node in program.graph.nodes if node.op == "placeholder"]
    of_received = places[len(places) - len(received) :]
    found = {n for n, border in zip(of_received, received, strict=True) if border.requires_grad}
    weights = set(model.parameters())
    for node in program.graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
        elif node.op == "call_module":
            module = model.get_submodule(str(node.target))
            if not weights.isdisjoint(module.parameters()):
                return False
    return True


def kinds(inputs: Sequence[Any]) -> Hashable:
    """Return what of `inputs` decides about the steps of a forward."""

    def kind(x: Tensor) -> tuple[Any, ...]:
        return x.shape, x.dtype, x.device, x.requires_grad, is_image(x)

    return repr(map_leaves(kind, list(inputs)))


def _borders(sent: Sequence[Sequence[fx.Node]], values: Values) -> Borders:
    """Return what chunks send: `values` of steps."""
    return tuple(
        tuple(make_border(*pair) for pair in zip(*chunk, strict=True))
        for chunk in zip(sent, values, strict=True)
    )


def make_border(node: fx.Node, value: Any) -> Border:
    """Return what a chunk sends as the value of `node`.

    Raises:
        ModelError: It is no tensor.
    """
    if not isinstance(value, Tensor):
        raise ModelError(
            f"{STAGES}: {shown(node)} yields {type(value).__name__}, which another stage uses",
            hint="only tensors go from stage to stage: cut where the model hands on a tensor",
        )
    return Border(
        name=shown(node),
        shape=tuple(value.shape),
        dtype=value.dtype,
        requires_grad=value.requires_grad,
    )
