"""Optimizers of no parameter, which torch refuses and some stages of a pipeline need.

A script that trains a part of its model, such as a head on a frozen body, gives the optimizer the
parameters of that part.  In a pipeline other stages have none of these, and take part in each step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_MARK = "takes_no_parameters"
_stages: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def allow_no_parameters(stage: nn.Module) -> None:
    """Have optimizers take an empty list as long as `stage` is there."""
    _stages.add(stage)
    kind: Any = torch.optim.Optimizer
    plain = kind.__init__
    if hasattr(plain, _MARK):
        return

    @functools.wraps(plain)
    def init(self: Any, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        if _stages and not isinstance(params, Tensor | dict):
            params = list(params) or [{"params": []}]
        plain(self, params, *args, **kwargs)

    setattr(init, _MARK, True)
    kind.__init__ = init
