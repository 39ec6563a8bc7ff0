"""What each operator's work can be divided by: its factors, the loops over its tensors' dims.

A rule labels the dims of inputs and outputs.  Dividing a label cuts every tensor that has it; an
input without it stays whole and has a partial gradient, an output without it is a partial sum.
So one table gives forward and backward.  An operator without a rule runs whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from msrun.parallel.search.graph.axis_placement import PR, RP, RR, SHARD_CODES
from msrun.parallel.search.graph.program import Program, Step, Value

Labels = Sequence[str | None]


class Choice(msgspec.Struct, frozen=True):
    """What one mesh axis can do for an operator.

    Args:
        name: The label that is divided; `R` nothing, `P` sums pass through.
        size: All that divide it must divide this number; 0 is no limit.
        ins: Code of each input.
        outs: Code of each output.
        divides: Whether there is less work for each rank.
        summed: Bytes that its ranks sum on the way, in each pass.
    """

    name: str
    size: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    divides: bool
    summed: int = 0


class ShardingRule(msgspec.Struct, frozen=True, kw_only=True):
    """How an operator can be divided, and what it costs whole.

    Args:
        choices: What one axis can do; the first is `R`.
        flops: Operations of matrix products.
        nbytes: Bytes that are read and written.
        backward: Work of the backward pass, as a multiple of the forward pass.
        keeps: Inputs that the backward pass needs.
        saves_outputs: Whether it needs the outputs.
        known: Whether there is a rule at all.
    """

    choices: tuple[Choice, ...]
    flops: float = 0.0
    nbytes: float = 0.0
    backward: float = 1.0
    saved_inputs: tuple[int, ...] = ()
    saves_outputs: bool = False
    known: bool = True


class Site:
    """One step with its tensors at hand.

    Args:
        step: The step.
        program: That it stands in.
    """

    def __init__(self, step: Step, program: Program) -> None:
        self.step = step
        self.packet = step.target.split(".")[1] if "." in step.target else step.target
        self.slots = list(step.inputs)
        self.ins: list[Value] = [program.values[name] for name in step.inputs.values()]
        self.outs: list[Value] = [program.values[name] for name in step.outputs]

    @property
    def out(self) -> Value:
        """The first output."""
        return self.outs[0]

    def signature(self) -> tuple[object, ...]:
        """Return what rule and costs follow from."""
        return (
            self.step.target,
            tuple(self.slots),
            tuple((value.shape, value.itemsize) for value in self.ins),
            tuple((value.shape, value.itemsize) for value in self.outs),
            repr(self.step.attrs),
        )

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an argument that is no tensor."""
        return self.step.attrs.get(name, default)

    def dim(self, name: str = "dim", default: int = -1) -> int:
        """Return an argument that is a dim of the first input, not negative."""
        return int(self.attr(name, default)) % max(1, len(self.ins[0].shape))

    def dims(self, name: str = "dim") -> set[int]:
        """Return an argument that is several dims; none of them means all."""
        ndim = len(self.ins[0].shape)
        given = self.attr(name)
        if given is None or given == []:
            return set(range(ndim))
        return {int(dim) % ndim for dim in ([given] if isinstance(given, int) else given)}


def letters(count: int, prefix: str = "d") -> list[str | None]:
    """Return a label for each of `count` dims."""
    return [f"{prefix}{index}" for index in range(count)]


def divided(
    site: Site,
    ins: Sequence[Labels],
    outs: Sequence[Labels],
    *,
    linear: Sequence[Sequence[int]] = (),
    added: Sequence[int] = (),
    whole: Sequence[str] = (),
    limits: Mapping[str, int] = MappingProxyType({}),
    summed: Mapping[str, int] = MappingProxyType({}),
    **costs: Any,
) -> ShardingRule:
    """Return the rule of an operator whose tensors have these labels.

    Args:
        site: The operator.
        ins: Label of each dim of each input; None is never divided.
        outs: As `ins`, of the outputs.
        linear: Inputs in which the operator is linear, together; sums pass through them.
        added: Inputs that are added to a sum over labels they do not have.
        whole: Labels that may not be divided.
        limits: Label -> what its parts must divide besides the sizes of its dims.
        summed: Label -> bytes that the ranks which divide it sum on the way.
        costs: As of `ShardingRule`.
    """
    tensors = [*zip(site.ins, ins, strict=True), *zip(site.outs, outs, strict=True)]
    sizes: dict[str, int] = dict(limits)
    for value, labels in tensors:
        for size, label in zip(value.shape, labels, strict=True):
            if label is not None and label not in whole:
                sizes[label] = math.gcd(sizes.get(label, 0), size)
    choices = [_whole_choice(site)]
    for label, size in sizes.items():
        dims = [list(labels).index(label) if label in labels else -1 for _, labels in tensors]
        if size == 1 or any(dim >= SHARD_CODES for dim in dims):
            continue
        is_summed = all(dim < 0 for dim in dims[len(ins) :])
        codes = [dim if dim >= 0 else RP for dim in dims[: len(ins)]]
        if is_summed:
            codes = [PR if index in added else code for index, code in enumerate(codes)]
        out = tuple(dim if dim >= 0 else PR for dim in dims[len(ins) :])
        inside = summed.get(label, 0)
        choices.append(Choice(label, size, tuple(codes), out, divides=True, summed=inside))
    for index, group in enumerate(linear):
        through = tuple(PR if at in group else RP for at in range(len(ins)))
        name = "P" if not index else f"P{index}"
        choices.append(Choice(name, 0, through, (PR,) * len(outs), divides=False))
    costs.setdefault("nbytes", float(sum(value.nbytes for value, _ in tensors)))
    return ShardingRule(choices=tuple(choices), **costs)


def _whole_choice(site: Site) -> Choice:
    return Choice("R", 0, (RR,) * len(site.ins), (RR,) * len(site.outs), divides=False)


def layout_rule(value: Value) -> ShardingRule:
    """Return the rule of a tensor that several operators read: it moves once for all of them."""
    dims = [dim for dim, size in enumerate(value.shape[:SHARD_CODES]) if size > 1]
    choices = [
        Choice("R", 0, (RR,), (RR,), divides=False),
        Choice("RP", 0, (RP,), (RP,), divides=False),
        *(Choice(f"d{dim}", value.shape[dim], (dim,), (dim,), divides=False) for dim in dims),
    ]
    return ShardingRule(choices=tuple(choices))


def unknown(site: Site) -> ShardingRule:
    """Return the rule of an operator that we know nothing of."""
    nbytes = float(sum(value.nbytes for value in (*site.ins, *site.outs)))
    saved = tuple(range(len(site.ins)))
    return ShardingRule(
        choices=(_whole_choice(site),), nbytes=nbytes, saved_inputs=saved, known=False
    )


def broadcast(shape: Sequence[int], out: Sequence[int]) -> list[str | None]:
    """Return the labels of a tensor of `shape` in an elementwise operator over `out`."""
    offset = len(out) - len(shape)
    return [
        f"d{offset + dim}" if size == out[offset + dim] and size > 1 else None
        for dim, size in enumerate(shape)
    ]
