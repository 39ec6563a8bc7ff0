"""What a module of experts is called with: tokens, their experts, and the weights of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from msrun.errors import ModelError
from msrun.parallel.notation.mesh_layout import EXPERT_AXIS

TAKEN = "tokens (rows, width), their experts (rows, k), and the weights of these (rows, k)"
_TOKEN_DIMS = 2


class _Places(NamedTuple):
    tokens: int
    experts: int
    weights: int


class Arguments:
    """The arguments of one call.

    Args:
        name: Name of the module, for messages.
        args: By position.
        kwargs: By name.

    Attributes:
        routed: Tokens, their experts, and the weights of these.

    Raises:
        ModelError: They are no such call.
    """

    def __init__(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._name = name
        self._count = len(args)
        self._keys = tuple(kwargs)
        self._values = [plain_of(value) for value in (*args, *kwargs.values())]
        self._places = self._find()
        tokens, index, weights = (self._values[place] for place in self._places)
        self.routed: tuple[Tensor, Tensor, Tensor] = tokens, index, weights

    def call(
        self, forward: Callable[..., Any], tokens: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        """Return what `forward` makes of others in their place, each token with one expert or more.

        Args:
            forward: Of the module.
            tokens: Of shape (rows, width).
            index: Of shape (rows, k), or (rows,).
            weights: Of the shape of `index`.

        Raises:
            ModelError: It asks for other experts than there are, or returns no row for each token.
        """
        dims = self.routed[1].dim()
        shape = index.shape if dims == index.dim() else (-1, *[1] * (dims - 1))
        values = list(self._values)
        given = (tokens, index.view(shape), weights.view(shape))
        for place, value in zip(self._places, given, strict=True):
            values[place] = value
        named = dict(zip(self._keys, values[self._count :], strict=True))
        try:
            output = forward(*values[: self._count], **named)
        except IndexError as error:
            raise ModelError(
                f"{self._name} of style experts over {EXPERT_AXIS}: its forward asks for an expert "
                f"of another rank: {error}",
                hint="loop over the experts of the index, or over an attribute such as num_experts",
            ) from None
        if not isinstance(output, Tensor) or output.shape != tokens.shape:
            kind = type(output).__name__
            shown = tuple(output.shape) if isinstance(output, Tensor) else f"a {kind}"
            raise ModelError(
                f"{self._name} of style experts over {EXPERT_AXIS} returns {shown} for tokens of "
                f"{tuple(tokens.shape)}: it has to return as many, of the same width"
            )
        return output

    def _find(self) -> _Places:
        """Return the places of tokens, index and weights among the values."""
        tensors = [at for at, value in enumerate(self._values) if isinstance(value, Tensor)]
        indices = [at for at in tensors if not self._values[at].is_floating_point()]
        others = [at for at in tensors if at not in indices]
        if len(indices) == 1 and len(others) == len(_Places._fields) - 1:
            places = _Places(others[0], indices[0], others[1])
            tokens, index, weights = (self._values[at] for at in places)
            if (
                tokens.dim() == _TOKEN_DIMS
                and index.dim() in (1, _TOKEN_DIMS)
                and index.shape == weights.shape
                and len(index) == len(tokens)
            ):
                return places
        shown = ", ".join(str(tuple(self._values[at].shape)) for at in tensors) or "no tensor"
        raise ModelError(
            f"{self._name} of style experts over {EXPERT_AXIS} was called with {shown}; it takes "
            f"{TAKEN}"
        )


def plain_of(value: Any) -> Any:
    """Return all of a tensor that an operator plan has sharded or replicated."""
    if not isinstance(value, DTensor):
        return value
    replicated = [Replicate()] * value.device_mesh.ndim
    return value.redistribute(placements=replicated).to_local(grad_placements=replicated)
