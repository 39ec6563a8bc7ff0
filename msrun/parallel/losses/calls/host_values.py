"""Values of samples that a script computes with in Python or numpy, and brings back to torch.

Nobody follows them there.  A number of a part of the batch that comes back as it is, such as
`x / x.std().item()`, is known by its value, and one that it was computed from by the source
(`size_factors`).  Of tensors that are made of lists, or of memory of
numpy, after values of samples were read, it is not known whether they mix samples: that is a
warning.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from msrun.parallel.losses.calls.marks import Mark, Mixture
from msrun.parallel.losses.notes import grad_fn_of
from msrun.parallel.losses.torch_calls import script_line

_READING = frozenset(["numpy", "__array__", "tolist"])
_NUMBERS = frozenset(["item", "__float__"])
_APPLY = Function.apply.__func__.__code__  # type: ignore[attr-defined]
_MAKING = frozenset(["tensor", "as_tensor", "asarray"])


class HostValues:
    """What a script read of a part of the batch."""

    def __init__(self) -> None:
        self._line = ""  # where values of samples were read
        self._numbers: dict[float, Mixture] = {}

    def follow(
        self, name: str, mark: Mark | None, mixture: Mixture | None, result: Any
    ) -> Mixture | None:
        """Note what a function hands to Python.

        Args:
            name: Of the function.
            mark: Of the tensor that it got.
            mixture: That this has.
            result: What it returned.

        Returns:
            Which mixture a number is.
        """
        if name in _READING and (mark or mixture) and not _is_own_function():
            self._line = script_line()
        statistic = Mixture(mark.statistic) if mark and mark.statistic else None
        number = mixture or statistic
        if name not in _NUMBERS or not number or not isinstance(result, float):
            return None
        if not result.is_integer():
            self._numbers[result] = number
        return number

    def mixture(self, name: str, args: Sequence[Any]) -> Mixture | None:
        """Return what the result of a function has from numbers or lists that it got."""
        # Losses of one number are looked at by `watch`.
        has_dims = any(isinstance(value, Tensor) and value.dim() for value in args)
        for value in args if self._numbers and has_dims else ():
            if type(value) is float and value in self._numbers:
                return self._numbers[value]
        is_made = name in _MAKING and bool(args) and not isinstance(args[0], Tensor | int | float)
        return self._unsure() if self._line and is_made else None

    def of_numpy(self, tensor: Tensor) -> Mixture | None:
        """Return that nobody knows what a tensor in memory of numpy was computed from."""
        if not self._line or type(tensor) is not Tensor or grad_fn_of(tensor) is not None:
            return None
        is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
        is_foreign = is_plain and not tensor.untyped_storage().resizable()
        return self._unsure() if is_foreign else None

    def _unsure(self) -> Mixture:
        return Mixture(
            f"values that Python or numpy computed of samples{self._line}", is_sure=False
        )


def _is_own_function() -> bool:
    """Return whether an autograd function of the script runs, of which only sizes are followed."""
    frame = inspect.currentframe()
    while frame and frame.f_code is not _APPLY:
        frame = frame.f_back
    return frame is not None
