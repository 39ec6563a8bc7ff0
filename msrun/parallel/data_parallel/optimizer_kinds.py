"""Refuses optimizers that are wrong on sharded parameters, or in `rt.step`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from msrun.errors import ModelError
from msrun.parallel.collectives import all_reduce
from msrun.parallel.config import DATA_AXIS
from msrun.parallel.foreach.step_hooks import change_losses
from msrun.parallel.local import is_sharded
from msrun.parallel.uneven_rows.rows import rows_of

# Optimizer -> the operation that is wrong on shards, or that DTensor does not have.  By the name of
# its class: several libraries have one of this name, and not every release of torch has all.
_NEEDS_REPLICATED = {
    "Adafactor": "takes norms of whole rows and columns",
    "AdamP": "projects whole matrices",
    "Kron": "multiplies whole matrices",
    "Mars": "takes norms of whole parameters",
    "Muon": "multiplies whole matrices, in a short type whose rounding depends on their parts",
    "NvNovoGrad": "takes norms of whole parameters",
    "Rprop": "writes elements by a mask",
    "SGDP": "projects whole matrices",
    "SOAP": "multiplies whole matrices",
    "Shampoo": "multiplies whole matrices",
    "SparseAdam": "takes sparse gradients",
}

# Optimizers that compute each element by itself.
_BY_ELEMENT = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
)


def check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that would fail in the middle of a step, or give another result.

    Raises:
        ModelError: It computes the loss several times a step, or has sharded parameters and needs
            replicated ones.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError(
            f"{name} computes the loss several times a step, and rt.step computes it once",
            hint="choose another, or use it in a plain loop without rt.optimizer",
        )
    _check_tables(optimizer)
    for kind in type(optimizer).__mro__:
        if reason := _NEEDS_REPLICATED.get(kind.__name__):
            _check_replicated(optimizer, f"{name} {reason}")


def support_several_losses(optimizer: torch.optim.LBFGS, op: Literal["mean", "sum"] | None) -> None:
    """Have an optimizer of a plain loop decide by the losses of all ranks where to go on.

    Args:
        optimizer: It computes the loss several times a step.
        op: How data-parallel ranks reduce gradients; None for one of them.

    Raises:
        ModelError: It has sharded parameters.
    """
    name = type(optimizer).__name__
    _check_replicated(optimizer, f"{name} makes one vector of all gradients")
    if op:
        change_losses(optimizer, lambda loss: all_reduce(_number(loss), DATA_AXIS, op))


def _number(loss: Tensor | float) -> Tensor:
    return torch.as_tensor(loss).detach().clone()


def _check_tables(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of a table's rows unless it computes each element for itself."""
    if any(kind.__name__ in _BY_ELEMENT for kind in type(optimizer).__mro__):
        return
    for group in optimizer.param_groups:
        for rows in filter(None, map(rows_of, group["params"])):
            raise ModelError(
                f"{type(optimizer).__name__} has {rows.name}, of which this rank has some rows "
                f"alone (choose {', '.join(_BY_ELEMENT)}, or a class made of one)"
            )


def _check_replicated(optimizer: torch.optim.Optimizer, reason: str) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if sharded := sum(map(is_sharded, params)):
        raise ModelError(
            f"{reason}, and {sharded} of its {len(params)} parameters are sharded",
            hint="choose another such as AdamW, or give it only replicated parameters",
        )
