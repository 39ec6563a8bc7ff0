"""Weights that a module computes from other parameters (`nn.utils.parametrize`), on shards.

A norm of rows or a spectral norm needs all of the weight, so what it is computed from stays whole
and the same on every rank.  One more parametrization behind those of the script takes this rank's
shard of the result; its backward pass gathers the gradient of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class _Shard(nn.Module):
    """The last parametrization of a weight.

    Args:
        put: Puts the weight where the plan wants it.
    """

    def __init__(self, put: Callable[[Tensor], DTensor]) -> None:
        super().__init__()
        self._put = put

    def forward(self, weight: Tensor) -> DTensor:
        """Return the shard of `weight`."""
        return self._put(weight)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the whole of what a script assigns."""
        return weight.full_tensor() if isinstance(weight, DTensor) else weight


def shard_computed(module: nn.Module, name: str, put: Callable[[Tensor], DTensor]) -> None:
    """Have `module` compute with the part of the weight `name` that `put` returns.

    Not by `register_parametrization`, which computes the weight: spectral norms take a step then.
    """
    steps: Any = module.parametrizations
    steps[name].append(_Shard(put))
