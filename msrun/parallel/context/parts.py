"""The part of a batch that a rank of the axis `cp` has: consecutive tokens of each sequence."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from msrun.errors import ModelError
from msrun.parallel.context.documents import Documents, by_positions
from msrun.parallel.losses.batch import StepBatch, batch_size, map_leaves, tensors_in

_IGNORED = -100
_SLIDING = "sliding_attention"


class Cut(NamedTuple):
    """A batch of which a rank has its part.

    Args:
        batch: The part.
        is_cut: For each tensor in it, in order, whether it has tokens in dim 1.
        tokens: Tokens of each sequence in this part.
        real: For (samples, tokens of all ranks) whether attention may see them; None for all.
        documents: That a model of transformers finds by its positions; None for one alone.
        has_windows: Whether a model of transformers has layers with sliding windows.
    """

    batch: StepBatch
    is_cut: list[bool]
    tokens: int
    real: Tensor | None
    documents: Documents | None
    has_windows: bool


def cut_batch(key: str, model: nn.Module, batch: StepBatch, index: int, ranks: int) -> Cut:
    """Return the part `index` of `ranks` of a batch with its samples in dim 0 and tokens in dim 1.

    Args:
        key: Path of the rule in the configuration, for messages.
        model: The model.
        batch: Whole sequences, the same on all of the ranks.
        index: Of this rank.
        ranks: Of the axis.

    Raises:
        ModelError: Tokens do not divide, or what a model of transformers does is not supported.
    """
    batch, real, documents, has_windows = _of_transformers(key, model, batch)
    tensors = tensors_in(batch)
    first = next((tensor for tensor in tensors if tensor.dim() > 1), None)
    if first is None:
        raise ModelError(
            f"{key}.style: context divides dim 1 of the batch, which has no tensor with two dims",
            hint="give rt.step sequences of shape (samples, tokens, ...)",
        )
    samples, length = first.shape[:2]
    if length % ranks:
        raise ModelError(
            f"{key}.style: {length} tokens in dim 1 of the batch can not be split into "
            f"{ranks} parts",
            hint=f"pad or cut the sequences to a multiple of {ranks}",
        )
    if length == ranks > 1:
        # A dim of one token is no other than one that all tokens share: attention would be cut.
        raise ModelError(
            f"{key}.style: {length} tokens in dim 1 of the batch leave one for each of {ranks} "
            "parts, and a part needs two",
            hint=f"pad the sequences to {2 * ranks} tokens or more",
        )
    is_cut = [tensor.dim() > 1 and tensor.shape[:2] == (samples, length) for tensor in tensors]
    for tensor, has_tokens in zip(tensors, is_cut, strict=True):
        if not has_tokens and tensor.dim() and samples * length in tensor.shape:
            raise ModelError(
                f"{key}.style: a tensor of shape {tuple(tensor.shape)} in the batch has samples "
                "and tokens in one dim, and its part cannot be told",
                hint=f"give it the shape ({samples}, {length}, ...)",
            )
    size = length // ranks
    left = iter(is_cut)

    def part(tensor: Tensor) -> Tensor:
        return tensor.narrow(1, index * size, size).contiguous() if next(left) else tensor

    return Cut(map_leaves(part, batch), is_cut, size, real, documents, has_windows)


def _of_transformers(
    key: str, model: nn.Module, batch: StepBatch
) -> tuple[StepBatch, Tensor | None, Documents | None, bool]:
    """Return a batch for a model of transformers, its padding and documents, and if it has windows.

    Labels are shifted while the token behind a part is there, and the mask of padding is kept,
    since the model would make one of pairs of tokens in its part.
    """
    config = getattr(model, "config", None)
    if not any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__):
        return batch, None, None, False
    has_windows = _check_transformers(key, config)
    named = dict(batch.named)
    labels = named.get("labels")
    shifts = getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    if isinstance(labels, Tensor) and shifts and named.get("shift_labels") is None:
        if not _takes_all(model):
            raise ModelError(
                f"{key}.style: context: the loss of {type(model).__name__} shifts the labels of a "
                "part, and the label of its last token is in the next",
                hint="give rt.step a loss function, and labels that are shifted already",
            )
        named["shift_labels"] = functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
    mask = named.get("attention_mask")
    places = named.get("position_ids")
    documents = None
    if isinstance(places, Tensor) and places.dim() == 2 and mask is None:  # noqa: PLR2004 - as below
        documents = by_positions(places, batch_size(batch))
    real = None
    if isinstance(mask, Tensor) and mask.dim() == 2:  # noqa: PLR2004 - of samples and tokens
        del named["attention_mask"]
        if not bool(mask.all()):
            real = mask.bool()
    return batch._replace(named=named), real, documents, has_windows


def _takes_all(model: nn.Module) -> bool:
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _check_transformers(key: str, config: Any) -> bool:
    """Refuse what a model of transformers decides by the length that it sees.

    Returns:
        Whether it has layers with sliding windows.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    attention = getattr(text, "_attn_implementation", "sdpa")
    if attention not in ("sdpa", None):
        raise ModelError(
            f"{key}.style: context computes scaled_dot_product_attention for all ranks, and the "
            f"model has attn_implementation {attention!r}",
            hint="load it with attn_implementation='sdpa'",
        )
    kinds = set(getattr(text, "layer_types", None) or ())
    is_windowed = getattr(text, "sliding_window", None) and getattr(
        text, "use_sliding_window", True
    )
    kinds = kinds or ({_SLIDING} if is_windowed else set())
    others = kinds - {"full_attention", _SLIDING}
    if others or getattr(text, "attention_chunk_size", None):
        kind = min(others, default="chunked_attention")
        raise ModelError(
            f"{key}.style: context is for layers that see all tokens or a sliding window, and the "
            f"model has {kind}"
        )
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else ""
    if kind in ("dynamic", "longrope"):
        raise ModelError(
            f"{key}.style: context: rope_type {kind!r} follows the length that a rank sees",
            hint="choose one with fixed frequencies, such as linear, yarn or llama3",
        )
    return _SLIDING in kinds
