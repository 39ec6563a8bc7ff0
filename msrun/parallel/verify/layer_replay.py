"""One process computes the recorded calls of a layer again.

The problem.  Data-parallel ranks have parts of what one process would give a layer, and which dim
of a tensor has the samples is not known: the first or, with the sequence first, the second.

The idea.  A reading says how tensors of the ranks make those of one process: joined along the first
dim, along the second, or not at all, each rank's call by itself.  A layer is right if what the
ranks have agrees with what one process computes in the first or second reading.  If only the third
agrees, the layer mixes samples, or its tensors cannot be joined.

The gradients of a layer are linear in those of its outputs.  So one process gets the gradients of
all ranks, and a parameter the sum of theirs, of which the runtime has taken the mean.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from msrun.parallel.verify.comparison import Differences, beyond_rounding, find, measure
from msrun.parallel.verify.layer_record import LayerCall, floating, rebuilt
from msrun.parallel.verify.randomness import GeneratorStates
from msrun.parallel.verify.reference import CannotRunError, alone, first_line, give_memory

READINGS = (0, 1, None)


class RankCall(NamedTuple):
    """What one rank recorded of a call.

    Args:
        inputs: Tensors that the layer got.
        outputs: Tensors that it returned.
        of_inputs: Gradients of inputs; None for those without.
        of_outputs: Gradients of outputs; None for those without.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    of_inputs: list[Tensor | None]
    of_outputs: list[Tensor | None]


@dataclass(frozen=True, kw_only=True)
class LayerState:
    """A layer in a step, whole.

    Args:
        module: A copy without memory, with modes and attributes of the step.
        weights: Parameters by name.
        buffers: Buffers before and after the step.
        gradients: Of parameters that are compared, after the step.
        factor: Of gradients: what the runtime has scaled a sum over ranks by.
        calls: As rank 0 of the layer recorded them.
        ranks: The same of each rank.
        narrow: Type to which the runtime casts inputs and weights; None casts nothing.
        seen: Types that one process has computed in.
    """

    module: nn.Module
    weights: Mapping[str, Tensor]
    buffers: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    gradients: Mapping[str, Tensor]
    factor: float
    calls: Sequence[LayerCall]
    ranks: Sequence[Sequence[RankCall]]
    narrow: torch.dtype | None = None
    seen: set[torch.dtype] = field(default_factory=set)

    def cast(self, value: Tensor) -> Tensor:
        """Return an input in the type that one process gives the layer."""
        if value.dtype != self.narrow or not self.weights:
            return value
        return value.to(next(iter(self.weights.values())).dtype)


class _Form(NamedTuple):
    """How one process reads inputs: joined along a dim or not, and in which type."""

    reading: int | None
    cast: Callable[[Tensor], Tensor]


class Numbers(NamedTuple):
    """What is compared of a layer.

    Args:
        output: All outputs in one row.
        inputs: Gradients of inputs.
        gradients: Gradients of parameters.
        buffers: Buffers after the step.
    """

    output: Tensor
    inputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


class LayerGaps(NamedTuple):
    """How a layer compares.

    Args:
        output: Its output and gradients of parameters, and buffers.
        inputs: Gradients of its inputs.
        mixes: Whether each rank alone computes what it should.
    """

    output: Differences
    inputs: Differences
    mixes: bool = False

    @property
    def is_right(self) -> bool:
        """Whether nothing differs."""
        return not self.output and not self.inputs


def compare(
    state: LayerState, allowed: Callable[[Collection[torch.dtype]], float], device: torch.device
) -> LayerGaps:
    """Return how the step of a layer compares with what one process computes.

    Args:
        state: The layer.
        allowed: Returns the tolerance of gradients for the types that it computes in.
        device: Of this rank.

    Raises:
        CannotRunError: One process cannot compute it, or draws random numbers.
    """
    first: LayerGaps | None = None
    problem = ""
    for reading in READINGS if len(state.ranks) > 1 else (None,):
        try:
            found, expected = _found(state, reading), _replay(state, reading, device)
        except CannotRunError as error:
            problem = problem or str(error)
            continue
        outcome = _differences(found, expected, allowed(state.seen))
        if not outcome.is_right:
            with contextlib.suppress(CannotRunError):  # a layer may not compute in float64
                wide = _replay(state, reading, device, is_wide=True)
                outcome = _beyond_rounding(outcome, expected, wide)
        if outcome.is_right:
            is_mixed = reading is None and len(state.ranks) > 1
            return first._replace(mixes=True) if is_mixed and first else outcome
        first = first or outcome
    if first is None:
        raise CannotRunError(problem)
    return first


