"""Tensors that ranks exchange together with their shapes and types.

Receivers know neither beforehand, so a header of each tensor goes first, as a message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from msrun.parallel.exchange import messages


class TensorHeader(msgspec.Struct, frozen=True):
    """Shape and type of a tensor.

    Args:
        shape: Its sizes.
        dtype: Name of its type.
    """

    shape: list[int]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * messages.dtype_named(self.dtype).itemsize


def broadcast(
    tensor: Tensor | None, source: int, group: dist.ProcessGroup | None, device: torch.device
) -> Tensor:
    """Return on all ranks of `group` the `tensor` of global rank `source`, on `device`.

    Args:
        tensor: The tensor; not used on other ranks.
        source: Global rank.
        group: The ranks; None for all of the job.
        device: Device whose tensors the group sends.

    Raises:
        ProtocolError: The rank sent no such header.
    """
    own = tensor if dist.get_rank() == source else None
    sent = None if own is None else _header(own)
    header = messages.broadcast(sent, TensorHeader, source, group, device)
    if own is None:
        received = torch.empty(
            header.shape, dtype=messages.dtype_named(header.dtype), device=device
        )
    else:
        received = own.to(device).contiguous()
    dist.broadcast(received, source, group=group)
    return received


def gather_all(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device
) -> list[list[Tensor]]:
    """Return the tensors of all ranks of `group`, in its order, on `device`.

    Args:
        tensors: This rank's.
        group: The ranks.
        device: Device whose tensors the group sends.

    Raises:
        ProtocolError: A rank sent no such headers.
    """
    headers = messages.gather_all([*map(_header, tensors)], list[TensorHeader], group, device)
    sizes = [sum(header.bytes for header in each) for each in headers]
    own = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    at = 0
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        own[at : at + data.numel()] = data
        at += data.numel()
    received = [torch.empty_like(own) for _ in headers]
    dist.all_gather(received, own, group=group)
    return [[*_cut(data, each)] for data, each in zip(received, headers, strict=True)]


def _header(tensor: Tensor) -> TensorHeader:
    return TensorHeader([*tensor.shape], messages.dtype_name(tensor.dtype))


def _cut(data: Tensor, headers: Sequence[TensorHeader]) -> Iterator[Tensor]:
    at = 0
    for header in headers:
        part = data[
            at : at + header.bytes
        ].clone()  # elements must begin at multiples of their size
        yield part.view(messages.dtype_named(header.dtype)).reshape(header.shape)
        at += header.bytes
