"""What torch says of models that ZeRO cannot train, as one sentence.

A step runs forward, loss and backward inside of `named_errors`.  A plain loop calls the model by
itself, so its forward does the same (`name_errors_of`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.config import ROOT
from msrun.parallel.local import is_sharded

_NAMES_SHOWN = 3
# What torch says of shards beside gathered parameters, and beside those that a plan shards.
_OF_SHARDS = (
    "mixed torch.Tensor and DTensor",
    "Cross device mesh comm not supported",
    "on inputs with different meshes",
)


@contextlib.contextmanager
def named_errors(model: weakref.ref[nn.Module], level: int) -> Iterator[None]:
    """Say in one sentence what the model or the loss did that parameters of ZeRO do not allow.

    Args:
        model: The model, which what runs its steps must not keep alive.
        level: `zero` of the configuration.

    Raises:
        ModelError: It used a parameter outside of the forward of its unit, or wrote an input.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        own = model()
        if own is not None and (sentence := _sentence_of(error, own, level)):
            raise sentence from None
        raise


def name_errors_of(model: nn.Module, level: int) -> None:
    """Have the forward of `model` raise as `named_errors` does, wherever it is called."""
    model.forward = _NamedForward(model, model.forward, level)


class _NamedForward:
    """The forward of a model, whose errors are named."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any], level: int) -> None:
        self._model, self._level = model, level
        self.__wrapped__ = forward  # `inspect.signature` follows it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # No context: the compiler follows this.
        try:
            return self.__wrapped__(*args, **kwargs)
        except (RuntimeError, AssertionError) as error:
            if sentence := _sentence_of(error, self._model, self._level):
                raise sentence from None
            raise


def _sentence_of(
    error: RuntimeError | AssertionError, model: nn.Module, level: int
) -> ModelError | None:
    """Return the error of `error`; None if it is the model's."""
    if "RegisterPostBackwardFunction is a view and is being modified" in str(error):
        return ModelError(
            f"{ROOT}.optimizer.zero: a module writes its input in place, which is a view of "
            "what torch watches there",
            hint="write a copy: x = x.clone()",
        )
    if torch_compat.is_of_compiler(error):
        return ModelError(
            f"{ROOT}.optimizer.zero: torch.cond or another operator that compiles what it "
            f"calls cannot call modules whose parameters are gathered: {_first_line(error)}",
            hint="call the modules outside of its functions, or choose zero 0",
        )
    if torch_compat.is_of_two_types(error) and torch_compat.gathers_in_policy_type(model):
        return ModelError(
            f"{ROOT}.optimizer.zero: a product outside of autocast has factors of two types, and "
            f"ZeRO gathers in the narrower one: {_first_line(error)}",
            hint="leave out precision and optimizer.dtype, and enter torch.autocast in the script",
        )
    is_of_shards = any(text in str(error) for text in _OF_SHARDS)
    if not (is_of_shards or torch_compat.is_of_sharded_write(error)):
        return None
    names = [
        name
        for name, module in model.named_modules()
        if name
        and isinstance(module, FSDPModule)
        # Both are one class, which mypy does not know.
        and any(map(is_sharded, model.get_submodule(name).parameters()))
    ] or ["those of no unit"]
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ModelError(
        f"{ROOT}.optimizer.zero: a parameter was used outside of the forward of its module, "
        f"where level {level} has not gathered it: of {', '.join(names[:_NAMES_SHOWN])}{more}",
        hint=f"name the other modules in {ROOT}.optimizer.modules, since parameters of no unit "
        "are gathered all through forward; in the loss, call full_tensor() of a parameter",
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
