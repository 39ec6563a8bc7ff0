"""Where tensors that a function writes in place have their tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from msrun.parallel.context.token_calls import (
    MixedTokensError,
    TokenCall,
    TokenPlace,
    check_alike,
    shown,
)
from msrun.parallel.context.token_dims import elementwise, place_of


def place_after(call: TokenCall) -> TokenPlace | None:
    """Return where the first argument has its tokens after `copy_` or `x[...] = value`.

    Raises:
        MixedTokensError: It writes some tokens of this part by their position, or mixes tokens.
    """
    try:
        return _copied(call) if call.name == "copy" else _assigned(call)
    except (TypeError, ValueError, IndexError):
        raise call.mixed() from None


def place_in(base: Tensor, view: Tensor, place: TokenPlace) -> TokenPlace | None:
    """Return where `base` has the tokens that its `view` has at `place`; None if it has others."""
    kind = view.shape[place.dim], view.stride(place.dim)
    dims = [dim for dim in range(base.dim()) if (base.shape[dim], base.stride(dim)) == kind]
    return place._replace(dim=dims[0]) if len(dims) == 1 else None


def _copied(call: TokenCall) -> TokenPlace | None:
    """What was there before counts for nothing, but where its tokens were does."""
    if call.place(call.x) is None:
        return elementwise(replace(call, args=call.args[1:]))
    return elementwise(call)


def _assigned(call: TokenCall) -> TokenPlace | None:
    x, index, value = call.args
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, Tensor | list) for item in items):
        return _masked(call, items, value)
    with torch.no_grad():
        part = x.detach()[index]
    if call.place(x) is None:
        given = call.place(value)
        found = given and place_in(x, part, _aligned(given, value, part))
        if found is None:
            raise call.over()
        return found
    taking = replace(call, name="__getitem__", args=(x, index), result=part)
    at = place_of(taking)
    if not isinstance(at, TokenPlace):
        raise call.over()
    if isinstance(value, Tensor):
        _check_value(call, value, part, at)
    return call.place(x)


def _check_value(call: TokenCall, value: Tensor, part: Tensor, at: TokenPlace) -> None:
    """Refuse a value that belongs to other tokens than those at `at` in `part`."""
    if given := call.place(value):
        if _aligned(given, value, part) != at:
            raise MixedTokensError(f"{shown(call)} of pairs of tokens")
    elif (dim := at.dim - part.dim() + value.dim()) >= 0:
        check_alike(call, value, dim)


def _aligned(place: TokenPlace, value: Tensor, part: Tensor) -> TokenPlace:
    """Return `place` of `value` in `part`, to which it is broadcast."""
    return place._replace(dim=place.dim + part.dim() - value.dim())


def _masked(call: TokenCall, items: list[object], value: object) -> TokenPlace | None:
    """One value for all places of a mask."""
    x, mask = call.x, items[0]
    is_mask = len(items) == 1 and isinstance(mask, Tensor) and mask.dtype == torch.bool
    is_one = not isinstance(value, Tensor) or (value.numel() == 1 and call.place(value) is None)
    if not (is_mask and is_one) or not isinstance(mask, Tensor):
        raise call.mixed()
    own, chosen = call.place(x), call.place(mask)
    if own and chosen and own != chosen:
        raise MixedTokensError(f"{shown(call)} of pairs of tokens")
    if own and chosen is None and own.dim < mask.dim():
        check_alike(call, mask, own.dim)
    return own or chosen
