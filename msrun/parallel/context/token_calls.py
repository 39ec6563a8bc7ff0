"""A function of torch that was called, and what is known of the tokens in its arguments.

`token_dims` has the rules that say what follows for its result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from msrun.parallel.torch_compat import is_fake


class TokenPlace(NamedTuple):
    """Where a tensor has its tokens.

    Args:
        dim: The dim.
        before: How many values of something else its index counts before the tokens.
        after: How many after them.
    """

    dim: int
    before: int = 1
    after: int = 1


class Taint(NamedTuple):
    """A number of this part of the sequences.

    Args:
        name: What computed it, and where.
    """

    name: str


class MixedTokensError(Exception):
    """A function mixed tokens, or nobody knows that it does not; the text names it."""


@dataclass(frozen=True, slots=True)
class TokenCall:
    """A function of torch that was called.

    Args:
        name: Of the function, without what says that it writes in place.
        args: What it got.
        kwargs: What it got by name.
        result: A tensor that it returned.
        places: What is known of arguments, by their `id`.
        tokens: Tokens of this part of a sequence.
    """

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Tensor
    places: Mapping[int, TokenPlace | Taint]
    tokens: int

    def value(self, at: int, name: str, default: Any = None) -> Any:
        """Return an argument by position or name."""
        return self.args[at] if len(self.args) > at else self.kwargs.get(name, default)

    @property
    def x(self) -> Tensor:
        """The first argument."""
        found = self.value(0, "input")
        if not isinstance(found, Tensor):
            raise self.mixed()
        return found

    def place(self, value: Any) -> TokenPlace | None:
        """Return where an argument has its tokens."""
        found = self.places.get(id(value))
        return found if isinstance(found, TokenPlace) else None

    @property
    def own(self) -> TokenPlace:
        """Where the first argument has its tokens; only for functions of one tensor."""
        found = self.place(self.x)
        if found is None:
            raise self.mixed()
        return found

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments."""
        return [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)]

    def mixed(self, what: str = "") -> MixedTokensError:
        """Return the refusal of this call."""
        return MixedTokensError(what or f"{self.name}, which is not known to keep tokens apart")

    def over(self) -> MixedTokensError:
        """Return the refusal of a call that goes over the tokens of a sequence."""
        return MixedTokensError(f"{shown(self)} over tokens")


def shown(call: TokenCall) -> str:
    """Return the function of `call` in words."""
    name = "slice" if call.name == "__getitem__" else call.name.strip("_")
    return f"{'an' if name[0] in 'aeio' else 'a'} {name}"


def check_alike(call: TokenCall, tensor: Tensor, dim: int) -> None:
    """Refuse values that are no tokens of the batch, and differ from token to token.

    Such are positions, counted from the first token of this part.  Where a forward is recorded
    without values, the stage that computes them looks.
    """
    if is_fake(tensor):
        return
    if tensor.shape[dim] > 1 and not bool((tensor == tensor.narrow(dim, 0, 1)).all()):
        raise MixedTokensError(
            f"{shown(call)} of tokens with {tuple(tensor.shape)} values that the model made "
            "for the tokens of the part"
        )
