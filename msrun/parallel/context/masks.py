"""Masks of attention for the part of a sequence that a rank has."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from msrun.errors import ModelError
from msrun.parallel.context.token_calls import Taint, TokenPlace

_DIMS = 4
_TOKENS = -2
Mark = TokenPlace | Taint | None


class SequencePart(NamedTuple):
    """The tokens of a rank.

    Args:
        key: Path of the rule in the configuration, for messages.
        first: Number of the first token.
        tokens: How many they are.
        ranks: Of the axis.
    """

    key: str
    first: int
    tokens: int
    ranks: int

    def rows(self, mask: Tensor | None, known: Mark, *, is_known: bool) -> Tensor | None:
        """Return the queries of this part in a mask of all pairs of tokens; None of another.

        Args:
            mask: As the model gives it.
            known: What a watch knows of its tokens.
            is_known: Whether there is a watch.
        """
        if mask is None or mask.dim() < -_TOKENS or mask.requires_grad:
            return None
        whole = self.tokens * self.ranks
        own = TokenPlace(mask.dim() + _TOKENS)
        if mask.shape[_TOKENS:] == (whole, whole) and known is None:
            rows = mask.narrow(_TOKENS, self.first, self.tokens)
        elif mask.shape[_TOKENS:] == (self.tokens, whole) and (known == own or not is_known):
            rows = mask
        else:
            return None
        return rows[(None,) * (_DIMS - rows.dim())]

    def keys(
        self, mask: Tensor | None, real: Tensor | None, known: Mark, *, is_known: bool
    ) -> Tensor | None:
        """Return the part of a mask of keys that belongs to this rank; None without one.

        Args:
            mask: As the model gives it.
            real: Of all tokens, which are no padding.
            known: What a watch knows of the tokens of `mask`.
            is_known: Whether there is a watch.

        Raises:
            ModelError: The mask is another one.
        """
        if mask is None:
            last = self.first + self.tokens
            return None if real is None else real[:, None, None, self.first : last]
        is_of_keys = mask.dim() == _DIMS and mask.shape[2:] == (1, self.tokens)
        is_other = real is not None or not is_of_keys or mask.requires_grad
        if is_other or (is_known and known != TokenPlace(3)):
            raise ModelError(
                f"{self.key}.style: context: attention has a mask of shape {tuple(mask.shape)} "
                "for the part of a sequence, and is_causal, a mask of keys (samples, 1, 1, tokens) "
                "or none are supported, and one of all pairs from the batch",
                hint="let the model use is_causal=True, or give rt.step the mask of whole "
                "sequences, (samples, tokens, tokens); in transformers give it attention_mask",
            )
        return mask
