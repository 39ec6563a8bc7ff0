"""Steps that draw random numbers, on shards: with the numbers of the full tensor.

Every rank draws the numbers of the full tensor from a generator of the step and takes those of its
shard, so the result is the same on any number of ranks and in any plan.  Numbers are drawn on the
CPU and converted, so devices of all kinds agree, too.

What an operator does with its numbers is written out, with the gradient that torch gives it.
`torch.bernoulli` and its like return zeros as the gradient of what they read, and so do the steps
here: a parameter whose gradient is zero is not one without a gradient.  Operators whose numbers
depend on the whole tensor run on it, on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msrun.parallel.auto.random_steps.step_rng import StepRng
from msrun.parallel.auto.redistribute import Redistributor
from msrun.parallel.auto.tracing.trace import Traced
from msrun.parallel.search.graph.axis_placement import REPLICATED, RR, value_placement
from msrun.parallel.search.graph.program import Step
from msrun.parallel.search.graph.random_ops import DrawKind, base_name, can_be_off, draw_of
from msrun.parallel.tensor.attention import dropped_attention

Row = tuple[int, ...]
# Of SELU: lambda times alpha.
_SELU = 1.7580993408473766
_SAMPLE_AND_CHANNEL = 2


class DrawingSteps:
    """Runs the steps of a program that draw random numbers.

    Args:
        traced: The program.
        rng: Of its numbers.
        redistributor: Of the mesh of the plan.

    Attributes:
        draws_in_evaluation: Whether a forward draws numbers outside of training, too.
    """

    def __init__(self, traced: Traced, rng: StepRng, redistributor: Redistributor) -> None:
        self._traced, self._rng, self._redistributor = traced, rng, redistributor
        steps = [step for step in traced.program.steps if step in rng]
        self.draws_in_evaluation = not all(map(can_be_off, steps))

    def run(self, step: Step, codes: Row, ins: Sequence[Tensor], *, is_off: bool) -> Tensor:
        """Return the output of `step` for this rank.

        Args:
            step: The step.
            codes: Layout of its output.
            ins: Its inputs, on this rank.
            is_off: Whether it draws nothing now, as dropout in evaluation.
        """
        match draw_of(step):
            case DrawKind.DROP:
                return ins[0] if is_off else self._drop(step, codes, ins[0])
            case DrawKind.ATTENTION:
                return self._attend(step, codes, ins, is_off=is_off)
            case DrawKind.SHAPE:
                made = self._like(step, self._part(self._drawn(step), codes))
                is_read = not step.packet.endswith("_like")
                return _without_gradient(made, ins) if is_read else made
            case DrawKind.VALUES:
                return self._compute(step, codes, ins, is_off=is_off)
        return self._run_whole(step, ins)

    # What is drawn.

    def _part(self, whole: Tensor, codes: Row) -> Tensor:
        """Return the shard that this rank has of a tensor that every rank has."""
        placements: list[int] = value_placement(np.array(codes)).tolist()
        return self._redistributor.redistribute(whole, [REPLICATED] * len(codes), placements)

    def _shape(self, step: Step) -> tuple[int, ...]:
        return self._traced.program.values[step.outputs[0]].shape

    def _like(self, step: Step, x: Tensor) -> Tensor:
        """Return `x` with type and device of the step's output."""
        like = self._traced.nodes[step.name].meta["val"]
        return x.to(like.device, like.dtype)

    def _drawn(self, step: Step) -> Tensor:
        """Return the output of a step whose numbers follow from shapes, for the full tensor."""
        generator, shape = self._rng.generator(step), self._shape(step)
        dtype, attrs = self._traced.dtypes[step.outputs[0]], step.attrs
        options: Any = {"generator": generator, "dtype": dtype, "device": "cpu"}
        match step.packet.removesuffix("_like"):
            case "rand":
                return torch.rand(shape, **options)
            case "randn":
                return torch.randn(shape, **options)
            case "randint":
                return torch.randint(attrs.get("low", 0), attrs["high"], shape, **options)
            case "randperm":
                return torch.randperm(*shape, **options)
        values = self._traced.program.values
        inputs = {
            slot: torch.empty(values[name].shape, dtype=self._traced.dtypes[name])
            for slot, name in step.inputs.items()
        }
        return self._call(step, inputs, generator)

    def _call(self, step: Step, inputs: dict[str, Tensor], generator: torch.Generator) -> Tensor:
        """Run the operator of a step on whole tensors of the CPU."""
        target: Any = self._traced.nodes[step.name].target
        args, kwargs = self._traced.arguments(step.name, inputs)
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        result: Tensor = target(*args, **{**kwargs, "generator": generator})
        return result

    def _uniform(self, step: Step, codes: Row, device: torch.device) -> Tensor:
        """Return numbers between 0 and 1, one for each element of the shard."""
        whole = torch.rand(self._shape(step), generator=self._rng.generator(step))
        return self._part(whole, codes).to(device)

    def _mask(self, step: Step, shape: Sequence[int], codes: Row, keep: float) -> Tensor:
        """Return this rank's part of a mask of `shape`: 1 with probability `keep`."""
        mask = torch.empty(shape).bernoulli_(keep, generator=self._rng.generator(step))
        return self._part(mask, codes)

    # What comes of it.

    def _drop(self, step: Step, codes: Row, x: Tensor) -> Tensor:
        """Drop elements, or channels, of a shard."""
        rate, shape = float(step.attrs.get("p", 0.5)), list(self._shape(step))
        if rate == 1:
            return x * 0
        if "feature" in step.packet:
            # One number for each channel of a sample.
            shape[_SAMPLE_AND_CHANNEL:] = [1] * (len(shape) - _SAMPLE_AND_CHANNEL)
            codes = tuple(c if c < _SAMPLE_AND_CHANNEL else RR for c in codes)
        mask = self._mask(step, shape, codes, 1 - rate).to(x)
        if "alpha" not in step.packet:
            return x * mask.div(1 - rate)
        scale = 1 / math.sqrt((_SELU**2 * rate + 1) * (1 - rate))
        return x * (mask * scale) + ((mask - 1) * (_SELU * scale) + _SELU * scale * rate)

    def _attend(self, step: Step, codes: Row, ins: Sequence[Tensor], *, is_off: bool) -> Tensor:
        """Run attention whose weights are dropped."""
        given = dict(zip(step.inputs, ins, strict=True))
        query, key = (self._traced.program.values[step.inputs[n]].shape for n in ("query", "key"))
        rate = 0.0 if is_off else float(step.attrs["dropout_p"])
        shape = (*query[:-1], key[-2])

        def drop(weights: Tensor) -> Tensor:
            if rate == 1:
                return weights * 0
            return weights * self._mask(step, shape, codes, 1 - rate).to(weights).div(1 - rate)

        attrs = step.attrs
        return dropped_attention(
            drop if rate else lambda weights: weights,
            (given["query"], given["key"], given["value"]),
            given.get("attn_mask"),
            is_causal=bool(attrs.get("is_causal")),
            scale=attrs.get("scale"),
        )

    def _compute(self, step: Step, codes: Row, ins: Sequence[Tensor], *, is_off: bool) -> Tensor:
        """Run a step that makes one number of each element and what is drawn for it."""
        attrs, name = step.attrs, base_name(step.packet)
        if name == "rrelu":
            low, high = (float(attrs.get(side, d)) for side, d in _SLOPES)
            slope: Any = (low + high) / 2
            if attrs.get("training") and not is_off:
                slope = self._uniform(step, codes, ins[0].device) * (high - low) + low
                slope = slope.to(ins[0].dtype)
            return torch.where(ins[0] > 0, ins[0], ins[0] * slope)
        if name == "bernoulli":
            made = self._uniform(step, codes, ins[-1].device) < ins[-1]
        else:
            given: dict[str, Any] = attrs | dict(zip(step.inputs, ins, strict=True))
            mean, std = given["mean"], given["std"]
            whole = torch.randn(self._shape(step), generator=self._rng.generator(step))
            made = mean + self._like(step, self._part(whole, codes)) * std
        return _without_gradient(self._like(step, made), ins)

    def _run_whole(self, step: Step, ins: Sequence[Tensor]) -> Tensor:
        """Run a step whose numbers depend on all elements, on whole tensors."""
        inputs = {slot: x.cpu() for slot, x in zip(step.inputs, ins, strict=True)}
        return self._like(step, self._call(step, inputs, self._rng.generator(step)))


_SLOPES = (("lower", 1 / 8), ("upper", 1 / 3))


class _ZeroGradientFunction(torch.autograd.Function):
    """Returns the first tensor; the gradient of the others is zero."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, *read: Tensor) -> Tensor:
        """Return `made`."""
        ctx.read = [(x.shape, x.dtype) for x in read]
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return zeros."""
        zeros = [gradient.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.read]
        return (None, *zeros)


def _without_gradient(made: Tensor, read: Sequence[Tensor]) -> Tensor:
    """Return `made`, with zeros as the gradient of what was read for it."""
    result: Tensor = _ZeroGradientFunction.apply(made, *read)  # type: ignore[no-untyped-call]
    return result
