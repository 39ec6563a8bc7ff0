"""What a loss is made of: sums over a part of the batch, and what divides them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.errors import ModelError
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.losses.mixing import Columns
from msrun.parallel.torch_compat import has_gradient_hooks

Kind = Literal["plain", "counted", "summed", "linear"]


@dataclass(frozen=True, slots=True)
class Limit:
    """What keeps a divisor from 0: `count.clamp(min=floor) + offset`.

    Args:
        floor: The least count.
        offset: What is added to it.
    """

    floor: float = 0.0
    offset: float = 0.0

    def __call__(self, count: Tensor) -> Tensor:
        """Return the divisor for `count`."""
        return count.clamp(min=self.floor) + self.offset if self != NO_LIMIT else count


NO_LIMIT = Limit()
_COUNTED = "msrun_counted"  # of a node of autograd


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Term:
    """A sum over this part of the batch, and what it is divided by.

    Args:
        name: Of the function that computed it.
        total: The sum, one number.
        count: What divides it; None for a sum.
        mean: `total / count`, or 0 without anything that counts; None for a sum.
        limit: What the script does to the divisor.
        is_opaque: Whether `total` is no sum, and so does not add up over parts.
        elements: Elements of which it is a sum or mean; 0 if not known.
        is_scaled: Whether the sum was multiplied or divided by numbers.
        factor: The product of these.
        is_by_hand: Whether that made it a mean, by its elements or samples.
        columns: What it is of each column of samples, where it is no number; see `mixing`.
        has_pairs: Whether it has a value for each pair of samples.
        hint: What to do about it, where it has no counterpart in the whole batch.
    """

    name: str
    total: Tensor
    count: Tensor | None = None
    mean: Tensor | None = None
    limit: Limit = NO_LIMIT
    is_opaque: bool = False
    elements: int = 0
    is_scaled: bool = False
    factor: float = 1.0
    is_by_hand: bool = False
    columns: Columns = ""
    has_pairs: bool = False
    hint: str = ""

    @property
    def value(self) -> Tensor:
        """The mean, or the sum without one."""
        return self.total if self.mean is None else self.mean

    @property
    def is_sum(self) -> bool:
        """Whether it is a sum that nothing divides."""
        return self.count is None and not (self.is_opaque or self.columns)


def sum_of(sums: Sequence[Term], total: Tensor, columns: Columns) -> Term:
    """Return the term of the sum of `sums`, or of their collection.

    Of a sum and a scaled one, as `a + 0.5 * b`, all is the sum if a number divides it.
    """
    known = all(term.elements for term in sums)
    elements = sum(term.elements for term in sums) if known else 0
    first = min(sums, key=lambda term: term.is_scaled)
    return Term(
        name=first.name,
        total=total,
        elements=elements,
        columns=columns,
        is_scaled=any(term.is_scaled for term in sums),
        factor=first.factor,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TallyRanks:
    """The data-parallel ranks of a step.

    Args:
        group: Their group; None for one rank.
        weight: Weight of this rank's batch in a mean over them.
        op: How gradients are reduced: `reduce.op`.
        device: Of this rank.
        scale: Factor of what is differentiated, such as the scale of a loss in float16.
    """

    group: dist.ProcessGroup | None
    weight: float
    op: Literal["mean", "sum"]
    device: torch.device
    scale: float = 1.0

    @property
    def size(self) -> int:
        """Number of data-parallel ranks."""
        return 1 if self.group is None else self.group.size()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartLoss:
    """The loss of one part of a batch.

    Args:
        kind: How losses of parts make one.
        value: The loss of the part alone; of a counted or summed one its sum.
        count: What divides a counted one.
        limit: What the script does to the divisor.
        terms: Means that a linear one is made of.
        slopes: Derivatives of the value by them, if it needs gradients.
    """

    kind: Kind
    value: Tensor
    count: Tensor | None = None
    limit: Limit = NO_LIMIT
    terms: Sequence[Term] = ()
    slopes: Sequence[Tensor] = field(default=())


def count_type(device: torch.device) -> torch.dtype:
    """Return the type in which counts are added; HCCL has no float64."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


def note_counted(total: Tensor) -> Tensor:
    """Return a sum that a script returned with its count, and note that it is one."""
    if total.grad_fn is not None:
        metadata: Any = total.grad_fn.metadata
        metadata[_COUNTED] = True
    return total


def is_counted(nodes: Iterable[Any]) -> bool:
    """Return whether one of the nodes of autograd of a loss is such a sum."""
    steps = (node[0] if isinstance(node, tuple) else node for node in nodes)
    return any(_COUNTED in step.metadata for step in steps)


def one_number(loss: Any, device: torch.device, name: str = "loss") -> Tensor:
    """Return `loss` itself, if it is one number on the device of the model.

    Args:
        loss: What the script returned.
        device: Of the model.
        name: Of the loss, for messages.

    Raises:
        ModelError: It is not.
    """
    if not isinstance(loss, Tensor):
        raise ModelError(
            f"the {name} is {type(loss).__name__}, and must be a tensor of one number",
            hint="return the mean loss of the samples, or (sum, count)",
        )
    if loss.numel() != 1:
        raise ModelError(
            f"the {name} has shape {tuple(loss.shape)}, and must be one number",
            hint="return the mean of it: loss.mean()",
        )
    if loss.device.type != device.type:
        raise ModelError(
            f"the {name} is on {loss.device.type}, and the model on {device.type}",
            hint="compute it from the output of the model, without .cpu()",
        )
    return loss


def refuse_hooks(loss: Any, given: Sequence[Tensor]) -> None:
    """Refuse a loss with hooks: what is differentiated is its sum over a part of the batch.

    Args:
        loss: What a loss function returned.
        given: What it got: an output of the model, which may have hooks, may be the loss itself.

    Raises:
        ModelError: A loss function has registered one on what it returns.
    """
    for tensor in tensors_in(loss):
        if any(tensor is x for x in given) or tensor.grad_fn is None:
            continue
        if tensor.retains_grad or has_gradient_hooks(tensor):
            what = "keeps its gradient" if tensor.retains_grad else "has a hook for its gradient"
            raise ModelError(
                f"the loss that the loss function returns {what}, and a step differentiates "
                "another sum of the batch in its place",
                hint="scale the loss itself, or register the hook on an output of the model",
            )


def sum_of_parts(values: Sequence[Any]) -> Any:
    """Return the sum of plain numbers, or of tensors of one number each."""
    if isinstance(values[0], Tensor):
        return values[0] if len(values) == 1 else torch.stack([*values]).sum()
    return sum(values)


def count_of(term: Term) -> Tensor:
    """Return the count of a mean."""
    if term.count is None:
        raise TypeError("a sum has no count")
    return term.count


def mean_of(term: Term) -> Tensor:
    """Return a mean."""
    if term.mean is None:
        raise TypeError("a sum has no mean")
    return term.mean.reshape(())


def divisor_of(term: Term) -> Tensor:
    """Return by what the mean of `term` was divided."""
    divisor = term.limit(count_of(term))
    return divisor + (divisor == 0)


def check_count(divisor: float, name: str = "the loss") -> None:
    """Refuse a divisor of the whole batch that is 0."""
    if divisor == 0:
        raise ModelError(
            f"no target of the whole batch counts: {name} would be a sum divided by 0; "
            "no weight was changed",
            hint="leave out batches in which every target is ignored",
        )
