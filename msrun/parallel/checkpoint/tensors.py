"""Data files of checkpoints: safetensors, written one tensor at a time and read in parts.

The format is eight bytes with the length of a JSON header, the header, and the elements.  Header
and positions are planned before any tensor is there, so rank 0 can write the index of all files,
and a rank needs host memory for one tensor.  Tests compare with the safetensors package, which
msrun does not need.  Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from msrun.errors import CheckpointError
from msrun.parallel.checkpoint.checksums import DataFiles, RunningChecksums
from msrun.parallel.checkpoint.schema import ITEM_BYTES, Chunk, Index, StoredTensor

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}

_LENGTH_BYTES = 8
_HEADER_BYTES_MAX = 100_000_000  # as in the reference implementation
_ALIGNMENT = 8
_RUN_BYTES_MIN = 4096  # a disk reads whole pages


class FileTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of a tensor in a data file.

    Args:
        name: Its name in the file.
        dtype: A key of `ITEM_BYTES`.
        shape: Its sizes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class FilePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A data file before it is written.

    Args:
        slots: Entries of its tensors, in the order of the file.
        starts: First byte of each tensor.
        header: All bytes before the first tensor.
        nbytes: Size of the file in bytes.
    """

    slots: list[FileTensor]
    starts: list[int]
    header: bytes
    nbytes: int


def slot(name: str, tensor: Tensor) -> FileTensor:
    """Return the entry of `tensor` in a data file.

    Raises:
        CheckpointError: It cannot be stored.
    """
    return FileTensor(name=name, dtype=check_storable(name, tensor), shape=tuple(tensor.shape))


def check_storable(name: str, tensor: Tensor) -> str:
    """Return the safetensors name of the type of `tensor`.

    Raises:
        CheckpointError: The format has no such type, or the tensor is sparse or on `meta`.
    """
    if tensor.layout != torch.strided:
        raise CheckpointError(
            f"{name} is {_short(tensor.layout)}, and a checkpoint holds dense tensors"
        )
    if tensor.device.type == "meta":
        raise CheckpointError(f"{name} is on the device meta, where it has no values")
    code = CODES.get(tensor.dtype)
    if code is None:
        known = ", ".join(_short(dtype) for dtype in CODES)
        raise CheckpointError(f"{name} is {_short(tensor.dtype)} (a checkpoint knows {known})")
    return code


