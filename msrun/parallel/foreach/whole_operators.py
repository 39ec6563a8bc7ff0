"""What scripts do to sharded tensors for which torch has no rule: rows by index, masks, `renorm_`.

`param.data[index] = 0.0` with a plain index, a loop over the rows of a weight, the weights of an
embedding cut to a norm: torch refuses each for a DTensor.  All ranks of a script do them together,
so each rank gathers the tensors, computes what one process does, and keeps its part of what was
written.  What is read is whole on each rank.

As in `whole_values`, what the model itself computes is left alone, and so is what autograd follows
where ranks have gradients each, of samples of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from msrun.parallel import torch_compat
from msrun.parallel.foreach.whole_values import (
    is_in_model,
    is_of_samples,
    keep_written,
    note_given,
    placed,
)
from msrun.parallel.local import is_sharded, local_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Operators that torch refuses for DTensors, or for a DTensor and a plain tensor; none of those that
# models of plans call often.
_OPERATORS = """
    _unique2 addmm addmm_ allclose cat copy_ dot eq gather ge gt index index_add index_add_
    index_copy index_copy_ index_fill index_fill_ index_put index_put_ index_select l1_loss le
    lt masked_fill masked_fill_ masked_scatter masked_scatter_ masked_select mse_loss mv ne
    nonzero renorm renorm_ scatter scatter_ scatter_add scatter_add_ stack take tril_ triu_
    unbind where
"""


def support_operators() -> None:
    """Have scripts call operators with sharded tensors that torch refuses for them."""
    torch_compat.replace_refused(_OPERATORS, _compute)


def _compute(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[DTensor]
) -> Any:
    """Return what `operator` returns for whole tensors, and write parts of them.

    Args:
        operator: Of torch.
        args: Its arguments.
        kwargs: The same, by name.
        written: Sharded arguments that it writes.

    Returns:
        `NotImplemented` where torch's error is to be raised.
    """
    given = _tensors((*args, *kwargs.values()))
    sharded = [value for value in given if is_sharded(value)]
    has_samples = any(map(is_of_samples, sharded))
    is_followed = has_samples and torch.is_grad_enabled()
    is_followed &= any(value.requires_grad for value in given)
    is_traced = torch_compat.is_in_backward() or torch_compat.is_tracing()
    has_partial = any(place.is_partial() for value in written for place in value.placements)
    if is_followed or is_traced or has_partial or is_in_model():
        return NotImplemented
    # Ranks without samples of their own have the same but for rounding, which a read may leave.
    is_compared = bool(written) or has_samples
    wholes: dict[int, Tensor] = {}  # by the number of an object that lives as long as `given`
    for value in given:
        wholes[id(value)] = value.full_tensor() if is_sharded(value) else value
        if is_compared and not is_sharded(value) and value.numel() > 1:
            note_given(value)

    def whole(value: Any) -> Any:
        return wholes.get(id(value), value)

    args_of_one, kwargs_of_one = torch_compat.mapped(whole, (args, kwargs)) or (args, kwargs)
    result = operator(*args_of_one, **kwargs_of_one)
    for value in written:
        local_part(value).copy_(local_part(placed(whole(value), value)))
        if (base := torch_compat.lost_base(value)) is not None:
            keep_written(value, base)
    mesh = sharded[0].device_mesh
    as_given = {id(whole(value)): value for value in given}

    def shared(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        known = as_given.get(id(value))
        return torch_compat.as_replicated(value, mesh) if known is None else known

    changed = torch_compat.mapped(shared, result)
    return result if changed is None else changed


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among the arguments of an operator, and in lists of them."""
    items = (item for x in values for item in (x if isinstance(x, list | tuple) else (x,)))
    return [item for item in items if isinstance(item, Tensor)]
