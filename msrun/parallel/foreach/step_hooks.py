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


def before_update(optimizer: torch.optim.Optimizer, call: Call) -> None:
    """Have `call` come before `optimizer.step` changes a parameter.

    That is where the step begins, and with a closure behind it, which has the gradients.
    """

    def change(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _behind_closure(args, kwargs, call)

    try:
        optimizer.register_step_pre_hook(change)
    except AttributeError:
        _replace_step(optimizer, change=change)


def change_losses(optimizer: torch.optim.Optimizer, change: Callable[[Any], Any]) -> None:
    """Have `optimizer.step` get what `change` makes of each loss that its closure returns."""

    def wrap(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _with_closure(args, kwargs, lambda closure: lambda: change(closure()))

    optimizer.register_step_pre_hook(wrap)


def after_step(optimizer: torch.optim.Optimizer, call: Call) -> None:
    """Have `optimizer.step` end with `call`."""
    try:
        optimizer.register_step_post_hook(lambda *_: _nothing(call()))
    except AttributeError:
        _replace_step(optimizer, after=call)


def _nothing(_: object) -> None:
    """Return None: torch takes what a hook returns for new arguments of the step."""


def _behind_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], call: Call
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a step with a closure that ends with `call`; call it without one.

    Args:
        args: Of the step: the optimizer, and maybe the closure.
        kwargs: Of the step.
        call: What comes behind the closure.
    """

    def ending(closure: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inner: Any, **options: Any) -> Any:
            loss = closure(*inner, **options)
            call()
            return loss

        return run

    changed = _with_closure(args, kwargs, ending)
    if changed is None:
        call()
    return changed


def _with_closure(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    change: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a step with what `change` makes of its closure; None without one."""
    own, *given = args
    closure = kwargs.get("closure", given[0] if given else None)
    if closure is None:
        return None
    if "closure" in kwargs:
        return args, {**kwargs, "closure": change(closure)}
    return (own, change(closure), *given[1:]), kwargs


def _replace_step(
    optimizer: torch.optim.Optimizer,
    *,
    before: Call = lambda: None,
    after: Call = lambda: None,
    change: Callable[..., Any] = lambda *_: None,
) -> None:
    replaced: Callable[..., Any] | None = vars(optimizer).get("step")
    plain: Callable[..., Any] = type(optimizer).step
    own = weakref.ref(optimizer)

    def step_of(self: Any, *args: Any, **kwargs: Any) -> Any:
        before()
        given, options = change(None, (self, *args), kwargs) or ((self, *args), kwargs)
        result = plain(*given, **options) if replaced is None else replaced(*given[1:], **options)
        after()
        return result

    @functools.wraps(replaced or plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        return step_of(own(), *args, **kwargs)

    # A scheduler that is made later takes the function of the bound method.
    step.__func__ = step_of  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
