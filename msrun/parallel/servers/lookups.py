"""The forward pass of a table whose rows are pulled: a rank has those of its batch alone."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


class Remotes(Protocol):
    """Has the rows of tables; `remote` does."""

    def has(self, remote: Any, /) -> bool:
        """Return whether the rank has the whole of a table now."""

    def rows(self, remote: Any, ids: Tensor, /) -> Tensor:
        """Return rows of a table by their numbers, distinct and ascending."""


class RowsOf(torch.autograd.Function):
    """Rows of a table, whose gradient is a sparse one of the table."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """Return `rows`, as rows `ids` of `weight`."""
        ctx.ids, ctx.shape, ctx.device = ids, weight.shape, weight.device
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable  # type: ignore[misc, untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the table."""
        sparse = torch.sparse_coo_tensor(
            ctx.ids[None].to(ctx.device),
            gradient[: len(ctx.ids)],
            ctx.shape,
            is_coalesced=True,
            check_invariants=False,
        )
        return sparse, None, None


def distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ids on the host, and where each id is among them."""
    flat, where = ids.detach().cpu().long().reshape(-1).unique(return_inverse=True)
    return flat, where.view(ids.shape).to(ids.device)


def _padding(padding: int | None, ids: Tensor) -> int | None:
    """Return the place of the padding among `ids`."""
    if padding is None or not len(ids):
        return None
    place = int(torch.searchsorted(ids, padding))
    return place if place < len(ids) and int(ids[place]) == padding else None


_Place = tuple[Remotes, Any, weakref.ref[nn.Module]]


def _module(place: _Place) -> Any:
    if (module := place[2]()) is None:
        raise ReferenceError("the module is gone")
    return module


def look_up(place: _Place, input: Tensor) -> Tensor:  # noqa: A002 - as torch calls it
    """Stand for `nn.Embedding.forward`."""
    (remotes, remote, _), module = place, _module(place)
    if remotes.has(remote):
        return nn.Embedding.forward(module, input)
    ids, where = distinct(input)
    rows = remotes.rows(remote, ids)
    return functional.embedding(where, rows, _padding(module.padding_idx, ids))


def look_up_bags(
    place: _Place,
    input: Tensor,  # noqa: A002 - as torch calls it
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """Stand for `nn.EmbeddingBag.forward`."""
    (remotes, remote, _), module = place, _module(place)
    if remotes.has(remote):
        return nn.EmbeddingBag.forward(module, input, offsets, per_sample_weights)
    ids, where = distinct(input)
    rows = remotes.rows(remote, ids)
    return functional.embedding_bag(
        where,
        rows,
        offsets,
        mode=module.mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=module.include_last_offset,
        padding_idx=_padding(module.padding_idx, ids),
    )
