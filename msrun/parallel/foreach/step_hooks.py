"""Functions of ours that run before and after each step of an optimizer, of any library.

An optimizer of torch has hooks for them.  One that wraps another often never called the
constructor of its base class and has none (`AcceleratedOptimizer`, `ScheduleFreeWrapper`), or has
no base class of torch: then its `step` is replaced by one that calls them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], object]


def before_step(optimizer: torch.optim.Optimizer, call: Call) -> None:
    """Have `optimizer.step` begin with `call`."""
    try:
        optimizer.register_step_pre_hook(lambda *_: _nothing(call()))
    except AttributeError:
        _replace_step(optimizer, before=call)


def after_step(optimizer: torch.optim.Optimizer, call: Call) -> None:
    """Have `optimizer.step` end with `call`."""
    try:
        optimizer.register_step_post_hook(lambda *_: _nothing(call()))
    except AttributeError:
        _replace_step(optimizer, after=call)


def _nothing(_: object) -> None:
    """Return None: torch takes what a hook returns for new arguments of the step."""


def _replace_step(
    optimizer: torch.optim.Optimizer, *, before: Call = lambda: None, after: Call = lambda: None
) -> None:
    replaced: Callable[..., Any] | None = vars(optimizer).get("step")
    plain: Callable[..., Any] = type(optimizer).step
    own = weakref.ref(optimizer)

    def step_of(self: Any, *args: Any, **kwargs: Any) -> Any:
        before()
        result = plain(self, *args, **kwargs) if replaced is None else replaced(*args, **kwargs)
        after()
        return result

    @functools.wraps(replaced or plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        return step_of(own(), *args, **kwargs)

    # A scheduler that is made later takes the function of the bound method.
    step.__func__ = step_of  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
