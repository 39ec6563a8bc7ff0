"""Runs a plan: every operator on this rank's parts, and redistribution between them.

The steps are those of the traced forward; each gets its inputs in the layout that its strategy
wants, and the gradients come back in theirs.  Parameters keep the placement at which they are
stored, as `DTensor`, so optimizers and checkpoints know them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import Parameter, functional
from torch.utils.checkpoint import checkpoint

from msrun.errors import UsageError
from msrun.parallel.auto.dropout_rng import DropoutRng
from msrun.parallel.auto.redistribute import RedistributeFunction, Redistributor
from msrun.parallel.auto.trace import Traced
from msrun.parallel.search.graph.axis_placement import (
    PARTIAL,
    RR,
    RZ,
    SHARD_CODES,
    IntArray,
    gradient_placement,
    value_placement,
)
from msrun.parallel.search.graph.program import Step
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
    """The forward of a model under a plan, or of one stage of it.

    Args:
        model: Whose forward it is; of a stage, with what the stage holds.
        traced: Its steps, for the whole batch.
        rules: Node -> its rule.
        chosen: Node -> its choice on every axis.
        setting: What the plan is for.
        mesh: Its axes are those of the plan.
        seed: Of the numbers that dropout draws, the same on every rank.
        blocks: Whose values are computed again in the backward pass; None keeps all.
        part: What the stage runs; None is all.

    Attributes:
        dropout_rng: What dropout draws.
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
        blocks: Blocks | None = None,
        part: Part | None = None,
    ) -> None:
        self._model, self._traced, self._chosen = model, traced, chosen
        self._program, self._setting, self._mesh = traced.program, setting, mesh
        self._rules = dict(rules)
        check(self._program)
        self._redistributor = Redistributor(mesh)
        self._uses = Uses(self._program, setting, traced.rules)
        self._part = part or divide(self._program, self._uses, [0])[0]
        self._makers = {name: step for step in self._program.steps for name in step.outputs}
        self.dropout_rng = DropoutRng(self._program, seed)
        self._blocks = blocks
        self._stored: dict[str, Row] = {}
        self._divide()

    # Parameters.

    def _divide(self) -> None:
        """Give every module its part of each parameter."""
        owners = dict(self._model.named_parameters(remove_duplicate=False))
        modules = dict(self._model.named_modules())
        for value, full in self._program.params.items():
            if value not in self._part.params:
                continue
            param = owners[full]
            row = self._chosen.get(value)
            codes = [RR] * self._mesh.ndim
            if row is not None:
                codes = [self._rules[value].choices[at].outs[0] for at in row]
            self._stored[value] = stored = tuple(self._at_rest(codes, tuple(param.shape)))
            if isinstance(param, DTensor):
                continue  # another chunk of this stage has it too
            placed = [Shard(code) if code < SHARD_CODES else Replicate() for code in stored]
            # Every rank has the same values: nothing need be sent.
            part = distribute_tensor(param.data, self._mesh, placed, src_data_rank=None)
            made = Parameter(part, requires_grad=param.requires_grad)
            for name, tensor in owners.items():
                if tensor is param:
                    module, _, own = name.rpartition(".")
                    setattr(modules[module], own, made)

    def _at_rest(self, codes: Sequence[int], shape: tuple[int, ...]) -> list[int]:
        """Return where a parameter lies between steps: with its state cut, it is cut too.

        By a dim that no other axis cuts, so that it is gathered alone; where there is none, state
        and parameter stay whole on that axis.
        """
        found = [RR if code == RZ else code for code in codes]
        for axis, code in enumerate(codes):
            size = self._mesh.size(axis)
            free = [d for d, n in enumerate(shape) if d not in found and n % size == 0]
            if code == RZ and free and size > 1:
                found[axis] = free[0]
        return found

    # Forward.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns, of this rank's batch.

        A stage also takes what it is handed, behind the inputs, and but for the last one returns
        what it hands on.
        """
        if self._model.training:
            self.dropout_rng.begin()
        part = self._part
        own = len(args) - len(part.received)
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
        if part.sent is not None:
            return tuple(values[name] for name in part.sent)
        outputs = [self._give(at, name, values) for at, name in enumerate(self._program.outputs)]
        return self._traced.rebuild(outputs)

    def _spans(self) -> Iterator[tuple[Sequence[Step], str | None]]:
        """Yield runs of steps, with the one value that a block hands on.

        What no parameter has a part in is made before, as later blocks may read it too.
        """
        blocks, constants = self._blocks, self._uses.constants
        inside = blocks.block_of(self._program) if blocks else {}

        def block(step: Step) -> int | None:
            return None if constants.issuperset(step.outputs) else inside.get(step.name)

        for number, steps in groupby(self._part.steps, block):
            yield list(steps), None if blocks is None or number is None else blocks.cuts[number]

    def _run_all(self, steps: Iterable[Step], values: dict[str, Tensor]) -> None:
        """Add what `steps` make to `values`."""
        for step in steps:
            made = self._run(step, values)
            is_constant = self._uses.constants.issuperset(step.outputs)
            for port, (name, x) in enumerate(zip(step.outputs, made, strict=True)):
                codes = () if is_constant else self._outs(step.name, port)
                values[name] = x if is_constant else self._to_shared_layout(name, x, codes)

    def _run_block(self, steps: Sequence[Step], cut: str, values: dict[str, Tensor]) -> None:
        """Add what a block hands on, and keep what it is given for computing the rest again."""
        given, drawn = dict(values), self.dropout_rng.state

        def run() -> Tensor:
            inside = dict(given)
            with self.dropout_rng.again(drawn):
                self._run_all(steps, inside)
            return inside[cut]

        values[cut] = checkpoint(run, use_reentrant=False, preserve_rng_state=False)

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the inputs by the names of their values.

        Raises:
            UsageError: They are not like those of the sample.
        """
        given = self._traced.bind(args, kwargs)
        values = {name: x for name, x in given.items() if name in self._program.values}
        for name, x in values.items():
            shape = self.local_shape(name, self._uses.layouts[name][0])
            if tuple(x.shape) != shape:
                raise UsageError(
                    f"an input of shape {list(x.shape)} came where the plan of parallel.mode "
                    f"auto has {list(shape)}",
                    hint="give rt.shard a sample like every batch, and drop the last one",
                )
        return values

    def local_shape(self, name: str, codes: IntArray | Row) -> tuple[int, ...]:
        """Return the shape of this rank's part of a value that lies as `codes` says."""
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
        hub = layout_node(name)
        return self._exchange(x, codes, self._outs(hub, 0)) if hub in self._chosen else x

    def lies(self, name: str) -> Row:
        """Return the codes at which readers find a value."""
        if layout_node(name) in self._chosen:
            return self._outs(layout_node(name), 0)
        if name in self._stored:
            return self._stored[name]
        step = self._makers[name]
        return self._outs(step.name, step.outputs.index(name))

    def _exchange(self, x: Tensor, source: Row, target: Row) -> Tensor:
        """Carry values from `source` to `target`, and later their gradient back."""
        a, b = np.array(source), np.array(target)
        through = np.where((value_placement(a) >= 0) & (value_placement(b) == PARTIAL), RR, a)
        if (through != a).any():
            # What is stored in parts for its state's sake is whole before it is a sum.
            x, a = self._exchange(x, source, tuple(through.tolist())), through
        ahead = (value_placement(a).tolist(), value_placement(b).tolist())
        back = (gradient_placement(b).tolist(), gradient_placement(a).tolist())
        if ahead[0] == ahead[1] and (back[0] == back[1] or not x.requires_grad):
            return x
        if not x.requires_grad:
            return self._redistributor.redistribute(x, *ahead)
        moved: Tensor = _apply(RedistributeFunction, x, self._redistributor, ahead, back)
        return moved

    def _fetch(self, name: str, wanted: Row, values: Mapping[str, Tensor]) -> Tensor:
        """Return a value, or a view of one, as a reader wants it."""
        root, view = self._uses.base_of(name)
        if root in self._uses.constants:
            layout = value_placement(self._uses.layouts[name][0]).tolist()
            return self._redistributor.redistribute(
                values[name], layout, value_placement(np.array(wanted)).tolist()
            )
        at_root, seen = base_codes(self._setting.sizes, np.array([wanted]), view)
        codes: Row = tuple(at_root[0].tolist())
        x = self._exchange(values[root], self.lies(root), codes)
        for step in self._views(root, name):
            codes, x = self._look(step, codes, x)
        return x if seen is None else self._exchange(x, tuple(seen[0].tolist()), wanted)

    def _views(self, root: str, name: str) -> list[Step]:
        """Return the views between a value and what is read, in order."""
        found: list[Step] = []
        while name != root:
            step = self._makers[name]
            found.append(step)
            (name,) = step.inputs.values()
        return found[::-1]

    def _look(self, step: Step, codes: Row, x: Tensor) -> tuple[Row, Tensor]:
        """Return a view of this rank's part, and how it lies."""
        view = dim_map(Site(step, self._program))
        dims = view.dims if view else {}
        back = {source: dim for dim, (source, _) in dims.items()}
        after = tuple(back.get(code, code) if code < SHARD_CODES else code for code in codes)
        if is_reshape(step):
            return after, x.reshape(self.local_shape(step.outputs[0], after))
        return after, self._call(step, [x])[0]

    def _give(self, number: int, name: str, values: Mapping[str, Tensor]) -> Tensor:
        """Return an output as the caller expects it.

        Where ranks have different samples, their losses are averaged, so gradients come in shares.
        """
        if name in self._uses.constants:
            return values[name]
        codes = tuple(choice.ins[0] for choice in self._choices(f"out:{number}"))
        x = self._fetch(name, codes, values)
        shares = math.prod(
            self._setting.sizes[axis] for axis, code in enumerate(codes) if code < SHARD_CODES
        )
        is_shared = shares > 1 and x.requires_grad
        given: Tensor = _apply(_Shared, x, 1.0 / shares) if is_shared else x
        return given

    # Steps.

    def _run(self, step: Step, values: Mapping[str, Tensor]) -> list[Tensor]:
        names = list(step.inputs.values())
        if self._uses.constants.issuperset(step.outputs):
            return self._derive(step, values)
        choices = self._choices(step.name)
        ins = [
            self._fetch(name, tuple(choice.ins[port] for choice in choices), values)
            for port, name in enumerate(names)
        ]
        special = _SPECIAL.get(_packet(step))
        if special:
            return [special(self, step, choices, ins)]
        return self._call(step, ins, choices)

    def _derive(self, step: Step, values: Mapping[str, Tensor]) -> list[Tensor]:
        """Run a step on what no parameter has a part in."""
        uses = self._uses
        whole = (RR,) * len(self._setting.sizes)
        is_whole = all((uses.layouts[name] == RR).all() for name in step.outputs)
        view = dim_map(Site(step, self._program))
        ins = []
        for name in step.inputs.values():
            layout = tuple(uses.layouts[name][0].tolist())
            is_kept = view is not None or not is_whole
            ins.append(values[name] if is_kept else self._fetch(name, whole, values))
            if view is not None:
                kept = {source for source, _ in view.dims.values()}
                at = tuple(c if c in kept or c >= SHARD_CODES else RR for c in layout)
                ins[-1] = self._redistributor.redistribute(
                    values[name],
                    value_placement(np.array(layout)).tolist(),
                    value_placement(np.array(at)).tolist(),
                )
        if view is not None and is_reshape(step):
            layout = tuple(uses.layouts[step.outputs[0]][0].tolist())
            return [ins[0].reshape(self.local_shape(step.outputs[0], layout))]
        if step in self.dropout_rng:
            return [self._drop(step, tuple(uses.layouts[step.outputs[0]][0].tolist()), ins[0])]
        return self._call(step, ins)

    def _call(
        self, step: Step, ins: Sequence[Tensor], choices: Sequence[Choice] = ()
    ) -> list[Tensor]:
        """Run one operator on parts; arguments that are sizes become those of the parts."""
        target: Any = self._traced.nodes[step.name].target
        packet = _packet(step)
        if writes(packet):
            # What others read stays as it is; `check` has seen to what reads the result.
            ins = [ins[0].clone(), *ins[1:]]
        args, kwargs = self._traced.arguments(step.name, dict(zip(step.inputs, ins, strict=True)))
        if packet in _SIZED and choices:
            outs = tuple(choice.outs[0] for choice in choices)
            args[1] = list(self.local_shape(step.outputs[0], outs))
        grouped = [axis for axis, choice in enumerate(choices) if choice.name == "g"]
        if grouped:
            args[-1] //= math.prod(self._setting.sizes[axis] for axis in grouped)
        made: Any = target(*args, **kwargs)
        found = list(made) if isinstance(made, tuple | list) else [made]
        return [x for x in found if isinstance(x, Tensor)][: len(step.outputs)]

    def ranks_of(self, choices: Sequence[Choice]) -> int:
        """Return among how many ranks a step's work is divided so that its outputs are sums."""
        return math.prod(
            self._setting.sizes[axis]
            for axis, choice in enumerate(choices)
            if choice.divides and choice.outs[0] >= SHARD_CODES
        )

    def summed_axes(self, choices: Sequence[Choice]) -> list[int]:
        """Return the axes among whose ranks a step's outputs are sums."""
        return [
            axis
            for axis, choice in enumerate(choices)
            if choice.divides and choice.outs[0] >= SHARD_CODES
        ]

    # Operators that parts do not know all about.

    def embed(self, step: Step, choices: Sequence[Choice], ins: Sequence[Tensor]) -> Tensor:
        """Look up the rows that this rank has; others are zero."""
        weight, indices = ins
        axes = [axis for axis, choice in enumerate(choices) if choice.name == "v"]
        if not axes:
            return self._call(step, ins, choices)[0]
        index = 0
        for axis in axes:
            index = index * self._setting.sizes[axis] + self._mesh.get_local_rank(axis)
        count = weight.shape[0]
        low = index * count
        is_other = (indices < low) | (indices >= low + count)
        padding = int(step.attrs.get("padding_idx", -1))
        rows = functional.embedding(
            torch.where(is_other, 0, indices - low),
            weight,
            padding_idx=padding - low if low <= padding < low + count else None,
        )
        return rows.masked_fill(is_other.unsqueeze(-1), 0.0)

    def average(self, step: Step, choices: Sequence[Choice], ins: Sequence[Tensor]) -> Tensor:
        """Return this rank's share of a mean over all."""
        made = self._call(step, ins, choices)[0]
        is_mean = step.attrs.get("reduction", 1) == 1
        return made / self.ranks_of(choices) if is_mean else made

    def cross_entropy(self, step: Step, choices: Sequence[Choice], ins: Sequence[Tensor]) -> Tensor:
        """Return this rank's share of the loss; the mean is over the targets that count."""
        axes = self.summed_axes(choices)
        by_class = not ins[1].is_floating_point()
        if step.attrs.get("reduction", 1) != 1 or not axes or not by_class:
            return self.average(step, choices, ins)
        attrs = step.attrs
        ignored = int(attrs.get("ignore_index", -100))
        count = (ins[1] != ignored).sum().to(ins[0].dtype)
        source = [-2 if axis in axes else -1 for axis in range(self._mesh.ndim)]
        count = self._redistributor.redistribute(count, source, [-1] * self._mesh.ndim)
        options = {"ignore_index": ignored, "reduction": "sum"}
        if _packet(step) == "cross_entropy_loss":
            smoothing = float(attrs.get("label_smoothing", 0.0))
            return (
                functional.cross_entropy(
                    ins[0],
                    ins[1],
                    label_smoothing=smoothing,
                    **options,  # type: ignore[arg-type]
                )
                / count
            )
        return functional.nll_loss(ins[0], ins[1], **options) / count  # type: ignore[arg-type]

    def drop(self, step: Step, choices: Sequence[Choice], ins: Sequence[Tensor]) -> Tensor:
        """Drop what one process would."""
        return self._drop(step, tuple(choice.outs[0] for choice in choices), ins[0])

    def _drop(self, step: Step, codes: Row, x: Tensor) -> Tensor:
        """Drop from a part that lies as `codes` says: all ranks draw the whole mask."""
        if not self._model.training:
            return x
        whole, parts = [-1] * self._mesh.ndim, value_placement(np.array(codes)).tolist()
        keep = 1 - float(step.attrs.get("p", 0.5))
        return x * self._redistributor.redistribute(
            self.dropout_rng.mask(step, keep), whole, parts
        ).to(x).div(keep)


class _Shared(torch.autograd.Function):
    """The identity, whose gradient is one of several shares."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        """Hand `x` on."""
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Take the share."""
        return gradient * ctx.share, None


def _packet(step: Step) -> str:
    return step.target.split(".")[1]


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)


_SIZED = frozenset(("expand", "broadcast_to"))
_Special = Callable[[Executor, Step, Sequence[Choice], Sequence[Tensor]], Tensor]
_SPECIAL: dict[str, _Special] = {
    "embedding": Executor.embed,
    "dropout": Executor.drop,
    **dict.fromkeys(BY_CLASS, Executor.cross_entropy),
    **dict.fromkeys(AVERAGES, Executor.average),
}
