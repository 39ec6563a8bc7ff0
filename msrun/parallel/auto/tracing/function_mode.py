"""A mode that sees every function of torch while it is active."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from torch.overrides import TorchFunctionMode


class FunctionMode(TorchFunctionMode):
    """While it is active, `call` stands for every function of torch."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return what `call` makes of a function; torch calls this."""
        del types
        return self.call(func, args, kwargs or {})

    @abstractmethod
    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of `function`, or another one."""
