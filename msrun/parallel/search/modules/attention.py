"""What ranks send when they share sequences: one call of attention, by all-to-alls or by a ring.

`context.attention` and `context.ring` exchange so; the formulas are those of `docs/parallel.md`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from msrun.parallel.search.cost.cost import collective
from msrun.parallel.search.cost.redistribution import MoveKind
from msrun.parallel.search.cost.topology import Wire
from msrun.parallel.search.graph.program import Program

ALL_TO_ALL, RING = "all_to_all", "ring"
KINDS = (ALL_TO_ALL, RING)
# Queries, keys, values and results, forward and backward.
_ALL_TO_ALLS = 8
# Halves of parts: before and after, forward and backward.
_HALVES = 4


class AttentionCall(NamedTuple):
    """A call of attention on the part of a rank.

    Args:
        heads: Of the queries.
        key_heads: Of the keys.
        of_head: Bytes of one head of the queries.
        is_causal: Whether tokens see only those before.
    """

    heads: int
    key_heads: int
    of_head: float
    is_causal: bool

    def can(self, kind: str, ranks: int) -> bool:
        """Return whether `ranks` can share it by `kind`."""
        return kind == RING or self.heads % ranks == 0

    def sent(self, kind: str, ranks: int) -> float:
        """Return the bytes that a rank sends, forward and backward."""
        return self._by_heads(ranks) if kind == ALL_TO_ALL else self._around(ranks)

    def seconds(self, kind: str, wire: Wire) -> float:
        """Return the seconds of its exchange over `wire`, forward and backward.

        Keys that travel around a ring are counted as if no computation hid them.
        """
        ranks = wire.size
        start, rate = collective(MoveKind.MOVE, wire)
        # `collective` counts the bytes of the full tensor, of which a rank sends this share.
        share = (ranks - 1) / ranks**2
        if kind == ALL_TO_ALL:
            return _ALL_TO_ALLS * start + rate * self._by_heads(ranks) / share
        steps = (ranks - 1) + (2 * ranks - 1)
        halves = _HALVES * start * self.is_causal
        _, gathered = collective(MoveKind.GATHER, wire)
        passed = steps * (wire.start + wire.hop) + halves
        return passed + gathered * ranks / (ranks - 1) * self._around(ranks)

    def _by_heads(self, ranks: int) -> float:
        """Return what all-to-alls send; heads of keys are repeated where ranks do not divide."""
        repeated = self.key_heads * (ranks // math.gcd(self.key_heads, ranks))
        return 2 * (ranks - 1) / ranks * self.of_head * 2 * (self.heads + repeated)

    def _around(self, ranks: int) -> float:
        """Return what a ring sends, and the halves that balance a causal one."""
        keys = 2 * self.key_heads * self.of_head
        halves = 2 * (2 * self.heads * self.of_head + keys) if self.is_causal else 0
        return (ranks - 1) * keys + (2 * ranks - 1) * keys + halves


def attention_calls(program: Program, ranks: int) -> Iterator[AttentionCall]:
    """Yield the calls of attention of `program`, of which `ranks` share each sequence."""
    for step in program.steps:
        if step.packet != "scaled_dot_product_attention":
            continue
        query, key = (program.values[step.inputs[name]] for name in ("query", "key"))
        heads = query.shape[1]
        yield AttentionCall(
            heads=heads,
            key_heads=key.shape[1],
            of_head=query.nbytes / heads / ranks,
            is_causal=bool(step.attrs.get("is_causal")),
        )