def _found(state: LayerState, reading: int | None) -> Numbers:
    """Return what the ranks have."""
    rows: list[Tensor] = []
    inputs: dict[str, Tensor] = {}
    for number, calls in enumerate(zip(*state.ranks, strict=True)):
        for each in _parts(calls, reading):
            rows += [value.double().reshape(-1) for value in _joined(each, "outputs", reading)]
        for index, gradients in enumerate(zip(*(call.of_inputs for call in calls), strict=True)):
            known = [gradient for gradient in gradients if gradient is not None]
            if len(known) == len(gradients):
                key = f"input {index + 1} of call {number + 1}"
                inputs |= _named(key, known, [call.inputs[index] for call in calls], calls, reading)
    buffers = {} if reading is None and len(state.ranks) > 1 else dict(state.buffers[1])
    return Numbers(torch.cat(rows), inputs, dict(state.gradients), buffers)


def _parts(calls: Sequence[RankCall], reading: int | None) -> list[Sequence[RankCall]]:
    """Return the calls that one process makes, each of the calls of ranks that it joins."""
    return [[call] for call in calls] if reading is None else [calls]


def _named(
    key: str,
    gradients: Sequence[Tensor],
    tensors: Sequence[Tensor],
    calls: Sequence[RankCall],
    reading: int | None,
) -> dict[str, Tensor]:
    if reading is None:
        return {f"{key} on rank {rank}": each for rank, each in enumerate(gradients)}
    if (dim := _cut_dim(tensors, calls, reading)) is not None:
        return {key: torch.cat(list(gradients), dim)}
    return {key: torch.stack(list(gradients)).sum(0)}


def _cut_dim(tensors: Sequence[Tensor], calls: Sequence[RankCall], reading: int) -> int | None:
    """Return the dim of which ranks have parts, by the sizes of the first input; None if none.

    A tensor may have its samples in the other dim, as the last states of a recurrent layer have.
    """
    firsts = [next((each for each in call.inputs if each.dim() > reading), None) for call in calls]
    sizes = [0 if first is None else first.size(reading) for first in firsts]
    for dim in (reading, 1 - reading):
        if not all(sizes) or any(tensor.dim() <= dim for tensor in tensors):
            continue
        counts = {t.size(dim) / size for t, size in zip(tensors, sizes, strict=True)}
        rest = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in tensors}
        most = max(counts)
        fits = most == 1 if dim != reading else most >= 1 and most == int(most)
        if len(counts) == len(rest) == 1 and fits:
            return dim
    return None


def _joined(calls: Sequence[RankCall], name: str, reading: int | None) -> list[Tensor]:
    """Return the inputs or outputs of one process in a call.

    Raises:
        CannotRunError: They cannot be joined.
    """
    result = []
    for index in range(len(getattr(calls[0], name))):
        tensors = [getattr(call, name)[index] for call in calls]
        if len(tensors) == 1 or reading is None:
            result.append(tensors[0])
        elif (dim := _cut_dim(tensors, calls, reading)) is not None:
            result.append(torch.cat(tensors, dim))
        elif len({tensor.shape for tensor in tensors}) > 1:
            raise CannotRunError("the tensors of ranks do not join")
        elif name == "outputs":
            result.append(torch.stack(tensors).mean(0))
        elif all(torch.equal(tensor, tensors[0]) for tensor in tensors):
            result.append(tensors[0])
        else:
            raise CannotRunError("ranks give it other tensors that have no samples")
    return result


def _replay(
    state: LayerState, reading: int | None, device: torch.device, *, is_wide: bool = False
) -> Numbers:
    """Compute the calls of a layer by plain torch."""
    module = _filled(state, device)
    if is_wide:
        module = module.double()
    rows: list[Tensor] = []
    inputs: dict[str, Tensor] = {}
    generators = GeneratorStates(device)
    try:
        for number, (own, calls) in enumerate(
            zip(state.calls, zip(*state.ranks, strict=True), strict=True)
        ):
            parts = _parts(calls, reading)
            for rank, part in enumerate(parts):
                key = f"input %d of call {number + 1}"
                key += f" on rank {rank}" if reading is None and len(calls) > 1 else ""
                seen = set() if is_wide else state.seen
                form = _Form(reading, state.cast if not is_wide else _wide)
                output, of_inputs = _call(module, own, part, form, seen)
                rows.append(output)
                inputs |= {key % (index + 1): gradient for index, gradient in of_inputs.items()}
        if not generators.is_equal(GeneratorStates(device)):
            raise CannotRunError("it draws random numbers")
    finally:
        generators.restore()
    gradients = {
        name: torch.zeros_like(param) if param.grad is None else param.grad * state.factor
        for name, param in module.named_parameters(remove_duplicate=False)
        if name in state.gradients
    }
    return Numbers(torch.cat(rows), inputs, gradients, dict(module.named_buffers()))


