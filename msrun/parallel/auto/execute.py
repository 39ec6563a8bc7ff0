"""Executes any plan: every traced operator on local shards, with redistribution between them.

The steps are those of the traced forward, on plain local tensors.  Each gets its inputs in the
layout that its strategy reads; autograd sends the gradients back by placements of their own
(`redistribute.RedistributeFunction`), since a gradient need not be placed as its value is.
Redistribution takes the steps of the table that priced it, so what is predicted is what runs.

Parameters stay `DTensor`s in the placement in which they are stored, so optimizers and checkpoints
treat them as any others; the forward takes their local shards and gathers them where a step wants
more.  A tensor with a layout node is redistributed once, as soon as it is made.  A view is computed
on the redistributed base, with the sizes of the local shard.  What depends on no parameter is
computed before, in the layout that `Uses` gives it.

A few operators need more than local shards: embeddings split by row, losses, means and batch norms
over sharded samples, and those that draw the random numbers of one process (`random_steps`).
`unsupported_ops` refuses what nothing can make right.  Repeated blocks may be recomputed; a stage
runs a `Part` of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import Parameter, functional
from torch.utils.checkpoint import checkpoint

from msrun.errors import ModelError
from msrun.parallel.auto.batch_norms import BatchNorms
from msrun.parallel.auto.executable import TracedBehaviour
from msrun.parallel.auto.joined_outputs import JoinedOutputs
from msrun.parallel.auto.native import loss_sum
from msrun.parallel.auto.random_steps.drawing import DrawingSteps
from msrun.parallel.auto.random_steps.step_rng import StepRng
from msrun.parallel.auto.redistribute import (
    Redistributor,
    redistribute_both_ways,
    with_gradient_share,
)
from msrun.parallel.auto.tracing.modes import StepMode
from msrun.parallel.auto.tracing.trace import Evaluation, Traced
from msrun.parallel.local import replace_parameter
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.search.graph.axis_placement import (
    PARTIAL,
    REPLICATED,
    RR,
    RZ,
    SHARD_CODES,
    IntArray,
    gradient_placement,
    value_placement,
)
from msrun.parallel.search.graph.program import Step
from msrun.parallel.search.graph.random_ops import DrawKind, draw_of
from msrun.parallel.search.graph.repeat import Blocks
from msrun.parallel.search.graph.rules import Choice, ShardingRule, Site
from msrun.parallel.search.graph.unsupported_ops import check, writes
from msrun.parallel.search.graph.views import dim_map, is_reshape
from msrun.parallel.search.mesh.stages import Part, divide
from msrun.parallel.search.plan.lowering import AVERAGES, BY_CLASS
from msrun.parallel.search.solve.edges import base_codes
from msrun.parallel.search.solve.problem import Setting, layout_node
from msrun.parallel.search.solve.uses import Uses

Row = tuple[int, ...]


class Executor:
    """The forward of a model under a plan, or of one pipeline stage of it.

    Args:
        model: Whose forward it is; for a stage, with the parameters of the stage.
        traced: Its steps, for the global batch.
        rules: Node -> its rule.
        chosen: Node -> its choice on every axis.
        setting: What the plan is for.
        mesh: Its axes are those of the plan.
        seed: Of random numbers, the same on every rank.
        behaviour: What must be as it was in the trace; None if that is known.
        blocks: Those that are recomputed in the backward pass; None saves all activations.
        part: What the stage runs; None is all.

    Attributes:
        step_rng: Of random numbers.
        join: Makes outputs those of one step of autograd.
    """

    def __init__(
        self,
        model: nn.Module,
        traced: Traced,
        rules: Mapping[str, ShardingRule],
        chosen: Mapping[str, Row],
        *,
        setting: Setting,
        mesh: DeviceMesh,
        seed: int,
        behaviour: TracedBehaviour | None = None,
        blocks: Blocks | None = None,
        part: Part | None = None,
    ) -> None:
        self._model, self._traced, self._chosen = model, traced, chosen
        self._program, self._setting, self._mesh = traced.program, setting, mesh
        self._rules = dict(rules)
        check(self._program)
        self._redistributor = Redistributor(mesh)
        self._norms = BatchNorms(model, traced.buffers, self._redistributor)
        self._uses = Uses(self._program, setting, traced.rules)
        self._part = part or divide(self._program, self._uses, [0])[0]
        self._producers = {name: step for step in self._program.steps for name in step.outputs}
        self.step_rng = StepRng(self._program, seed)
        self._draws = DrawingSteps(traced, self.step_rng, self._redistributor)
        self._blocks, self.behaviour = blocks, behaviour
        modes = {step.name: traced.mode(step.name) for step in self._program.steps}
        self._modes = {name: mode for name, mode in modes.items() if mode != StepMode()}
        self._stored: dict[str, Row] = {}
        self.join = JoinedOutputs(model).join
        self._divide()

    # Parameters.

    def _divide(self) -> None:
        """Replace each parameter of the model by a `DTensor` with this rank's shard."""
        owners = dict(self._model.named_parameters(remove_duplicate=False))
        modules = dict(self._model.named_modules(remove_duplicate=False))
        for value, full in self._program.params.items():
            if value not in self._part.params:
                continue
            param = owners[full]
            codes = [RR] * self._mesh.ndim
            if value in self._chosen:
                codes = [choice.outs[0] for choice in self._choices(value)]
            self._stored[value] = stored = tuple(self._stored_codes(codes, tuple(param.shape)))
            if isinstance(param, DTensor):
                continue  # another chunk of this stage has it too
            placements = [Shard(code) if code < SHARD_CODES else Replicate() for code in stored]
            # Every rank has the same values: nothing needs to be sent.
            sharded = distribute_tensor(param.data, self._mesh, placements, src_data_rank=None)
            replacement = Parameter(sharded, requires_grad=param.requires_grad)
            replace_parameter(param, replacement)
            for name, tensor in owners.items():
                if tensor is param:
                    module, _, own = name.rpartition(".")
                    setattr(modules[module], own, replacement)

    def _stored_codes(self, codes: Sequence[int], shape: tuple[int, ...]) -> list[int]:
        """Return the layout of a parameter between steps: with its state sharded, it is too.

        By a dim that no other axis shards, so that it is gathered alone; where there is none, state
        and parameter stay replicated on that axis.
        """
        stored = [RR if code == RZ else code for code in codes]
        for axis, code in enumerate(codes):
            size = self._mesh.size(axis)
            free = [d for d, n in enumerate(shape) if d not in stored and n % size == 0]
            if code == RZ and free and size > 1:
                stored[axis] = free[0]
        return stored

    # Forward.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model for this rank's batch.

        A stage also takes what it receives, after the inputs; all but the last return what they
        send.
        """
        if self.behaviour:
            self.behaviour.check(self._model)
        if self._model.training or self._draws.draws_in_evaluation:
            self.step_rng.begin()
        part, own = self._part, len(args) - len(self._part.received)
        values = self.read(args[:own], kwargs) | dict(zip(part.received, args[own:], strict=True))
        for name, full in self._traced.buffers.items():
            if name in part.given:
                values[name] = self._traced.buffer(self._model, full)
        for name in part.params:
            if self._uses.uses.get(name):
                param = self._model.get_parameter(self._program.params[name])
                local = param.to_local() if isinstance(param, DTensor) else param
                values[name] = self._to_shared_layout(name, local, self._stored[name])
        for steps, cut in self._spans():
            if cut is None or not torch.is_grad_enabled():
                self._run_all(steps, values)
            else:
                self._run_block(steps, cut, values)
        self._write_buffers(values)
        if part.sent is not None:
            return tuple(values[name] for name in part.sent)
        outputs = [self._output(at, name, values) for at, name in enumerate(self._program.outputs)]
        return self._traced.rebuild(self.join(outputs))

    def _write_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Give buffers what the forward leaves in them."""
        for buffer in self._traced.written.keys() - self._left_out().unwritten:
            value = self._traced.written[buffer]
            module, _, own = buffer.rpartition(".")
            # A new tensor: backward may need the old one.
            setattr(self._model.get_submodule(module), own, values[value].detach())

    def _spans(self) -> Iterator[tuple[Sequence[Step], str | None]]:
        """Yield runs of steps, each with the one value that a recomputed block passes on, or None.

        Constants are computed outside of blocks, as later blocks may read them too.
        """
        blocks, constants = self._blocks, self._uses.constants
        inside = blocks.block_of(self._program) if blocks else {}

        def block(step: Step) -> int | None:
            return None if constants.issuperset(step.outputs) else inside.get(step.name)

        for number, steps in groupby(self._part.steps, block):
            yield list(steps), None if blocks is None or number is None else blocks.cuts[number]

    def _run_all(self, steps: Iterable[Step], values: dict[str, Tensor]) -> None:
        """Add the outputs of `steps` to `values`."""
        for step in steps:
            outputs = self._run(step, values)
            is_constant = self._uses.constants.issuperset(step.outputs)
            for port, (name, x) in enumerate(zip(step.outputs, outputs, strict=True)):
                codes = () if is_constant else self._outs(step.name, port)
                values[name] = x if is_constant else self._to_shared_layout(name, x, codes)

    def _run_block(self, steps: Sequence[Step], cut: str, values: dict[str, Tensor]) -> None:
        """Add what a block passes on, and save its inputs to recompute the rest."""
        given, rng_state, runs = dict(values), self.step_rng.state, count()

        def run() -> Tensor:
            inside = dict(given)
            with self.step_rng.again(rng_state), self._norms.again(is_again=next(runs) > 0):
                self._run_all(steps, inside)
            return inside[cut]

        values[cut] = checkpoint(run, use_reentrant=False, preserve_rng_state=False)

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the inputs by the names of their values.

        Raises:
            ModelError: They are not like those of the sample.
        """
        given = self._traced.bind(args, kwargs)
        values = {name: x for name, x in given.items() if name in self._program.values}
        for name, x in values.items():
            shape = self.local_shape(name, self._uses.layouts[name][0])
            if tuple(x.shape) != shape:
                raise ModelError(
                    f"an input of shape {list(x.shape)} came where the plan of parallel.mode "
                    f"auto has {list(shape)}",
                    hint="give rt.shard a sample like every batch, and drop the last one",
                )
        return values

    def local_shape(self, name: str, codes: IntArray | Row) -> tuple[int, ...]:
        """Return the shape of this rank's shard of a value in the layout `codes`."""
        shape = list(self._program.values[name].shape)
        for axis, code in enumerate(codes):
            if code < SHARD_CODES:
                shape[int(code)] //= self._setting.sizes[axis]
        return tuple(shape)

    def _choices(self, name: str) -> list[Choice]:
        return [self._rules[name].choices[at] for at in self._chosen[name]]

    def _outs(self, name: str, port: int) -> Row:
        return tuple(choice.outs[port] for choice in self._choices(name))

    def _to_shared_layout(self, name: str, x: Tensor, codes: Row) -> Tensor:
        node = layout_node(name)
        return self._exchange(x, codes, self._outs(node, 0)) if node in self._chosen else x

    def layout_of(self, name: str) -> Row:
        """Return the codes of the layout in which consumers find a value."""
        if layout_node(name) in self._chosen:
            return self._outs(layout_node(name), 0)
        if name in self._stored:
            return self._stored[name]
        step = self._producers[name]
        return self._outs(step.name, step.outputs.index(name))

    def _exchange(self, x: Tensor, source: Row, target: Row) -> Tensor:
        """Redistribute values from `source` to `target`, and later their gradient back."""
        a, b = np.array(source), np.array(target)
        through = np.where((value_placement(a) >= 0) & (value_placement(b) == PARTIAL), RR, a)
        if (through != a).any():
            # A parameter that is stored in shards is gathered before it becomes a partial sum.
            x, a = self._exchange(x, source, tuple(through.tolist())), through
        forward = (value_placement(a).tolist(), value_placement(b).tolist())
        backward = (gradient_placement(b).tolist(), gradient_placement(a).tolist())
        if forward[0] == forward[1] and (backward[0] == backward[1] or not x.requires_grad):
            return x
        if not x.requires_grad:
            return self._redistributor.redistribute(x, *forward)
        return redistribute_both_ways(x, self._redistributor, forward, backward)

    def _fetch(self, name: str, wanted: Row, values: Mapping[str, Tensor]) -> Tensor:
        """Return a value, or a view of one, in the layout that a consumer wants."""
        base, view = self._uses.base_of(name)
        if base in self._uses.constants:
            layout = _placements(self._uses.layouts[name][0])
            return self._redistributor.redistribute(values[name], layout, _placements(wanted))
        at_base, at_view = base_codes(self._setting.sizes, np.array([wanted]), view)
        codes: Row = tuple(at_base[0].tolist())
        x = self._exchange(values[base], self.layout_of(base), codes)
        for step in self._views(base, name):
            codes, x = self._view(step, codes, x)
        return x if at_view is None else self._exchange(x, tuple(at_view[0].tolist()), wanted)

    def _views(self, base: str, name: str) -> list[Step]:
        """Return the views between a value and what is read, in order."""
        views: list[Step] = []
        while name != base:
            step = self._producers[name]
            views.append(step)
            (name,) = step.inputs.values()
        return views[::-1]

    def _view(self, step: Step, codes: Row, x: Tensor) -> tuple[Row, Tensor]:
        """Return a view of this rank's shard, and its layout."""
        view = dim_map(Site(step, self._program))
        dims = view.dims if view else {}
        view_dims = {source: dim for dim, (source, _) in dims.items()}
        after = tuple(view_dims.get(code, code) if code < SHARD_CODES else code for code in codes)
        if is_reshape(step):
            return after, x.reshape(self.local_shape(step.outputs[0], after))
        return after, self._call(step, [x])[0]

    def _output(self, number: int, name: str, values: Mapping[str, Tensor]) -> Tensor:
        """Return an output in the layout that the caller expects.

        Where ranks have different samples, `rt.step` averages gradients over them, so each rank
        takes its share of the gradient here.
        """
        if name in self._uses.constants:
            return values[name]
        codes = tuple(choice.ins[0] for choice in self._choices(f"out:{number}"))
        x = self._fetch(name, codes, values)
        shares = math.prod(
            self._setting.sizes[axis] for axis, code in enumerate(codes) if code < SHARD_CODES
        )
        is_shared = shares > 1 and x.requires_grad
        return with_gradient_share(x, 1.0 / shares) if is_shared else x

    # Steps.

    def _run(self, step: Step, values: Mapping[str, Tensor]) -> list[Tensor]:
        if self._uses.constants.issuperset(step.outputs):
            return self._run_constant(step, values)
        choices = self._choices(step.name)
        ins = [
            self._fetch(name, tuple(choice.ins[port] for choice in choices), values)
            for port, name in enumerate(step.inputs.values())
        ]
        if step in self.step_rng:
            with self._mode(step):
                return [self._draw(step, tuple(choice.outs[0] for choice in choices), ins)]
        special = _SPECIAL.get(step.packet)
        if special is None:
            return self._call(step, ins, choices)
        with self._mode(step):
            return [special(self, step, choices, ins)]

    def _mode(self, step: Step) -> AbstractContextManager[Any]:
        """Return the context that the forward ran a step in."""
        return self._modes[step.name].entered() if step.name in self._modes else nullcontext()

    def _run_constant(self, step: Step, values: Mapping[str, Tensor]) -> list[Tensor]:
        """Run a step that depends on no parameter, in the layout that `Uses` gives it."""
        uses = self._uses
        replicated = (RR,) * len(self._setting.sizes)
        is_replicated = all((uses.layouts[name] == RR).all() for name in step.outputs)
        view = dim_map(Site(step, self._program))
        ins = []
        for name in step.inputs.values():
            layout = tuple(uses.layouts[name][0].tolist())
            is_local = view is not None or not is_replicated
            ins.append(values[name] if is_local else self._fetch(name, replicated, values))
            if view is not None:
                passed = {source for source, _ in view.dims.values()}
                at = tuple(c if c in passed or c >= SHARD_CODES else RR for c in layout)
                ins[-1] = self._redistributor.redistribute(
                    values[name], _placements(layout), _placements(at)
                )
        if view is not None and is_reshape(step):
            layout = tuple(uses.layouts[step.outputs[0]][0].tolist())
            return [ins[0].reshape(self.local_shape(step.outputs[0], layout))]
        if step in self.step_rng:
            return [self._draw(step, tuple(uses.layouts[step.outputs[0]][0].tolist()), ins)]
        if step.packet == "batch_norm":  # no choice reads its inputs as they are, so they are whole
            return [self.normalize(step, (), ins)]
        return self._call(step, ins)

    def _call(
        self, step: Step, ins: Sequence[Tensor], choices: Sequence[Choice] = ()
    ) -> list[Tensor]:
        """Run one operator on shards; arguments that are sizes become those of the shards."""
        target: Any = self._traced.nodes[step.name].target
        packet = step.packet
        if writes(packet):
            # Other consumers read the old values; `check` refuses those that would read the new.
            ins = [ins[0].clone(), *ins[1:]]
        args, kwargs = self._traced.arguments(step.name, dict(zip(step.inputs, ins, strict=True)))
        if packet in _SIZED and choices:
            outs = tuple(choice.outs[0] for choice in choices)
            args[1] = list(self.local_shape(step.outputs[0], outs))
        if grouped := [axis for axis, choice in enumerate(choices) if choice.name == "g"]:
            args[-1] //= math.prod(self._setting.sizes[axis] for axis in grouped)
        with self._mode(step):
            result: Any = target(*args, **kwargs)
        return tensors_in(result)[: len(step.outputs)]

    def ranks_of(self, choices: Sequence[Choice]) -> int:
        """Return the number of ranks over which a step's outputs are partial sums."""
        return math.prod(self._setting.sizes[axis] for axis in self.summed_axes(choices))

    def summed_axes(self, choices: Sequence[Choice]) -> list[int]:
        """Return the axes over which a step's outputs are partial sums."""
        return [
            axis
            for axis, choice in enumerate(choices)
            if choice.divides and choice.outs[0] >= SHARD_CODES
        ]

    # Operators that need more than local shards.

    def embed(self, step: Step, choices: Sequence[Choice], ins: Sequence[Tensor]) -> Tensor:
        """Look up the rows that this rank has; others are zero."""
        weight, indices = ins
        axes = [axis for axis, choice in enumerate(choices) if choice.name == "v"]
        if not axes:
            return self._call(step, ins, choices)[0]
        index = 0
        for axis in axes:
            index = index * self._setting.sizes[axis] + self._mesh.get_local_rank(axis)
        low = index * (rows := weight.shape[0])
        is_other = (indices < low) | (indices >= low + rows)
        padding = int(step.attrs.get("padding_idx", -1))
        found = functional.embedding(
            torch.where(is_other, 0, indices - low),
            weight,
            padding_idx=padding - low if low <= padding < low + rows else None,
        )
        return found.masked_fill(is_other.unsqueeze(-1), 0.0)

    def average(self, step: Step, choices: Sequence[Choice], ins: Sequence[Tensor]) -> Tensor:
        """Return this rank's share of a mean over all."""
        mean = self._call(step, ins, choices)[0]
        return mean / self.ranks_of(choices) if step.attrs.get("reduction", 1) == 1 else mean

    def cross_entropy(self, step: Step, choices: Sequence[Choice], ins: Sequence[Tensor]) -> Tensor:
        """Return this rank's share of the loss; the mean is over the targets that count."""
        axes = self.summed_axes(choices)
        if step.attrs.get("reduction", 1) != 1 or not axes or ins[1].is_floating_point():
            return self.average(step, choices, ins)
        ignored = int(step.attrs.get("ignore_index", -100))
        number = (ins[1] != ignored).sum().to(ins[0].dtype)
        source = [PARTIAL if axis in axes else REPLICATED for axis in range(self._mesh.ndim)]
        number = self._redistributor.redistribute(number, source, [REPLICATED] * len(source))
        return loss_sum(step, ins[0], ins[1], ignored) / number

    def normalize(self, step: Step, choices: Sequence[Choice], ins: Sequence[Tensor]) -> Tensor:
        """Normalize by the statistics of the global batch."""
        takes_batch = step.attrs["training"] and step.name not in self._left_out().evaluated
        return self._norms.run(step, ins, choices, is_training=takes_batch)

    def _left_out(self) -> Evaluation:
        """Return what this forward leaves out, if it is one of evaluation."""
        behaviour = None if self._model.training else self.behaviour
        return behaviour.evaluation if behaviour else Evaluation()

    def _draw(self, step: Step, codes: Row, ins: Sequence[Tensor]) -> Tensor:
        """Run a step that draws random numbers, whose output has the layout `codes`."""
        is_drop = draw_of(step) is DrawKind.DROP and not self._model.training
        is_off = is_drop or step.name in self._left_out().evaluated
        return self._draws.run(step, codes, ins, is_off=is_off)


def _placements(codes: IntArray | Row) -> list[int]:
    found: list[int] = value_placement(np.array(codes)).tolist()
    return found


_SIZED = frozenset(("expand", "broadcast_to"))
_Special = Callable[[Executor, Step, Sequence[Choice], Sequence[Tensor]], Tensor]
_SPECIAL: dict[str, _Special] = {
    "embedding": Executor.embed,
    "batch_norm": Executor.normalize,
    **dict.fromkeys(BY_CLASS, Executor.cross_entropy),
    **dict.fromkeys(AVERAGES, Executor.average),
}