def plan_file(slots: Iterable[FileTensor]) -> FilePlan:
    """Return the plan of a file with `slots`; wide types come first, so that all are aligned."""
    ordered = sorted(slots, key=lambda slot: (-ITEM_BYTES[slot.dtype], slot.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for slot in ordered:
        entries[slot.name] = {
            "dtype": slot.dtype,
            "shape": slot.shape,
            "data_offsets": [at, at + slot.nbytes],
        }
        at += slot.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Spaces after the JSON align the first tensor, as the reference implementation does.
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    starts, start = [], len(header)
    for slot in ordered:
        starts.append(start)
        start += slot.nbytes
    return FilePlan(slots=ordered, starts=starts, header=header, nbytes=start)


def write_file(path: Path, plan: FilePlan, tensor_of: Callable[[str], Tensor]) -> str:
    """Write the file that `plan` describes, durably; return its checksums.

    Args:
        path: Path of the file.
        plan: Plan of the file.
        tensor_of: Name -> tensor; called in the order of the file, for one tensor at a time.

    Raises:
        OSError: The file cannot be written, such as on a full disk.
    """
    checksums = RunningChecksums()
    with path.open("wb") as file:
        file.write(plan.header)
        checksums.add(plan.header)
        for slot in plan.slots:
            tensor = _flat(tensor_of(slot.name))
            file.write(_bytes_of(tensor))
            checksums.add(_bytes_of(tensor))
        file.flush()
        os.fsync(file.fileno())
    return checksums.text()


def digest(tensor: Tensor) -> bytes:
    """Return a hash of the elements of `tensor`, to compare tensors of different ranks."""
    flat = _flat(tensor)
    return hashlib.blake2b(_bytes_of(flat), digest_size=16).digest()


def read_part(
    files: DataFiles, dtype: str, chunk: Chunk, first: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Return the part of `chunk` from index `first` on, in a new tensor.

    Only the rows of dim 0 that the part touches are read; of a file without checksums also only
    their own elements, where those that follow each other fill at least a page.

    Raises:
        DamagedCheckpointError: The file cannot be read, is shorter, or has other bytes than were
            written; the last may be raised by a later read.
    """
    run = _run(chunk, lengths)
    if run and run * ITEM_BYTES[dtype] >= _RUN_BYTES_MIN and not files.is_checked(chunk.file):
        return _read_runs(files, dtype, chunk, first, lengths)
    rows = chunk.shape[1:]
    top, count = (first[0], lengths[0]) if chunk.shape else (0, 1)
    shape = [count, *rows] if chunk.shape else []
    part = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    start = chunk.start + top * math.prod(rows) * ITEM_BYTES[dtype]
    files.read_into(chunk.file, start, _bytes_of(part), part)
    for dim in range(1, len(rows) + 1):
        part = part.narrow(dim, first[dim], lengths[dim])
    return part


def _run(chunk: Chunk, lengths: Sequence[int]) -> int:
    """Return how many elements of a part follow each other in the file; 0 if whole rows do."""
    run = 1
    for dim in reversed(range(1, len(lengths))):
        run *= lengths[dim]
        if lengths[dim] != chunk.shape[dim]:
            return run
    return 0


def _read_runs(
    files: DataFiles, dtype: str, chunk: Chunk, first: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Return what `read_part` does, read by elements that follow each other."""
    part = torch.empty(list(lengths), dtype=TORCH_DTYPES[dtype])
    cut = max(dim for dim in range(len(lengths)) if lengths[dim] != chunk.shape[dim])
    steps = [math.prod(chunk.shape[dim + 1 :]) for dim in range(len(lengths))]
    inner = sum(first[dim] * steps[dim] for dim in range(cut, len(lengths)))
    nbytes, item = math.prod(lengths[cut:]) * ITEM_BYTES[dtype], ITEM_BYTES[dtype]
    memory, at = _bytes_of(part), 0
    outer = (range(first[dim], first[dim] + lengths[dim]) for dim in range(cut))
    for place in itertools.product(*outer):
        start = inner + sum(index * steps[dim] for dim, index in enumerate(place))
        files.read_alone(chunk.file, chunk.start + start * item, memory[at : at + nbytes])
        at += nbytes
    return part


def read_tensor(files: DataFiles, stored: StoredTensor) -> Tensor:
    """Return a whole tensor from the data files."""
    tensor = torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype])
    for chunk in stored.chunks:
        part = read_part(files, stored.dtype, chunk, [0] * len(chunk.shape), chunk.shape)
        place = tuple(slice(at, at + n) for at, n in zip(chunk.at, chunk.shape, strict=True))
        tensor[place].copy_(part)
    return tensor


def read_header(path: Path) -> Index:
    """Return the index of a safetensors file, each tensor in one chunk.

    Raises:
        CheckpointError: It is not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            # The length comes from the file: a damaged one must not make the reader fill memory.
            if not 0 < length <= min(_HEADER_BYTES_MAX, size - _LENGTH_BYTES):
                raise CheckpointError(f"{path} is no safetensors file")
            entries = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        start = _LENGTH_BYTES + length
        return Index(
            tensors={name: _stored(path, raw, start, size) for name, raw in entries.items()}
        )
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise CheckpointError(f"{path} is no safetensors file") from None


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _stored(path: Path, raw: msgspec.Raw, start: int, size: int) -> StoredTensor:
    entry = msgspec.json.decode(raw, type=_Entry)
    if entry.dtype not in ITEM_BYTES:
        raise CheckpointError(f"{path}: elements of type {entry.dtype[:20]!r} are not known")
    first, end = entry.data_offsets
    count = math.prod(entry.shape)
    is_sound = all(n >= 0 for n in entry.shape) and 0 <= first <= end <= size - start
    if not is_sound or end - first != count * ITEM_BYTES[entry.dtype]:
        raise CheckpointError(f"{path} is no safetensors file")
    chunk = Chunk(at=[0] * len(entry.shape), shape=entry.shape, file=path.name, start=start + first)
    return StoredTensor(dtype=entry.dtype, shape=entry.shape, chunks=[chunk] if count else [])


def _flat(tensor: Tensor) -> Tensor:
    """Return `tensor` on the host, contiguous and without lazy conjugation or negation."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous `tensor` on the host, which must outlive it."""
    if not tensor.nbytes:
        return memoryview(b"")
    if not tensor.data_ptr():
        raise CheckpointError(f"{type(tensor).__name__} keeps its elements elsewhere")
    # Not `tensor.numpy()`: torch also runs without numpy, and numpy has no bfloat16.
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(memory).cast("B")


def _short(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")
