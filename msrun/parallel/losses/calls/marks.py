"""What is known of tensors that are computed from a batch, and of functions that get them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from msrun.parallel.losses.torch_calls import over_samples, script_line


class Mark(NamedTuple):
    """What is known of a tensor.

    Args:
        dim: That of samples; None if it has none.
        statistic: What over samples its values depend on linearly; empty without one.
        inputs: Of the batch, whose rows are in `dim`; empty where they may be of one alone.
        across: Another dim, which has rows of another input.
        pairs: What these pairs of rows are.
        is_guess: Whether `dim` may be another one.
        order: A number of the order that samples were put in; 0 for that of the batch.
        is_extreme: Whether the statistic is a maximum or a minimum.
        is_chosen: Whether its first dim has the samples that a mask chose, or their numbers, and
            `dim` is None.
        others: Inputs whose rows are in `across`.
        is_joined: Whether `dim` has all samples several times over, one view behind the other.
    """

    dim: int | None
    statistic: str = ""
    inputs: tuple[str, ...] = ()
    across: int | None = None
    pairs: str = ""
    is_guess: bool = False
    order: int = 0
    is_extreme: bool = False
    is_chosen: bool = False
    others: tuple[str, ...] = ()
    is_joined: bool = False


class Mixture(NamedTuple):
    """A function that mixed samples.

    Args:
        name: Of what it is, with its line.
        hint: What to do, if that is special.
        of_parts: Whether only micro-batches mix them, and not the batches of ranks.
        place: Which numbers it made that are right as an index: counts or an order, or
            positions in the batch, which are right beside each other as well.
        is_sure: Whether it is known that samples were mixed.
        unless_counted: Whether it is right in a sum that a script returns with its count.
        between: Inputs of whose rows it has pairs, if it is right where ranks have one of them
            alike.
        of_number: Whether the function returned one number, of which a `LossWatch` knows more
            where it sees the function.
    """

    name: str
    hint: str = ""
    of_parts: bool = False
    place: Literal["", "count", "real count", "position"] = ""
    is_sure: bool = True
    unless_counted: bool = False
    between: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    of_number: bool = False


class Known(NamedTuple):
    """What is known of an output of a model.

    Args:
        mark: Where it has samples.
        mixture: What mixed them before, and reaches it.
    """

    mark: Mark | None = None
    mixture: Mixture | None = None


def without_numbers(known: Sequence[Known]) -> list[Known]:
    """Return what is known of outputs, without what is right in a loss that a model computes."""
    numbers = [each.mixture is not None and each.mixture.of_number for each in known]
    pairs = zip(known, numbers, strict=True)
    return [each._replace(mixture=None) if is_number else each for each, is_number in pairs]


def of_all_samples(known: Known) -> Known:
    """Return what is known of an output that a plan of mode auto computed of all samples."""
    return Known(known.mark and Mark(known.mark.dim))


@dataclass(frozen=True, slots=True)
class TorchCall:
    """A function of torch that was called.

    Args:
        name: Of the function, without what says that it writes in place.
        args: What it got.
        kwargs: What it got by name.
        result: What it returned.
        marks: What is known of tensors, by their `id`.
        samples: Samples of the part of the batch.
        place: Where it was called; None is what runs now.
        orders: Numbers of orders that tensors of indices have, by their `id`.
        is_cut: Whether micro-batches cut each input with as many rows as samples.
    """

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Tensor
    marks: Mapping[int, Mark]
    samples: int
    place: str | None = None
    orders: Mapping[int, int] = field(default_factory=dict)
    is_cut: bool = True

    def mark(self, value: Any) -> Mark | None:
        """Return what is known of an argument."""
        return self.marks.get(id(value))

    def line(self) -> str:
        """Return where in the model it was called."""
        return script_line() if self.place is None else self.place

    def value(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument by position or name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    @property
    def x(self) -> Tensor:
        """The first argument."""
        found = self.value(0, "input")
        if not isinstance(found, Tensor):
            raise TypeError(self.name)
        return found

    def mixture(self, what: str) -> Mixture:
        """Return that this call mixed samples."""
        return Mixture(over_samples(what) + self.line())

    def by_position(self) -> Mixture:
        """Return that this call took some of the chosen samples by their position."""
        return Mixture(f"chosen samples by their position{self.line()}")


Outcome = Mark | Mixture | None
Rule = Callable[[TorchCall], Outcome]
