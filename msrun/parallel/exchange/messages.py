"""Values that ranks exchange: msgpack of one type, as bytes in tensors.  Nothing is pickled.

torch's collectives of objects pickle, so a peer that is not what it seems would run code here.
These decode a value only as the type that the caller names, and refuse lengths above a limit before
memory is taken for them.  Each costs two collectives: of the lengths, and of the bytes, which are
padded to the longest.

All ranks of the group call the same function.  Ranks that send what does not decode, or too much,
are named by the error, which all receivers raise.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from msrun.errors import ProtocolError
from msrun.units import quoted

BYTES_MAX = 1 << 30

_HOST = torch.device("cpu")
_T = TypeVar("_T")


class SentTensor(msgspec.Struct, frozen=True):
    """A tensor as plain values, for those too small or too odd for a collective of their own.

    Args:
        shape: Its sizes.
        dtype: Name of its type.
        data: Its elements in row-major order.
    """

    shape: list[int]
    dtype: str
    data: bytes

    @staticmethod
    def of(tensor: Tensor) -> SentTensor:
        """Return `tensor`, which may be on any device."""
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
        data = _content(flat.view(torch.uint8)) if flat.numel() else b""
        return SentTensor([*tensor.shape], dtype_name(tensor.dtype), data)

    def tensor(self) -> Tensor:
        """Return the tensor, on the host.

        Raises:
            ProtocolError: The data does not fit shape and type.
        """
        dtype = dtype_named(self.dtype)
        if len(self.data) != math.prod(self.shape) * dtype.itemsize or min([0, *self.shape]) < 0:
            raise ProtocolError(f"{len(self.data)} bytes are no {self.dtype} tensor {self.shape}")
        if not self.data:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).reshape(self.shape)


def gather_all(
    value: _T, kind: type[_T], group: dist.ProcessGroup | None, device: torch.device = _HOST
) -> list[_T]:
    """Return the values of all ranks of `group`, in its order.

    Args:
        value: This rank's value.
        kind: Type that all values have.
        group: The ranks; None for all of the job.
        device: Device whose tensors the group sends.

    Raises:
        ProtocolError: A rank sent no such value.
    """
    own = _bytes(value)
    lengths = _lengths(own.numel(), group, device)
    received = [torch.empty(max(lengths), dtype=torch.uint8, device=device) for _ in lengths]
    dist.all_gather(received, _padded(own, max(lengths), device), group=group)
    return _decoded(received, lengths, kind, group)


def gather_to_first(value: _T, kind: type[_T], group: dist.ProcessGroup) -> list[_T]:
    """Return on the first rank of `group` the values of all, and an empty list elsewhere.

    For a group on the host.
    """
    own = _bytes(value)
    lengths = _lengths(own.numel(), group, _HOST)
    first = dist.get_process_group_ranks(group)[0]
    is_first = dist.get_rank() == first
    received = [torch.empty(max(lengths), dtype=torch.uint8) for _ in lengths if is_first]
    dist.gather(_padded(own, max(lengths), _HOST), received or None, dst=first, group=group)
    return _decoded(received, lengths, kind, group) if is_first else []


def scatter_from_first(values: Sequence[_T], kind: type[_T], group: dist.ProcessGroup) -> _T:
    """Return this rank's entry of the `values` of the first rank of `group`.

    For a group on the host.
    """
    first = dist.get_process_group_ranks(group)[0]
    parts = [_bytes(value) for value in values] if dist.get_rank() == first else []
    sizes = torch.tensor([part.numel() for part in parts] or [0] * group.size())
    dist.broadcast(sizes, first, group=group)
    lengths = _checked(sizes.tolist(), [first] * group.size())
    own = torch.empty(max(lengths), dtype=torch.uint8)
    padded = [_padded(part, max(lengths), _HOST) for part in parts]
    dist.scatter(own, padded or None, src=first, group=group)
    [value] = _decode([own[: lengths[dist.get_group_rank(group, dist.get_rank())]]], kind, [first])
    return value


def broadcast(
    value: _T | None,
    kind: type[_T],
    source: int,
    group: dist.ProcessGroup | None,
    device: torch.device = _HOST,
) -> _T:
    """Return on all ranks of `group` the `value` of global rank `source`.

    Args:
        value: The value; not used on other ranks.
        kind: Its type.
        source: Global rank.
        group: The ranks; None for all of the job.
        device: Device whose tensors the group sends.

    Raises:
        ProtocolError: The rank sent no such value.
    """
    is_source = dist.get_rank() == source
    data = _bytes(value) if is_source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()], device=device)
    dist.broadcast(size, source, group=group)
    [length] = _checked(size.tolist(), [source])
    data = data.to(device) if is_source else torch.empty(length, dtype=torch.uint8, device=device)
    dist.broadcast(data, source, group=group)
    [found] = _decode([data], kind, [source])
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype`, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the type that another rank called `name`.

    Raises:
        ProtocolError: There is none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ProtocolError(f"{quoted(name)} is no type of tensors")
    return found


def _bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)


def _lengths(own: int, group: dist.ProcessGroup | None, device: torch.device) -> list[int]:
    size = torch.tensor([own], device=device)
    ranks = dist.get_process_group_ranks(group)
    sizes = [torch.empty_like(size) for _ in ranks]
    dist.all_gather(sizes, size, group=group)
    return _checked([int(each) for each in torch.cat(sizes).tolist()], ranks)


def _content(data: Tensor) -> bytes:
    on_host = data.cpu().contiguous()
    return ctypes.string_at(on_host.data_ptr(), on_host.numel())


def _checked(lengths: list[int], ranks: Sequence[int]) -> list[int]:
    for length, rank in zip(lengths, ranks, strict=True):
        if not 0 < length <= BYTES_MAX:
            raise ProtocolError(f"rank {rank} sends {length} bytes (limit {BYTES_MAX})")
    return lengths


def _padded(data: Tensor, length: int, device: torch.device) -> Tensor:
    padded = torch.zeros(length, dtype=torch.uint8)
    padded[: data.numel()] = data
    return padded.to(device)


def _decoded(
    received: Sequence[Tensor],
    lengths: Sequence[int],
    kind: type[_T],
    group: dist.ProcessGroup | None,
) -> list[_T]:
    parts = [data[:length] for data, length in zip(received, lengths, strict=True)]
    return _decode(parts, kind, dist.get_process_group_ranks(group))


def _decode(parts: Sequence[Tensor], kind: type[_T], ranks: Sequence[int]) -> list[_T]:
    decoder = msgspec.msgpack.Decoder(kind)
    values = []
    for part, rank in zip(parts, ranks, strict=True):
        try:
            values.append(decoder.decode(_content(part)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"rank {rank} sent no {kind}: {error}") from None
    return values
