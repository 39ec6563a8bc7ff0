"""Documents that are packed in one sequence, where a token attends to those of its own alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

# Files of transformers that find documents by positions.
FINDERS = frozenset(["masking_utils.py"])


class Documents(NamedTuple):
    """The documents of a batch.

    Args:
        of_tokens: Number of the document of each token, of (samples, tokens of all ranks).
        sizes: Of each sample the tokens of its documents, in order.
    """

    of_tokens: Tensor
    sizes: list[list[int]]

    def of(self, samples: Sequence[int]) -> Documents:
        """Return those of some samples, by their numbers."""
        return Documents(self.of_tokens[samples], [self.sizes[sample] for sample in samples])


class OneDocument:
    """What transformers finds documents by, if it asked and there was one.

    It is no tensor: of tensors without values transformers takes it that there are several.
    """

    def __ne__(self, other: object) -> Any:
        """Return which tokens begin a document."""
        return self

    __eq__ = __ne__
    __hash__ = None  # type: ignore[assignment]

    def cumsum(self, dim: int) -> OneDocument:  # noqa: ARG002 - as of tensors
        """Return the number of the document of each token."""
        return self

    def __getitem__(self, _: object) -> OneDocument:
        """Return the numbers of some tokens."""
        return self

    def all(self) -> bool:
        """Return whether all of them are 0."""
        return True


def by_positions(places: Tensor, samples: int) -> Documents | None:
    """Return the documents of positions that begin anew in each; None if there is one alone.

    Args:
        places: Of (samples or 1, tokens).
        samples: In the batch.
    """
    breaks = (places.diff(dim=-1) != 1).cpu()
    if not bool(breaks.any()):
        return None
    breaks = breaks.expand(samples, -1)
    length = places.shape[-1]
    sizes = []
    for row in breaks:
        ends = [*(at + 1 for at in row.nonzero().flatten().tolist()), length]
        sizes.append([end - first for first, end in zip([0, *ends], ends, strict=False)])
    numbers = places.new_zeros(samples, length)
    numbers[:, 1:] = breaks.to(places.device).cumsum(-1)
    return Documents(numbers, sizes)
