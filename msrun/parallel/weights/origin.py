"""What a model was before `rt.shard`: the names of all its tensors, and how its library saves it.

A pipeline stage has some of the names alone, and where two stages share a weight each has its own
copy under one of the names.  Files of pretrained models have all names, or for a shared weight just
one of them.  `Origin` knows which names belong together, and what else the model's library keeps
with its weights; for a pipeline it is read before the model is taken apart.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import msgspec
from torch import nn

from msrun.parallel.checkpoint.state import TensorNames


class Library(msgspec.Struct, frozen=True, kw_only=True):
    """What transformers, diffusers or peft know of a model beside its tensors.

    Args:
        stem: Begin of the names of its files.
        config: Object with `save_pretrained`; None without one.
        generation: The same, of its settings of `generate`.
        config_text: Contents of `config.json` where the library has no such object.
        tied: Name that is not saved -> name of the same tensor, which is.
        unsaved: Names that are not saved.
        missing: Patterns of names that a file may lack.
        unexpected: Patterns of names that a file may have, and that are not loaded.
        prefix: Name of the base model in a model with a head; empty without one.
        transforms: How transformers turns names and tensors of files into those of the model.
        adapters: Names of peft's adapters; empty for other models.
    """

    stem: str = "model"
    config: Any = None
    generation: Any = None
    config_text: str = ""
    tied: Mapping[str, str] = {}
    unsaved: Sequence[str] = ()
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    prefix: str = ""
    transforms: Sequence[Any] = ()
    adapters: Sequence[str] = ()


class Origin:
    """A model as it was before `rt.shard`.

    Args:
        model: The model, which is only referred to weakly.
        is_consumed: Whether `rt.shard` takes it apart, so that everything is read at once.

    Attributes:
        kind: Name of its class.
    """

    def __init__(self, model: nn.Module, *, is_consumed: bool) -> None:
        self.kind = type(model).__name__
        self._model = weakref.ref(model)
        if is_consumed:
            _ = self._names, self.library

    def __deepcopy__(self, _: object) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A model that `torch.save` writes has hooks that know its names, and no other use for this.
        return {"kind": self.kind, "_names": self._names, "library": Library()}

    @cached_property
    def _names(self) -> tuple[dict[str, str], list[str]]:
        """Name -> first name of the same tensor, in order; and names of extra state."""
        found = TensorNames((), 0, self._there())
        first = dict.fromkeys(found.order, "")
        for name in first:
            first[name] = found.aliases.get(name, name)
        return first, list(found.extra)

    @cached_property
    def library(self) -> Library:
        """What the library of the model knows of it."""
        return _library(self._there())

    @property
    def first(self) -> Mapping[str, str]:
        """Every name in the state dict -> the first name of the same tensor; in order."""
        return self._names[0]

    @property
    def extra(self) -> Sequence[str]:
        """Names of extra state, of `get_extra_state`."""
        return self._names[1]

    @cached_property
    def groups(self) -> Mapping[str, Sequence[str]]:
        """First name of a tensor -> all its names, in order."""
        found: dict[str, list[str]] = {}
        for name, first in self.first.items():
            found.setdefault(first, []).append(name)
        return found

    def saved_names(self, first: str) -> list[str]:
        """Return the names under which a tensor is saved, given its first one.

        A library that ties its weights by itself needs one of them; whoever loads the file with
        `load_state_dict` needs all.
        """
        library, group = self.library, self.groups[first]
        wanted = [name for name in group if name not in library.unsaved]
        kept = [name for name in wanted if library.tied.get(name) not in group]
        return kept or wanted[:1]

    def _there(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise ReferenceError("the model of rt.shard is gone")
        return model


def _library(model: nn.Module) -> Library:
    if is_a(model, "peft.peft_model", "PeftModel"):
        inner: Any = model
        base = _library(inner.get_base_model())
        return msgspec.structs.replace(base, adapters=list(inner.peft_config))
    if is_a(model, "transformers.modeling_utils", "PreTrainedModel"):
        return _of_transformers(model)
    if is_a(model, "diffusers.models.modeling_utils", "ModelMixin"):
        text = model.to_json_string()  # type: ignore[operator]  # of diffusers
        return Library(stem="diffusion_pytorch_model", config_text=text)
    return Library()


def is_a(model: nn.Module, module: str, kind: str) -> bool:
    """Return whether `model` is of a class of a library, which is not imported for it."""
    found = getattr(sys.modules.get(module), kind, None)
    return found is not None and isinstance(model, found)


def _of_transformers(model: Any) -> Library:
    return Library(
        config=model.config,
        generation=model.generation_config if model.can_generate() else None,
        tied=dict(getattr(model, "all_tied_weights_keys", None) or {}),
        unsaved=list(getattr(model, "_keys_to_ignore_on_save", None) or ()),
        missing=list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ()),
        unexpected=list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        prefix=model.base_model_prefix,
        transforms=_transforms(model),
        adapters=list(getattr(model, "peft_config", ())),
    )


def _transforms(model: Any) -> Sequence[Any]:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # releases before 5 have none
        return ()
    return list(get_model_conversion_mapping(model))
