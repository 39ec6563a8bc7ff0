"""Sharding rules: along which loops an operator's work can be split, and what follows for tensors.

A rule labels the dims of inputs and outputs like an einsum does: a label is a loop over the dims
that carry it.  `linear(x, w, b)` is `b0 k, n k, n -> b0 n`.  Splitting one label over a mesh axis
fixes the placement of every tensor, in both passes:

- A tensor with the label is sharded by that dim, and so is its gradient.
- An input without it is replicated, and its gradient is a partial sum (`RP`).
- An output without it is a partial sum, whose gradient is replicated (`PR`): the label is summed.

Where an operator is linear in some inputs, a partial sum also passes through without being reduced:
that is a choice named `P`.  The choice `R` replicates all work, and it is the only one of operators
without a rule.  A label is split only into parts that divide every dim with that label.

Every choice of every rule is run on two ranks against one process, values and gradients, in
`tests/torch/auto/test_auto_rules.py`.  That found rules which were wrong: flip and roll along the
dim they move, pad that shifts, embeddings whose gradients are scaled, sums through what rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from msrun.parallel.search.graph.axis_placement import PR, RP, RR, RZ, SHARD_CODES
from msrun.parallel.search.graph.program import Program, Step, Value

Labels = Sequence[str | None]


class Choice(msgspec.Struct, frozen=True):
    """What one mesh axis can do for an operator.

    Args:
        name: The label that is split; `R` for none, `P` where partial sums pass through.
        size: The product of the axes that split it must divide this number; 0 is no limit.
        ins: Code of each input.
        outs: Code of each output.
        divides: Whether each rank has less work.
        summed: Bytes that an all-reduce inside the operator takes, in each pass.
    """

    name: str
    size: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    divides: bool
    summed: int = 0


class ShardingRule(msgspec.Struct, frozen=True, kw_only=True):
    """How an operator's work can be split, and what it costs on one rank.

    Args:
        choices: What one axis can do; the first is `R`.
        flops: Operations of matrix products.
        nbytes: Bytes that are read and written.
        backward: Work of the backward pass, as a multiple of the forward pass.
        saved_inputs: Numbers of the inputs that the backward pass needs.
        saves_outputs: Whether it needs the outputs.
        saved_inside: Bytes that it needs besides; they are divided like its first output.
        known: Whether there is a rule at all.
    """

    choices: tuple[Choice, ...]
    flops: float = 0.0
    nbytes: float = 0.0
    backward: float = 1.0
    saved_inputs: tuple[int, ...] = ()
    saves_outputs: bool = False
    saved_inside: int = 0
    known: bool = True


class Site:
    """One step of a program with its tensors.

    Args:
        step: The step.
        program: Of the step.
    """

    def __init__(self, step: Step, program: Program) -> None:
        self.step = step
        self.packet = step.packet
        self.slots = list(step.inputs)
        self.ins: list[Value] = [program.values[name] for name in step.inputs.values()]
        self.outs: list[Value] = [program.values[name] for name in step.outputs]

    @property
    def out(self) -> Value:
        """The first output."""
        return self.outs[0]

    def signature(self) -> tuple[object, ...]:
        """Return all that rule and costs follow from."""
        return (
            self.step.target,
            tuple(self.slots),
            tuple((value.shape, value.itemsize) for value in self.ins),
            tuple((value.shape, value.itemsize) for value in self.outs),
            repr(self.step.attrs),
        )

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an argument that is not a tensor."""
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


def dim_labels(count: int, prefix: str = "d") -> list[str | None]:
    """Return a label for each of `count` dims."""
    return [f"{prefix}{index}" for index in range(count)]


def split_by_labels(
    site: Site,
    ins: Sequence[Labels],
    outs: Sequence[Labels],
    *,
    linear: Sequence[Sequence[int]] = (),
    added: Sequence[int] = (),
    unsplit: Sequence[str] = (),
    limits: Mapping[str, int] = MappingProxyType({}),
    summed: Mapping[str, int] = MappingProxyType({}),
    **costs: Any,
) -> ShardingRule:
    """Return the rule of an operator whose tensors have these labels.

    Args:
        site: The operator.
        ins: Label of each dim of each input; None is never split.
        outs: As `ins`, of the outputs.
        linear: Groups of inputs in which the operator is linear together; sums pass through them.
        added: Inputs that are added to a sum over labels they do not have.
        unsplit: Labels that may not be split.
        limits: Label -> what its parts must divide besides the sizes of its dims.
        summed: Label -> bytes of an all-reduce inside the operator if it is split.
        costs: As of `ShardingRule`.
    """
    tensors = [*zip(site.ins, ins, strict=True), *zip(site.outs, outs, strict=True)]
    sizes: dict[str, int] = dict(limits)
    for value, labels in tensors:
        for size, label in zip(value.shape, labels, strict=True):
            if label is not None and label not in unsplit:
                sizes[label] = math.gcd(sizes.get(label, 0), size)
    choices = [_replicated_choice(site)]
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


def _replicated_choice(site: Site) -> Choice:
    return Choice("R", 0, (RR,) * len(site.ins), (RR,) * len(site.outs), divides=False)


def layout_rule(value: Value) -> ShardingRule:
    """Return the rule of a layout node: how a tensor is handed to several consumers."""
    dims = [dim for dim, size in enumerate(value.shape[:SHARD_CODES]) if size > 1]
    choices = [
        Choice("R", 0, (RR,), (RR,), divides=False),
        Choice("RP", 0, (RP,), (RP,), divides=False),
        *(Choice(f"d{dim}", value.shape[dim], (dim,), (dim,), divides=False) for dim in dims),
    ]
    return ShardingRule(choices=tuple(choices))


def param_rule(value: Value, *, is_trained: bool) -> ShardingRule:
    """Return how a parameter can be stored: replicated, with sharded state, or sharded."""
    choices = [Choice("R", 0, (), (RR,), divides=False)]
    if is_trained and value.shape:
        choices.append(Choice("Z", 0, (), (RZ,), divides=False))
    for dim, size in enumerate(value.shape[:SHARD_CODES]):
        if size > 1:
            choices.append(Choice(f"d{dim}", size, (), (dim,), divides=False))
    return ShardingRule(choices=tuple(choices))


def output_rule(value: Value) -> ShardingRule:
    """Return how the caller can get an output: replicated, or sharded by sample."""
    choices = [Choice("R", 0, (RR,), (), divides=False)]
    if value.shape:
        choices.append(Choice("b", value.shape[0], (0,), (), divides=False))
    return ShardingRule(choices=tuple(choices))


def unknown(site: Site) -> ShardingRule:
    """Return the rule of an operator without one: it runs replicated."""
    nbytes = float(sum(value.nbytes for value in (*site.ins, *site.outs)))
    saved = tuple(range(len(site.ins)))
    return ShardingRule(
        choices=(_replicated_choice(site),), nbytes=nbytes, saved_inputs=saved, known=False
    )


def broadcast(shape: Sequence[int], out: Sequence[int]) -> list[str | None]:
    """Return the labels of a tensor of `shape` in an elementwise operator over `out`."""
    offset = len(out) - len(shape)
    return [
        f"d{offset + dim}" if size == out[offset + dim] and size > 1 else None
        for dim, size in enumerate(shape)
    ]
