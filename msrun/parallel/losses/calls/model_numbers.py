"""Numbers that a model computes of all its samples, where no `LossWatch` looks at them.

A `LossWatch` sees what a loss function does with one number, and knows of which elements it is a
mean or a sum.  It does not see the model whose output a loss function gets.  There a number of a
part of the batch, such as a loss for the balance of experts, is right only if the loss is linear
in it, and if it is a mean: the mean of sums of parts is not the sum of the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from msrun.parallel.losses.calls.marks import Mark, Mixture, Outcome, TorchCall
from msrun.parallel.losses.notes import grad_fn_of, node_of
from msrun.parallel.losses.torch_calls import MEANS, is_own_call

_HINT = (
    "divide it by the samples of the part, as by len(x), and all is a mean; or return (sum, count) "
    "from the loss function"
)


class ModelNumbers:
    """What is known of them.

    Attributes:
        is_alone: Whether functions are of a model that no `LossWatch` sees.
    """

    def __init__(self) -> None:
        self.is_alone = False
        self._statistics: set[str] = set()
        self._sums: list[tuple[Mixture, Any]] = []  # and the nodes of autograd that have them

    @contextlib.contextmanager
    def in_model(self, *, is_alone: bool) -> Iterator[None]:
        """Let functions inside be of a model, at which nothing else may look."""
        self.is_alone = is_alone
        try:
            yield
        finally:
            self.is_alone = False

    def looked_at(self, outcome: Outcome) -> Outcome:
        """Return `outcome`, unless it is what a `LossWatch` knows better."""
        if self.is_alone or outcome is None:
            return outcome
        if isinstance(outcome, Mark) or not outcome.of_number:
            return outcome
        return outcome if outcome.name in self._statistics else None

    def note(self, call: TorchCall, outcome: Outcome) -> None:
        """Note a mean or a sum over samples that `call` returned."""
        if self.is_alone and isinstance(outcome, Mark) and outcome.statistic:
            self.take(outcome)
            is_new = not any(mark.statistic for mark in call.marks.values())
            if is_new and call.name not in MEANS and not outcome.is_extreme:
                self._note_sum(outcome.statistic, call)

    def take(self, mark: Mark | None) -> None:
        """Note that a model computed what `mark` has."""
        if mark and mark.statistic:
            self._statistics.add(mark.statistic)

    def _note_sum(self, name: str, call: TorchCall) -> None:
        node = grad_fn_of(call.result)
        if node is not None and not is_own_call(call.name, call.kwargs):
            mixture = Mixture(name, _HINT, unless_counted=True, of_number=True)
            self._sums.append((mixture, node_of(node, call.result.output_nr)))

    def add_up(self, name: str) -> None:
        """Note that a script gives a sum or a mean to a collective, for that of all ranks."""
        self._sums = [(mixture, node) for mixture, node in self._sums if mixture.name != name]

    def undivided(self, divided: Collection[str]) -> list[tuple[Mixture, Any]]:
        """Return the sums over samples that are not `divided` by their number, and their nodes."""
        return [(mixture, node) for mixture, node in self._sums if mixture.name not in divided]
