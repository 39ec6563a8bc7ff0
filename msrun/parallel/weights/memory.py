"""Notices what `param.data = tensor` does to a sharded parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from msrun.parallel.torch_compat import local_tensor, without_functions

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ParameterMemory:
    """The memory of a sharded parameter, which `param.data = tensor` exchanges.

    A `DTensor` has none: it is a shell around the tensor of this rank, which stays as it was.  What
    exchanges both, as `model.to(dtype)` does, is right.

    Args:
        param: The parameter.
    """

    def __init__(self, param: DTensor) -> None:
        self.param = param
        self._note()

    def is_exchanged(self) -> bool:
        """Return whether the shell alone is another."""
        # Of the class: functions of a plan take the part of this rank, and attributes of a
        # parameter whose update is on its way wait for it.
        with without_functions():
            pointer = Tensor.data_ptr(self.param)
            if pointer or Tensor.untyped_storage(self.param) is self._shell:
                return bool(pointer)
        is_alone = local_tensor(self.param) is self._part
        if not is_alone:
            self._note()
        return is_alone

    def _note(self) -> None:
        # torch returns the same object for the same memory as long as somebody holds it.
        self._shell, self._part = self.param.untyped_storage(), local_tensor(self.param)
