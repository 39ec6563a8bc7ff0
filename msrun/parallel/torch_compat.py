"""The names torch does not promise to keep, each behind one function with a test of its own."""

from __future__ import annotations

from collections.abc import Callable

from torch.autograd.variable import Variable


def after_backward(call: Callable[[], None]) -> None:
    """Have the running backward pass end with `call`, on the thread that started it.

    Raises:
        RuntimeError: No backward pass is running.
    """
    Variable._execution_engine.queue_callback(call)  # noqa: SLF001 - there is no public form
