"""A copy of a tensor on the host that waits for the device only when it is read."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor on the host; a GPU makes it when it gets there."""

    def __init__(self, tensor: Tensor) -> None:
        is_async = tensor.device.type == "cuda"
        self._copy = tensor.to("cpu", non_blocking=True) if is_async else tensor
        self._event = torch.Event(tensor.device) if is_async else None
        if self._event is not None:
            self._event.record()

    def read(self) -> list[float]:
        """Return the numbers; wait until the device has them."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._copy.tolist()
        return numbers
