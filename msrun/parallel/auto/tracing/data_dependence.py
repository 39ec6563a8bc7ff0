"""Forwards that read values of tensors, which a trace has not: what they read may be known anyway.

`torch.export` follows a forward on tensors without values, so `if mask.all():` ends it.  Two kinds
of such forwards have one graph all the same:

- The value follows from shapes and plain numbers alone, such as that of a causal mask that the
  forward made: `nn.Transformer` compares one.  `KnownValues` notes each function whose tensors all
  come from such functions, on a tape.  Where the forward reads a value, the tape is replayed on
  real tensors.  Shapes and plain numbers cannot change without a refusal (`CallForm`,
  `PlainValues`), so the value that a graph holds is that of every step.
- Experts of transformers that loop over those with tokens (`experts_implementation="eager"`).  For
  a trace they become one grouped product, which transformers has for the same weights.

Numbers drawn at random, buffers, parameters and inputs are never known.  If a known tensor is
written with an unknown one, everything is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from msrun.parallel.auto.tracing.function_mode import FunctionMode
from msrun.parallel.auto.tracing.structure import leaf_tensors, mapped
from msrun.parallel.search.graph.random_ops import DRAWING
from msrun.parallel.search.graph.unsupported_ops import REFUSED
from msrun.parallel.torch_compat import outside_of_tracing, write_count

_READS = frozenset(
    [
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__complex__",
        "item",
        "tolist",
        "equal",
        "allclose",
        "is_nonzero",
        "__contains__",
    ]
)
_DRAWS = REFUSED | DRAWING
# Assigns an attribute such as `data`, which counts as no write.
_ASSIGNS = "__set__"


class _Call(NamedTuple):
    """One function of the tape, with what it returned in the trace."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class KnownValues(FunctionMode):
    """While it is active, a forward can read values that follow from shapes and plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._tape: list[_Call] = []
        # Kept, so that no other tensor gets the identity of one of them.
        self._known: dict[int, Tensor] = {}

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run `function`; see the class."""
        given = leaf_tensors([args, kwargs])
        known = [tensor for tensor in given if id(tensor) in self._known]
        name = getattr(function, "__name__", "")
        if given and len(known) == len(given) and name in _READS:
            return self._read(function, args, kwargs)
        writes = [write_count(tensor) for tensor in known]
        result = function(*args, **kwargs)
        if len(known) == len(given) and name.removesuffix("_") not in _DRAWS:
            self._tape.append(_Call(function, args, kwargs, result))
            self._known |= {id(made): made for made in leaf_tensors(result)}
        elif known and (name == _ASSIGNS or writes != [write_count(one) for one in known]):
            self._tape.clear()
            self._known.clear()
        return result

    def _read(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what `func` reads of real tensors, on which the tape is replayed."""
        real: dict[int, Tensor] = {}

        def of(leaf: Any) -> Any:
            return real[id(leaf)] if isinstance(leaf, Tensor) else leaf

        with outside_of_tracing(), torch.no_grad():
            for call in self._tape:
                result = call.function(*mapped(call.args, of), **mapped(call.kwargs, of))
                pairs = zip(leaf_tensors(call.result), leaf_tensors(result), strict=True)
                real.update((id(traced), made) for traced, made in pairs)
            return func(*mapped(args, of), **mapped(kwargs, of))


def reads_values(error: BaseException) -> bool:
    """Return whether a trace ended since the forward reads values of tensors."""
    return "data-dependent" in str(error) or "unbacked" in str(error).lower()


@contextmanager
def grouped_experts(model: nn.Module) -> Iterator[bool]:
    """Inside, experts of transformers that loop are one grouped product.

    Yields:
        Whether the model has any.
    """
    every: dict[int, Any] = {id(own): own for own in _configs(model)}
    key = "_experts_implementation"
    configs = {at: own for at, own in every.items() if getattr(own, key, "") == "eager"}
    try:
        for config in configs.values():
            setattr(config, key, "grouped_mm")
        yield bool(configs)
    finally:
        for config in configs.values():
            setattr(config, key, "eager")


def _configs(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        yield getattr(module, "config", None)
