"""What an entry of the table of models is, and what several of them share."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from zoo_modules import VOCABULARY  # type: ignore[import-not-found]  # beside this file


def _make_torchvision_importable() -> None:
    """Declare the operators without which torchvision cannot be imported."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # it is built for another torch; its models need none of its operators
        declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(declared)
        importlib.import_module("torchvision")


_DECLARED: list[torch.library.Library] = []
_make_torchvision_importable()

SAMPLES = 8
LENGTH, CLASSES = 12, 8
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
# Of a model that reads texts in both directions.
ENCODER: dict[str, Any] = {
    **{key: value for key, value in TEXT.items() if key != "num_key_value_heads"},
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
SEEN: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_labels": CLASSES,
}

# A name of a plan that ships; or rules, where none has them; none is no plan.
Plan = str | Sequence[dict[str, str]]
Optimizer = Callable[[Any], torch.optim.Optimizer]
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """One model.

    Args:
        needs: The package that has it; empty for torch alone.
        make: Builds it.
        inputs: Returns the inputs of a batch: by position, or by name if the model returns its
            loss.
        target: Returns its target.
        loss: Of output and target; None if the model returns its loss, and then there is no target.
        blocks: Names of the lists whose members are recomputed.
        plan: Of tensor parallel.
        optimizer: Makes the optimizer of its parameters.
        is_combined: Whether it is trained in the configurations of two techniques, too.
    """

    needs: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    target: Callable[[], Tensor] | None = None
    loss: Callable[[Any, Tensor], Tensor] | None = None
    blocks: Sequence[str] = ()
    plan: Plan = ()
    optimizer: Optimizer = ADAMW
    is_combined: bool = False


def styles(**patterns: Sequence[str]) -> list[dict[str, str]]:
    """Return the rules of a plan: style -> patterns of modules."""
    return [{"match": m, "style": style} for style, found in patterns.items() for m in found]


def of(package: str, name: str, settings: str = "", **options: Any) -> nn.Module:
    """Build a model of a package from a class and, if it has one, its configuration."""
    module = importlib.import_module(package)
    if not settings:
        return getattr(module, name)(**options)  # type: ignore[no-any-return]
    return getattr(module, name)(getattr(module, settings)(**options))  # type: ignore[no-any-return]


def _field(output: Any) -> Tensor:
    """Return the tensor of an output."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "sample", "logits_per_text"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    raise TypeError(type(output))


def by_class(output: Any, target: Tensor) -> Tensor:
    """Return the cross entropy of logits."""
    logits = _field(output)
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def squared(output: Any, target: Tensor) -> Tensor:
    """Return the mean of squared distances."""
    return functional.mse_loss(_field(output), target)


def of_pairs(output: Any, target: Tensor) -> Tensor:
    """Return the loss of scores of text and image of each sample."""
    scores = _field(output).diagonal()
    return functional.binary_cross_entropy_with_logits(scores, target)


def tokens(length: int = LENGTH) -> Tensor:
    """Return words of texts."""
    return torch.randint(1, VOCABULARY, (SAMPLES, length))


def image(size: int = 16, channels: int = 3) -> Tensor:
    """Return images."""
    return torch.randn(SAMPLES, channels, size, size, dtype=torch.float64)


def classes() -> Tensor:
    """Return the class of each sample."""
    return torch.randint(0, CLASSES, (SAMPLES,))


def padded() -> Tensor:
    """Return targets of which some do not count."""
    target = tokens()
    target[0, 7:] = target[3, 4:] = -100
    return target


def labelled() -> dict[str, Tensor]:
    """Return a batch by name, with padding, of a model that returns its loss."""
    labels, words = padded(), tokens()
    mask = torch.ones(SAMPLES, LENGTH, dtype=torch.int64)
    mask[0, 7:] = mask[3, 4:] = 0
    return {"input_ids": words, "attention_mask": mask, "labels": labels}
