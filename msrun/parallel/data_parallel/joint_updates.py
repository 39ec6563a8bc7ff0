"""Refuses optimizers that update a parameter by others, where they would not have the others.

Most optimizers update each parameter by itself.  Some do not: they estimate one learning rate for
all parameters (D-Adaptation, Prodigy), clip by a norm of all gradients, or draw random numbers for
one parameter after the other.  A stage of a pipeline gives such an optimizer its own parameters
alone, and a step of mixed groups gives it more groups than the script made (`mixed_groups`).

Nothing in an optimizer says what kind it is, so it is tried: one of its class and options updates
small parameters, once more with other gradients of half of them and other random numbers, and in
groups that are split.
Optimizers of torch need no trial.  One that cannot be made from its options is taken as it is.
"""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from msrun.errors import ModelError

_SHAPES = ((4, 4), (4,), (4,), (4, 4))
# Of the gradients of one step after the other: what clips does so at some of them, and an estimate
# grows in many that are alike.
_SIZES = (*(30 * [1.0]), 1e-3, 1e-2, 0.1, 0.1, 1.0, 1.0, 10.0, 10.0, 1e2, 1e4)
# A change that is less of what was learned is none: of the same operators, and of others, since
# some optimizers round to bfloat16.
_SAME, _ROUNDED = 1e-9, 1e-2
_GROUPS_MAX = 8
# Keys of a group that are of its own parameters.
_OWN = ("params", "param_names", "initial_lr")
_HINT = "choose another such as AdamW"

Split = Callable[[torch.optim.Optimizer], AbstractContextManager[Any]]
_stages: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_groups: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def check_stage(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of a stage which would need the parameters of the others.

    Raises:
        ModelError: It updates those of one stage otherwise than all together.
    """
    if _is_of_torch(optimizer) or optimizer in _stages:
        return
    with _unchanged():
        is_apart = _is_apart(optimizer)
    if not is_apart:
        raise ModelError(
            f"{type(optimizer).__name__} updates parameters by others, or by random numbers that "
            "it draws for one after the other, and a stage of a pipeline has its own parameters",
            hint=f"{_HINT}, or train without pipeline",
        )
    _stages.add(optimizer)


def check_split(optimizer: torch.optim.Optimizer, split: Split) -> None:
    """Refuse an optimizer that needs plain and sharded parameters in one group.

    Args:
        optimizer: Has such a group.
        split: Context in which an optimizer has a group for every other parameter of each group.

    Raises:
        ModelError: It updates them otherwise in groups of their own.
    """
    if _is_of_torch(optimizer) or optimizer in _groups:
        return
    with _unchanged():
        is_same = _is_split(optimizer, split)
    if not is_same:
        raise ModelError(
            f"{type(optimizer).__name__} updates parameters by others of their group, or by the "
            "number of their group, and plain and sharded parameters of one group get groups of "
            "their own in a step",
            hint=f"{_HINT}, or give it only replicated parameters",
        )
    _groups.add(optimizer)


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _is_apart(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether half of the parameters learn the same beside any other half."""
    try:
        whole = _learned(optimizer)
        other = _learned(optimizer, turn=-7.0, seed=1)
    except Exception:  # noqa: BLE001 - it is made or stepped in a way of its own
        return True
    return _is_close(other[::2], whole[::2], _SAME)


def _is_split(optimizer: torch.optim.Optimizer, split: Split) -> bool:
    """Return whether parameters learn the same in groups that are split."""
    try:
        whole = _learned(optimizer)
        other = _learned(optimizer, seed=1)
    except Exception:  # noqa: BLE001 - as above
        return True
    try:
        apart = _learned(optimizer, split=split)
    except Exception:  # noqa: BLE001 - it needs what it had before
        return False
    return _is_close(other, whole, _SAME) and _is_close(apart, whole, _ROUNDED)


def _is_close(learned: Sequence[Tensor], other: Sequence[Tensor], tolerance: float) -> bool:
    # What is no number, as after steps that are too long, tells nothing.
    return not any(
        (one - two).norm().item() > tolerance * two.norm().item()
        for one, two in zip(learned, other, strict=True)
    )


def _learned(
    optimizer: torch.optim.Optimizer,
    *,
    turn: float = 1.0,
    seed: int = 0,
    split: Split = contextlib.nullcontext,
) -> list[Tensor]:
    """Return by how much an optimizer like `optimizer` changes small parameters.

    Args:
        optimizer: Its class and options count.
        turn: By what every third gradient of every other parameter is multiplied.
        seed: Of the numbers that it draws.
        split: Context around each update.
    """
    torch.default_generator.manual_seed(seed)  # and not those of devices
    random.seed(seed)
    groups, trained = [], []
    for index, group in enumerate(optimizer.param_groups[:_GROUPS_MAX]):
        drawn = torch.Generator().manual_seed(index)
        params = [_Trained(shape, drawn) for shape in _SHAPES]
        for each in params[1::2]:
            each.turn = turn
        options = {k: copy.deepcopy(v) for k, v in group.items() if k not in _OWN}
        if "initial_lr" in group:  # the rate itself may begin at 0
            options["lr"] = copy.deepcopy(group["initial_lr"])
        groups.append({**options, "params": [each.param for each in params]})
        trained += params
    made, kind = _like(optimizer, groups), type(optimizer)
    step: Any = kind.step
    update = step.__wrapped__ if getattr(step, "hooked", False) else step
    for number, size in enumerate(_SIZES):
        for each in trained:
            each.param.grad = each.gradient * size * (1.0 if number % 3 else each.turn)
        with split(made):
            update(made)
    return [each.param.detach() - each.before for each in trained]


class _Trained:
    """A parameter with a gradient.

    Args:
        shape: Of the parameter.
        drawn: What draws both.
    """

    def __init__(self, shape: tuple[int, ...], drawn: torch.Generator) -> None:
        self.before, self.gradient = torch.randn((2, *shape), generator=drawn, dtype=torch.float64)
        self.param = Parameter(self.before.clone())
        self.turn = 1.0


def _like(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer of `groups` with the options and numbers of `optimizer`."""
    kind: Any = type(optimizer)
    code = kind.__init__.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    known = {**vars(optimizer), **optimizer.defaults}
    made: torch.optim.Optimizer = kind(
        groups, **{name: copy.deepcopy(known[name]) for name in names[2:] if name in known}
    )
    for name, value in vars(optimizer).items():
        if isinstance(value, int | float | str) and name in vars(made):
            setattr(made, name, value)
    return made


@contextlib.contextmanager
def _unchanged() -> Iterator[None]:
    """Put random numbers back, and let nothing warn."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(state)
