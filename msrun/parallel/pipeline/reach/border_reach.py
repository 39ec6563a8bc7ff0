"""What the gradients of one chunk reached: of each micro-batch, its received values and weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import msgspec
from torch import Tensor
from torch.nn import Parameter

from msrun.parallel.data_parallel.joined_inputs import JoinNotes, parameters_behind
from msrun.parallel.pipeline.border import Border, Tensors, received_value, with_dense_gradient

# A step of autograd, and the number of its output.
_Edge = tuple[Any, int]


class PartReach(msgspec.Struct, frozen=True):
    """What one micro-batch of one chunk differentiated.

    Args:
        paths: For each sent value, or for the loss, the received ones that it depends on.
    """

    paths: list[list[int]]


class _Part:
    """One micro-batch of a chunk.

    Attributes:
        reached: Received values that got a gradient.
        starts: First step of autograd before each sent value; empty where no graph is kept.
    """

    __slots__ = ("reached", "starts")

    def __init__(self) -> None:
        self.reached: set[int] = set()
        self.starts: dict[int, _Edge] = {}


class BorderReach:
    """Notes of one step about one chunk.

    Args:
        received: What the chunk receives.
        sent: What it sends; the last chunk yields the loss.
        parts: Micro-batches.
        joins: Notes about inputs of modules in it.
        own: Returns the parameters that the chunk uses.
        shares: Whether another chunk of the stage uses some of them.
    """

    def __init__(
        self,
        received: Sequence[Border],
        sent: Sequence[Border],
        parts: int,
        joins: JoinNotes,
        own: Callable[[], Collection[Parameter]],
        *,
        shares: bool,
    ) -> None:
        self._received = {at for at, border in enumerate(received) if border.requires_grad}
        self._sent = [at for at, border in enumerate(sent) if border.requires_grad]
        self._count = len(sent)
        self._joins = joins
        self._own = own
        self._is_kept = len(self._sent) > 1 or shares
        self._ends_here = 0
        self._parts = [_Part() for _ in range(parts)]

    def begin(self) -> None:
        """Forget the last step."""
        self._parts = [_Part() for _ in self._parts]
        self._ends_here = 0
        self._joins.begin()

    def watch(self, part: int, received: Sequence[Tensor]) -> list[Tensor]:
        """Return `received`, of which is noted what gets a gradient."""
        reached = self._parts[part].reached
        return [
            with_dense_gradient(tensor, at, partial(reached.add, at))
            for at, tensor in enumerate(received)
        ]

    def keep(self, part: int, sent: Tensors) -> None:
        """Keep the nodes of the graph of `sent`, what `join_graph` returned, if it is needed.

        Else every gradient of the chunk comes from the one value that it sends.
        """
        graded = [at for at, tensor in enumerate(sent) if tensor.requires_grad]
        self._ends_here += bool(self._sent) and not graded
        if graded and (self._is_kept or self._joins.is_needed):
            joined: Any = sent[graded[0]].grad_fn
            steps = zip(graded, joined.next_functions, strict=False)
            self._parts[part].starts = dict(steps)

    def missing(self) -> int:
        """Return how many received values got no gradient, and losses have none to give."""
        return self._ends_here + sum(len(self._received - part.reached) for part in self._parts)

    def report(self) -> list[PartReach]:
        """Return what each micro-batch reached."""
        return [self._report(part) for part in self._parts]

    def _report(self, part: _Part) -> PartReach:
        paths: list[list[int]] = [[] for _ in range(self._count)]
        for at in part.starts or self._sent:
            found = _behind(part.starts[at])[0] if part.starts else part.reached
            paths[at] = sorted(part.reached & found)
        return PartReach(paths)

    def weights(self, used: Sequence[Collection[int]]) -> tuple[set[Parameter], set[Parameter]]:
        """Return the parameters that the loss depends on by this chunk, and all with a gradient.

        Args:
            used: Sent values that the loss depends on, of each micro-batch.
        """
        needed: set[Parameter] = set()
        reached: set[Parameter] = set()
        for part, sent in zip(self._parts, used, strict=True):
            if not part.starts:
                reached.update(self._own())
                needed.update(self._own() if sent else ())
            for at, start in part.starts.items():
                reached |= _behind(start, is_joined=True)[1]
                needed |= _behind(start)[1] if at in sent else set()
        return needed, reached


def _behind(start: _Edge, *, is_joined: bool = False) -> tuple[set[int], set[Parameter]]:
    """Return the received values and the parameters that a step of autograd depends on."""
    received: set[int] = set()

    def is_received(step: Any) -> bool:
        number = received_value(step)
        if number is not None:
            received.add(number)
        return number is not None

    return received, parameters_behind(start, is_joined=is_joined, stops=is_received)
