"""The arguments of a model's calls: those of the sample that it was traced with, and later ones."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from msrun.errors import ConfigError, ModelError
from msrun.parallel.auto.tracing.structure import leaves_of
from msrun.parallel.losses.batch import read_batch

_PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# In place of each tensor of the sample.
_TENSOR = object()


class CallForm:
    """What calls of a model must have in common with the one that was traced.

    A trace holds plain values of arguments as they were, so later ones must be equal.

    Args:
        model: Whose forward is called.
        sample: Its positional arguments.
    """

    def __init__(self, model: nn.Module, sample: Sequence[Any]) -> None:
        self._signature = inspect.signature(model.forward)
        self._names = list(self._arguments(sample, {}))
        traced = self._leaves_of(self._arguments(sample, {}))
        # Tensors of the sample are not kept in memory.
        self._leaves = [(name, _TENSOR if isinstance(x, Tensor) else x) for name, x in traced]

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the tensors and plain values of a call, in the order of the sample's.

        Raises:
            ModelError: They are not as many, or a plain value differs.
        """
        leaves = self._leaves_of(self._like_sample(args, kwargs))
        if len(leaves) != len(self._leaves):
            raise ModelError(
                f"the model got {len(leaves)} inputs, and the sample of rt.shard had "
                f"{len(self._leaves)}"
            )
        for (name, leaf), (_, traced) in zip(leaves, self._leaves, strict=True):
            is_tensor = isinstance(leaf, Tensor)
            if is_tensor != (traced is _TENSOR) or (not is_tensor and leaf != traced):
                raise ModelError(
                    f"the model got {name}={_shown(leaf)}, and mode auto traced it with "
                    f"{name}={_shown(traced)}",
                    hint="call rt.shard with the value that training uses, or pass a tensor",
                )
        return [leaf for _, leaf in leaves]

    def positional(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the arguments of a call by position, as the sample has them.

        Raises:
            ModelError: There are others than the sample has.
        """
        return list(self._like_sample(args, kwargs).values())

    def _like_sample(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that the sample has, those left out by their defaults."""
        given = self._arguments(args, kwargs)
        for name, item in given.items():
            if name not in self._names and not self._is_default(name, item):
                raise ModelError(
                    f"the model got {name}, which the sample of rt.shard had not",
                    hint="mode auto runs what it traced: give rt.shard a sample with every "
                    "argument, in the order of forward",
                )
        return {name: given.get(name, self._default(name)) for name in self._names}

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name; further positional ones by number."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ModelError(f"the forward of the model takes other inputs: {error}") from None
        found: dict[str, Any] = {}
        for name, item in bound.arguments.items():
            match self._signature.parameters[name].kind:
                case inspect.Parameter.VAR_POSITIONAL:
                    found |= {f"{name}[{at}]": one for at, one in enumerate(item)}
                case inspect.Parameter.VAR_KEYWORD:
                    found |= item
                case _:
                    found[name] = item
        return found

    def _is_default(self, name: str, item: Any) -> bool:
        known = self._signature.parameters.get(name)
        return item is None or (known is not None and item is known.default)

    def _default(self, name: str) -> Any:
        known = self._signature.parameters.get(name)
        return None if known is None or known.default is known.empty else known.default

    @staticmethod
    def _leaves_of(arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return [(name, leaf) for name, item in arguments.items() for leaf in leaves_of(item)]


def positional(model: nn.Module, sample: Sequence[Any] | Mapping[str, Any]) -> Sequence[Any]:
    """Return the inputs of one batch, which may be one mapping of inputs by name, by position."""
    if not isinstance(sample, Mapping):
        return sample
    batch = read_batch(model, [sample, None], has_loss=True)
    return by_position(model, batch.named) if batch.named else batch.inputs


def by_position(model: nn.Module, sample: Mapping[str, Any]) -> list[Any]:
    """Return a sample that has the inputs of `model` by name in the order of its forward.

    Raises:
        ConfigError: The forward does not take them so.
    """
    signature = inspect.signature(model.forward)
    try:
        signature.bind(**sample)
    except TypeError as error:
        raise ConfigError(f"the sample of rt.shard does not fit the forward: {error}") from None
    parameters = signature.parameters
    placed = [name for name, one in parameters.items() if one.kind in _PLACED]
    if unplaced := [name for name in sample if name not in placed]:
        raise ConfigError(
            f"parallel.mode: auto traces a model with positional arguments, and {unplaced[0]} has "
            "no place in its forward",
            hint=f"let forward take {unplaced[0]} as an argument of its own, before any *",
        )
    count = max((placed.index(name) + 1 for name in sample), default=0)
    return [sample.get(name, parameters[name].default) for name in placed[:count]]


def _shown(leaf: Any) -> str:
    return "a tensor" if isinstance(leaf, Tensor) or leaf is _TENSOR else repr(leaf)
