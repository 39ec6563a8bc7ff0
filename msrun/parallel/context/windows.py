"""Sliding windows: layers in which a token sees those near to it alone.

transformers makes the mask of such a layer from the number of tokens that it is given, and makes
none where the window holds all of them.  Both are those of one process only if the tokens are those
of all ranks.  So its maker of masks, which it lets libraries register, is asked here first: inside
of `Sequences` a window becomes a mark, a tensor with a note and little memory, which
attention takes for the window over the tokens of all ranks.  Whatever else a model does with the
mark, the mask that attention then gets is one of pairs of tokens of the part, and is refused.

What a mask function computes is told by its code: those of a window are compared with the ones that
transformers itself makes for it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msrun.errors import ModelError
from msrun.parallel.torch_compat import active_modes, viewed, with_values, without_functions

_NOTE = "msrun_window"
_KIND = "sdpa"
# Of queries and keys: a view that has them the other way round is no mark.
_STRIDES = (1, 0)


class SlidingWindow(NamedTuple):
    """Which tokens a token sees.

    Args:
        before: How many of those before it.
        behind: How many of those behind it: none, or as many.
    """

    before: int
    behind: int


def window_of(mask: Tensor | None) -> SlidingWindow | None:
    """Return the window that `mask` is the mark of, or a view of the mark; None of another."""
    if mask is None or mask.stride()[-2:] != _STRIDES:
        return None
    found: SlidingWindow | None = getattr(mask, _NOTE, None)
    base = viewed(mask)
    return found if found or base is None else getattr(base, _NOTE, None)


def _mark(window: SlidingWindow, tokens: int, device: Any) -> Tensor:
    """Return a mask of (1, 1, tokens, tokens) that attention knows.

    It has values where a forward is recorded without them, and so is no step of the recording that
    one stage would take and send.
    """
    with without_functions(), with_values():
        rows = torch.ones(1, 1, tokens, 1, dtype=torch.bool, device=device)
        mark = rows.expand(1, 1, tokens, tokens)
    for tensor in (rows, mark):
        setattr(tensor, _NOTE, window)
    return mark


class Windows:
    """The windows of a model on parts of sequences.

    Args:
        key: Path of the rule in the configuration, for messages.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._tokens = self._whole = 0
        self._is_expected = self._is_met = False

    def begin(self, tokens: int, ranks: int, *, is_expected: bool) -> None:
        """Begin a batch.

        Args:
            tokens: Of a part.
            ranks: With parts.
            is_expected: Whether the configuration of the model names a window.
        """
        self._tokens, self._whole = tokens, tokens * ranks
        self._is_expected = is_expected
        if is_expected:
            _register()

    def check(self) -> None:
        """Refuse a model that has computed with windows of which nothing was seen."""
        if self._is_expected and not self._is_met:
            raise ModelError(
                f"{self._key}.style: context: the model has sliding_attention, and made no mask of "
                "it by transformers.masking_utils",
                hint="give it a mask of padding, (samples, tokens), or none; a model whose code "
                "makes masks of windows by itself is trained without style context",
            )

    def mask(self, usual: Callable[..., Tensor | None], asked: dict[str, Any]) -> Tensor | None:
        """Return the mask that transformers asks for, which `usual` makes of the part."""
        size = asked.get("local_size")
        sizes = (asked.get("q_length"), asked.get("kv_length"))
        if size is None or sizes != (self._tokens, self._tokens):
            return usual(**asked)
        self._is_met = True
        window = _known_window(asked["mask_function"], size)
        if window is None or asked.get("attention_mask") is not None:
            raise ModelError(
                f"{self._key}.style: context: the model has attention to {size} tokens nearby that "
                "is no sliding window alone",
                hint="leave other masks to is_causal, or give rt.step one of all pairs of tokens",
            )
        skip = "allow_is_bidirectional_skip" if window.behind else "allow_is_causal_skip"
        if self._whole < size and asked.get(skip):
            return None
        return _mark(window, self._tokens, asked.get("device", "cpu"))


class _MaskMaker:
    """What transformers calls for a mask of `scaled_dot_product_attention`.

    Args:
        usual: What it called before.
    """

    def __init__(self, usual: Callable[..., Tensor | None]) -> None:
        self._usual = usual

    def __call__(self, *args: Any, **asked: Any) -> Tensor | None:
        """Return the mask."""
        found = [getattr(mode, "windows", None) for mode in active_modes()]
        windows = next((x for x in reversed(found) if isinstance(x, Windows)), None)
        if windows is None or args:
            return self._usual(*args, **asked)
        return windows.mask(self._usual, asked)


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    usual = ALL_MASK_ATTENTION_FUNCTIONS[_KIND]
    if not isinstance(usual, _MaskMaker):
        AttentionMaskInterface.register(_KIND, _MaskMaker(usual))


def _known_window(function: Any, size: int) -> SlidingWindow | None:
    """Return the window of a mask function of transformers; None if it is another function."""
    from transformers import masking_utils

    causal = masking_utils.sliding_window_causal_mask_function(size)
    if _is_same(function, causal):
        return SlidingWindow(size - 1, 0)
    both = getattr(masking_utils, "sliding_window_bidirectional_mask_function", None)
    if both and _is_same(function, both(size)):
        return SlidingWindow(size, size)
    return None


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two functions have the same code and the same values around it."""
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        around = [f.__closure__ or () for f in (one, other)]
        inner = [tuple(cell.cell_contents for cell in cells) for cells in around]
        return one.__code__ is other.__code__ and _is_same(*inner)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) is int and one == other