def _filled(state: LayerState, device: torch.device) -> nn.Module:
    """Return the layer with memory and the values before the step."""
    module = copy.deepcopy(state.module)
    give_memory(module, device)
    module.to(device)
    tensors = {**state.weights, **state.buffers[0]}
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    with torch.no_grad():
        for name, tensor in named:
            if name in tensors:
                tensor.copy_(tensors[name])
            elif tensor.numel():
                raise CannotRunError(f"{name} is not known where the layer is now")
    return module


def _call(
    module: nn.Module,
    own: LayerCall,
    part: Sequence[RankCall],
    form: _Form,
    seen: set[torch.dtype],
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the outputs of one call in a row, and gradients of its inputs.

    Args:
        module: The layer.
        own: The call as the first rank recorded it.
        part: The calls that make it.
        form: How inputs are read.
        seen: Gets the types that are computed in.
    """
    reading = form.reading
    leaves = []
    for tensor, is_trained in zip(_joined(part, "inputs", reading), own.trained, strict=True):
        leaves.append(form.cast(tensor).detach().clone().requires_grad_(is_trained))
    kind = leaves[0].device.type if leaves else "cpu"
    narrow = torch.autocast(kind, own.autocast) if own.autocast else contextlib.nullcontext()
    try:
        with alone(seen), torch.enable_grad():
            # Clones: a layer may write its inputs, which a leaf does not allow.
            args, kwargs = rebuilt(own, [leaf.clone() for leaf in leaves])
            with narrow:
                outputs = floating(module(*args, **kwargs))
            _backward(outputs, part, reading)
    except CannotRunError:
        raise
    except Exception as error:  # noqa: BLE001 - of the script's layer
        raise CannotRunError(f"one process cannot compute it: {first_line(error)}") from None
    row = torch.cat([each.detach().double().reshape(-1) for each in outputs])
    return row, {i: leaf.grad for i, leaf in enumerate(leaves) if leaf.grad is not None}


def _wide(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _backward(outputs: Sequence[Tensor], part: Sequence[RankCall], reading: int | None) -> None:
    """Run backward from the gradients that the outputs got on the ranks."""
    if [*map(len, (call.outputs for call in part))] != [len(outputs)] * len(part):
        raise CannotRunError("it returns another number of tensors when it is called again")
    total: Any = 0.0
    for index, value in enumerate(outputs):
        gradients = [
            torch.zeros_like(call.outputs[index]) if own is None else own
            for call in part
            for own in [call.of_outputs[index]]
        ]
        tensors = [call.outputs[index] for call in part]
        if len(part) == 1 or reading is None:
            gradient = gradients[0]
        elif (dim := _cut_dim(tensors, part, reading)) is not None:
            gradient = torch.cat(gradients, dim)
        else:
            gradient = torch.stack(gradients).sum(0)
        if gradient.shape != value.shape:
            raise CannotRunError(
                f"it returns a tensor of shape {tuple(value.shape)} in one process, and "
                f"{tuple(gradient.shape)} on the ranks"
            )
        if value.requires_grad:
            wide = torch.promote_types(value.dtype, torch.float32)
            total = total + (value.to(wide) * gradient.to(wide)).sum()
    if isinstance(total, Tensor):
        total.backward()


def _differences(found: Numbers, expected: Numbers, allowed: float) -> LayerGaps:
    none = measure("", torch.zeros(()), torch.zeros(()))

    def gaps(name: str) -> list[Any]:
        own, other = getattr(found, name), getattr(expected, name)
        return [measure(key, value, other[key]) for key, value in own.items() if key in other]

    output = measure("its output", found.output, expected.output)
    of_output = find(output, gaps("gradients"), gaps("buffers"), allowed)
    return LayerGaps(of_output, find(none, gaps("inputs"), [], allowed))


def _beyond_rounding(outcome: LayerGaps, narrow: Numbers, wide: Numbers) -> LayerGaps:
    """Return the differences that float64 does not explain by rounding."""

    def rounding(name: str) -> dict[str, Any]:
        own, exact = getattr(narrow, name), getattr(wide, name)
        return {key: measure(key, value, exact[key]) for key, value in own.items() if key in exact}

    output = measure("its output", narrow.output, wide.output)
    of_output = beyond_rounding(outcome.output, rounding("gradients") | rounding("buffers"), output)
    return LayerGaps(of_output, beyond_rounding(outcome.inputs, rounding("inputs"), output))
