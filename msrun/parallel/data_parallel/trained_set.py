"""Which parameters are trained, followed while a script freezes and thaws them.

The problem.  `requires_grad_` may change between any two steps, as in gradual unfreezing.  The
reduction then has to send other gradients, and all ranks have to decide so in the same step:
otherwise the buckets of one rank would meet other buckets.

The idea.  Each rank compares the flags of its parameters once a backward pass.  With the last
bucket, which is sent as it was before, travel two numbers: how many ranks saw a change, and how
many saw none.  If all saw one, they exchange the names of what they train, and then send the new
gradients of this pass.  A step without a change costs these two numbers.

Invariants:

- On a host all ranks raise if they differ.  On other devices only ranks that saw a change read the
  numbers, since the others would wait for the device in every step; those that saw one raise.
- The buckets of a pass are those of the set before the change, on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from msrun.errors import RanksDisagreeError
from msrun.parallel.exchange import messages

Named = Sequence[tuple[str, Parameter]]

# Ranks that saw a change, and ranks that did not.
VOTES = 2
_RANKS_SHOWN = 4


class TrainedSet:
    """The trained ones of some parameters.

    Args:
        named: The parameters, the same on all ranks.
        group: These ranks.
        device: Of this rank.
    """

    def __init__(self, named: Named, group: dist.ProcessGroup, device: torch.device) -> None:
        self._named = tuple(named)
        self._group = group
        self._device = device
        self._flags = self._current()

    def has_changed(self) -> bool:
        """Return whether others are trained now."""
        return self._current() != self._flags

    def params(self) -> Named:
        """Return the trained parameters, as of the last `follow`."""
        return [pair for pair, flag in zip(self._named, self._flags, strict=True) if flag]

    def check(self, votes: Tensor, *, has_changed: bool) -> None:
        """Refuse a change that not all ranks saw.

        Args:
            votes: Sums over the ranks of what `vote` returns.
            has_changed: Whether this rank saw one.

        Raises:
            RanksDisagreeError: Others did not.
        """
        is_free = votes.device.type == "cpu"
        if not (has_changed or is_free):
            return
        changed, unchanged = votes.tolist()
        if changed and unchanged:
            own = self._differing(self._flags)
            what = f"{own[0]} here" if own else "one on other ranks"
            raise RanksDisagreeError(
                self._difference()
                if is_free
                else f"requires_grad changed of {what}, and not on all data-parallel ranks",
                hint=_HINT,
            )

    def follow(self) -> Named:
        """Take over the change, which all ranks saw; return what is trained newly.

        Raises:
            RanksDisagreeError: Ranks changed different parameters.
        """
        if problem := self._difference():
            raise RanksDisagreeError(problem, hint=_HINT)
        before, self._flags = self._flags, self._current()
        both = zip(self._named, before, self._flags, strict=True)
        return [pair for pair, was, is_now in both if is_now and not was]

    def _current(self) -> list[bool]:
        return [param.requires_grad for _, param in self._named]

    def _differing(self, flags: Sequence[bool]) -> list[str]:
        pairs = zip(self._named, flags, self._current(), strict=True)
        return [name for (name, _), one, other in pairs if one != other]

    def _difference(self) -> str:
        """Return a sentence on the first parameter that not all ranks train; empty without one."""
        own = [name for name, param in self._named if param.requires_grad]
        of_ranks = messages.gather_all(own, list[str], self._group, self._device)
        sets = [frozenset(names) for names in of_ranks]
        differing = frozenset.union(*sets) - frozenset.intersection(*sets)
        name = next((name for name, _ in self._named if name in differing), None)
        if name is None:
            return ""
        ranks = dist.get_process_group_ranks(self._group)
        training = [str(rank) for rank, names in zip(ranks, sets, strict=True) if name in names]
        shown = ", ".join(training[:_RANKS_SHOWN]) + " ..." * (len(training) > _RANKS_SHOWN)
        more = f", and so for {len(differing) - 1} more" if len(differing) > 1 else ""
        return (
            f"{name} is trained on rank{'s' * (len(training) > 1)} {shown} and frozen on the others"
            f"{more}; no weight was changed"
        )


_HINT = "call requires_grad_ on all ranks alike, between the same two steps"


def vote(*, has_changed: bool) -> list[float]:
    """Return what this rank adds to the votes."""
    return [float(has_changed), float(not has_changed)]


class VoteBucket:
    """Sends the votes where no bucket of gradients does; see `reducer.Bucket`."""

    pending = 0
    params: tuple[Parameter, ...] = ()

    def __init__(self, device: torch.device) -> None:
        self._votes = torch.zeros(VOTES, device=device)
        self._work: dist.Work | None = None

    def launch(self, group: dist.ProcessGroup, scale: float, *, has_changed: bool) -> None:
        """Start the sum over `group`."""
        del scale
        self._votes = torch.tensor(vote(has_changed=has_changed), device=self._votes.device)
        self._work = dist.all_reduce(self._votes, group=group, async_op=True)

    def finish(self) -> None:
        """Wait for the sum."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def drop(self) -> None:
        """Forget votes of a backward pass that raised, once other ranks have them."""
        self.finish()

    def take_votes(self) -> Tensor:
        """Return the sums."""
        return self._votes

    def forget_room(self) -> None:
        """Do nothing: no gradient refers to the votes."""
