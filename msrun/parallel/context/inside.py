"""Modules of a model that enter a context by themselves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn


def has_no_attention(module: nn.Module) -> bool:
    """Return whether `module` is one of torch that calls no attention."""
    return type(module).__module__.startswith("torch.nn.modules")


class Inside:
    """The forward of a module, in a context.

    Args:
        context: The context.
        plain: The forward of the module by itself.
    """

    def __init__(
        self, context: Callable[[], AbstractContextManager[None]], plain: Callable[..., Any]
    ) -> None:
        self._context, self.plain = context, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        with self._context():
            return self.plain(*args, **kwargs)
