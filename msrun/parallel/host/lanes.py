"""Ways of the memory of tensors to the host and back: beside the computation on a device."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Back(Protocol):
    """A copy on its way to the device."""

    def wait(self) -> Tensor:
        """Return it, for what is computed from now on."""
        ...


class Lane(Protocol):
    """The way to the host and back."""

    def send(self, memory: Tensor, /) -> Tensor:
        """Return a copy on the host, which may be on its way."""
        ...

    def fetch(self, host: Tensor, /) -> Back:
        """Start a copy from the host."""
        ...


class HostMemory:
    """Where the device is the host: copies at once, so that everything else is as on a device."""

    def send(self, memory: Tensor) -> Tensor:
        """Return a copy."""
        return memory.clone()

    def fetch(self, host: Tensor) -> Back:
        """Return a copy of a copy."""
        return _Here(host.clone())


class _Here(NamedTuple):
    memory: Tensor

    def wait(self) -> Tensor:
        return self.memory


class CopyStream:
    """Copies between a device and pinned memory, on a stream of their own.

    They are in order on this stream, so a copy comes back after it has gone.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream: Any = self._module.Stream(device)

    def send(self, memory: Tensor) -> Tensor:
        """Start a copy to the host."""
        host = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True)
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            host.copy_(memory, non_blocking=True)
        # The allocator may give the memory away once the copy is done, too.
        memory.record_stream(self._stream)
        return host

    def fetch(self, host: Tensor) -> Back:
        """Start a copy from the host."""
        with self._module.stream(self._stream):
            memory = host.to(self._device, non_blocking=True)
            return _Arriving(self._module, memory, self._stream.record_event())


class _Arriving(NamedTuple):
    module: Any
    memory: Tensor
    event: Any

    def wait(self) -> Tensor:
        """Have the current stream wait for it."""
        stream = self.module.current_stream(self.memory.device)
        stream.wait_event(self.event)
        self.memory.record_stream(stream)
        return self.memory
