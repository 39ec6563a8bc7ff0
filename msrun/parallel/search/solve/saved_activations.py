"""What backward finds kept: by whom, in whose layout, and how often.

A tensor that one operator keeps lies as that operator reads it.  One that several keep lies as its
hub does, one that its maker keeps as that left it, a parameter as it is stored; whoever reads these
in another layout keeps a copy of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from msrun.parallel.search.graph.program import Program, Step
from msrun.parallel.search.graph.rules import ShardingRule
from msrun.parallel.search.solve.uses import Uses


class Retention(NamedTuple):
    """Whether a tensor is kept, and whether of each micro-batch that is on its way."""

    is_kept: bool
    is_per_microbatch: bool


class SavedTensor(NamedTuple):
    """What an operator keeps.

    Args:
        end: `ins` or `outs`.
        port: Number of the input or output.
        nbytes: Of the whole tensor.
        is_per_microbatch: As of `Retention`.
    """

    end: str
    port: int
    nbytes: int
    is_per_microbatch: bool


NOTHING = Retention(is_kept=False, is_per_microbatch=False)


class SavedActivations:
    """Knows what is kept of a program.

    Args:
        program: The forward pass.
        rules: Rule of each step.
        readings: Who reads what.
        trained: Values that have a gradient.
        cuts: Values between repeated blocks.
        recomputed: Step whose values are computed again -> number of its block.
    """

    def __init__(
        self,
        program: Program,
        rules: Mapping[str, ShardingRule],
        uses: Uses,
        *,
        trained: Collection[str],
        cuts: Collection[str],
        recomputed: Mapping[str, int],
    ) -> None:
        self._program, self._rules, self._uses = program, rules, uses
        self._trained, self._cuts, self._recomputed = trained, cuts, recomputed
        self._made_by = {name: step.name for step in program.steps for name in step.outputs}

    def has_layout_node(self, value: str) -> bool:
        """Return whether `value` moves once for all who read it."""
        return value in self._cuts or len(self._uses.uses.get(value, ())) > 1

    def of_step(self, step: Step) -> tuple[SavedTensor, ...]:
        """Return what `step` keeps, but for copies of what is held elsewhere."""
        rule = self._rules[step.name]
        found = [
            ("outs", port, name) for port, name in enumerate(step.outputs) if rule.saves_outputs
        ]
        for port, name in enumerate(step.inputs.values()):
            value = self._uses.base_of(name)[0]
            if port in rule.saved_inputs and not self._is_held(value):
                found.append(("ins", port, value))
        shares = [self._inside(value, step.name) for _, _, value in found]
        return tuple(
            SavedTensor(end, port, self._program.values[value].nbytes, share.is_per_microbatch)
            for (end, port, value), share in zip(found, shares, strict=True)
            if share.is_kept
        )

    def of_layout_node(self, value: str) -> Retention:
        """Return whether the hub of a value keeps it, and not only who reads it there."""
        maker = self._made_by.get(value)
        if (
            maker is None
            or self._rules[maker].saves_outputs
            or not self._is_saved_at_layout_node(value)
        ):
            return NOTHING
        return self._inside(value, maker)

    def of_copy(self, value: str, step: Step | None, port: int) -> Retention:
        """Return whether what `step` gets is kept, where it is no longer what was held before.

        Args:
            value: What is read.
            step: Who reads it; None for its hub.
            port: Number of the step's input.
        """
        if step is None:
            maker = self._made_by.get(value)
            keepers = self._keepers(value)
            is_held = maker is None or self._rules[maker].saves_outputs
            reader = keepers[0].name if keepers and is_held else None
        else:
            is_copy = port in self._rules[step.name].saved_inputs and self._is_held(value)
            reader = step.name if is_copy else None
        if reader is None or value not in self._trained:
            return NOTHING
        if reader in self._recomputed:
            return Retention(self._recomputed[reader] == 0, is_per_microbatch=False)
        return Retention(is_kept=True, is_per_microbatch=value in self._made_by)

    def _keepers(self, value: str) -> list[Step]:
        uses = self._uses.uses.get(value, ())
        return [u.step for u in uses if u.step and u.port in self._rules[u.step.name].saved_inputs]

    def _is_held(self, value: str) -> bool:
        """Return whether a value is kept before any operator reads it."""
        maker = self._made_by.get(value)
        return (
            maker is None
            or self._rules[maker].saves_outputs
            or self._is_saved_at_layout_node(value)
        )

    def _is_saved_at_layout_node(self, value: str) -> bool:
        is_between = value in self._cuts and self._made_by.get(value) in self._recomputed
        return self.has_layout_node(value) and (is_between or len(self._keepers(value)) > 1)

    def _inside(self, value: str, step: str) -> Retention:
        """Return how a tensor is kept for the backward pass of `step`.

        A block that is recomputed has what is inside it for one micro-batch, and for one block at
        a time: this is counted for the first.
        """
        if value not in self._trained:
            return NOTHING
        if step in self._recomputed and value not in self._cuts:
            return Retention(self._recomputed[step] == 0, is_per_microbatch=False)
        return Retention(is_kept=True, is_per_microbatch=True)
