"""Operators that draw random numbers, by what their numbers depend on.

A plan gives the numbers of one process: every rank draws those of the full tensor from one
generator, and takes the part of its shard.  How it does follows from the kind of the operator.
"""

from __future__ import annotations

from enum import Enum, auto

from msrun.parallel.search.graph.program import Step


class DrawKind(Enum):
    """What the numbers of an operator depend on, and when it draws them."""

    DROP = auto()  # on a rate; in training alone
    SHAPE = auto()  # on shapes and plain numbers
    VALUES = auto()  # on the element at the same place
    ATTENTION = auto()  # on a rate, for weights that are inside of the operator
    WHOLE = auto()  # on the whole tensor


_KINDS = {
    DrawKind.DROP: "dropout alpha_dropout feature_dropout feature_alpha_dropout",
    DrawKind.SHAPE: """rand rand_like randn randn_like randint randint_like randperm random uniform
        cauchy exponential geometric log_normal normal_functional""",
    DrawKind.VALUES: "bernoulli normal rrelu",
    DrawKind.WHOLE: "multinomial poisson binomial _standard_gamma",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}
# Operators by name, without the underscore of those that write.
DRAWING = frozenset(_KIND_OF)
DROPS = frozenset(_KINDS[DrawKind.DROP].split())


def draw_of(step: Step) -> DrawKind | None:
    """Return the kind of a step that draws random numbers; None if it draws none."""
    if step.packet == "scaled_dot_product_attention":
        return DrawKind.ATTENTION if float(step.attrs.get("dropout_p", 0.0)) > 0 else None
    name = base_name(step.packet)
    if name == "bernoulli" and "p" in step.attrs:
        return DrawKind.SHAPE
    if name == "normal" and not _MOMENTS.intersection(step.inputs):
        return DrawKind.SHAPE
    return _KIND_OF.get(name)


def base_name(packet: str) -> str:
    """Return an operator without the underscore of those that write to their input."""
    return packet.removesuffix("_")


def can_be_off(step: Step) -> bool:
    """Return whether a step that draws numbers may draw none in evaluation."""
    is_leaky = base_name(step.packet) == "rrelu"
    return is_leaky or draw_of(step) in (DrawKind.DROP, DrawKind.ATTENTION)


_MOMENTS = frozenset(("mean", "std"))
