"""The two JSON files of a checkpoint: their fields, and how they are read and rendered.

Readers trust no number in these files: chunks must lie inside their file and their tensor, and have
as many elements as it.  Nothing is pickled.

Checksums.  The manifest has those of every other file (`checksums`), and ends with its own, of the
text without that last field.  Checkpoints of earlier releases have none and load unchecked.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from msrun.errors import DamagedCheckpointError
from msrun.parallel.checkpoint.checksums import are_sound, checksums_of
from msrun.units import quoted

FORMAT = 1
MANIFEST = "checkpoint.json"
INDEX = "index.json"


# Type of elements by its name in safetensors -> bytes of one element.
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}

# Last field of a manifest: CRC-32 of the text without it.
_SEAL = re.compile(rb',"checksum":"([0-9a-f]{8})"}$')

_T = TypeVar("_T")


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a tensor, contiguous in one file.

    Args:
        at: Index of its first element in the tensor.
        shape: Sizes of the part.
        file: Name of the data file.
        start: First byte in the file; elements are in row-major order, little-endian.
    """

    at: list[int]
    shape: list[int]
    file: str
    start: int


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Type, shape and position of a stored tensor.

    Args:
        dtype: A key of `ITEM_BYTES`.
        shape: Sizes of the whole tensor.
        chunks: Its parts, which do not overlap and fill it.
    """

    dtype: str
    shape: list[int]
    chunks: list[Chunk]


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the data files.

    Args:
        tensors: Name -> type, shape and position.
        aliases: Further name of a tensor -> its name.
        values: Name -> state that is not a tensor, as JSON values.
    """

    tensors: dict[str, StoredTensor]
    aliases: dict[str, str] = {}
    values: dict[str, Any] = {}

    def find(self, name: str) -> StoredTensor | None:
        """Return the stored tensor that is called `name`; None if there is none."""
        return self.tensors.get(self.aliases.get(name, name))


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a checkpoint.

    Args:
        format: Version of the format.
        step: Number of steps that were done.
        world_size: Ranks of the job that wrote it.
        mesh: Axis name -> size, in mesh order.
        ranks: The rank at each position of the mesh; empty for 0, 1 and so on.
        msrun: Version of msrun that wrote it.
        torch: Version of torch that wrote it.
        files: Name of every other file -> its size in bytes.
        checksums: Name of a file -> its checksums; empty from releases that made none.
        loader: State of the loader; None without a loader.
        extra: Values that the script added.
    """

    format: int
    step: int
    world_size: int
    mesh: dict[str, int]
    msrun: str
    torch: str
    files: dict[str, int]
    ranks: list[int] = []
    checksums: dict[str, str] = {}
    loader: dict[str, Any] | None = None
    extra: dict[str, Any] = {}


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint `path`.

    Raises:
        DamagedCheckpointError: It has none that is readable, or its format is newer than this
            version.
    """
    data = _read(path / MANIFEST)
    content = _decode(data, path / MANIFEST)
    if isinstance(content, dict):
        version = content.get("format")
        if isinstance(version, int) and version > FORMAT:
            raise DamagedCheckpointError(
                f"{path}: format {version} is of a later msrun, this one knows up to {FORMAT}"
            )
    seal = _SEAL.search(data)
    if seal and int(seal[1], 16) != zlib.crc32(data[: seal.start()] + b"}"):
        raise _damaged(path / MANIFEST)
    manifest = _convert(content, Manifest, path / MANIFEST)
    if manifest.checksums and not seal:
        raise _damaged(path / MANIFEST)
    for name in manifest.files:
        # A manifest from elsewhere must not make a reader open files outside of the directory.
        if name != Path(name).name or name.startswith("."):
            raise DamagedCheckpointError(
                f"{path / MANIFEST}: {quoted(name)} is no name of a file in it"
            )
    for name, text in manifest.checksums.items():
        if not are_sound(text, manifest.files.get(name, -1)):
            raise DamagedCheckpointError(
                f"{path / MANIFEST}: the checksums of {quoted(name)} do not fit its size"
            )
    return manifest


def read_index(path: Path, manifest: Manifest) -> Index:
    """Return the index of the checkpoint `path`.

    Raises:
        DamagedCheckpointError: It cannot be read, is not as it was written, or does not fit the
            data files.
    """
    data = _read(path / INDEX)
    expected = manifest.checksums.get(INDEX)
    if expected is not None and expected != checksums_of(data):
        raise _damaged(path / INDEX)
    index = _convert(_decode(data, path / INDEX), Index, path / INDEX)
    for name, tensor in index.tensors.items():
        if not _fits(tensor, manifest):
            raise DamagedCheckpointError(
                f"{path / INDEX}: {quoted(name)} does not fit the data files"
            )
    for alias, name in index.aliases.items():
        if name not in index.tensors:
            raise DamagedCheckpointError(
                f"{path / INDEX}: {quoted(alias)} is an alias of no tensor"
            )
    return index


def render_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest, which end with their checksum."""
    data = _encode(msgspec.to_builtins(manifest))
    return data[:-1] + b',"checksum":"%08x"}' % zlib.crc32(data)


def render_index(index: Index) -> bytes:
    """Return the bytes of an index."""
    return _encode(msgspec.to_builtins(index))


def _fits(tensor: StoredTensor, manifest: Manifest) -> bool:
    """Return whether the chunks of `tensor` fill it and lie within their files."""
    if tensor.dtype not in ITEM_BYTES or any(size < 0 for size in tensor.shape):
        return False
    return sum(math.prod(chunk.shape) for chunk in tensor.chunks) == math.prod(
        tensor.shape
    ) and all(_chunk_fits(chunk, tensor, manifest) for chunk in tensor.chunks)


def _chunk_fits(chunk: Chunk, tensor: StoredTensor, manifest: Manifest) -> bool:
    if len(chunk.at) != len(tensor.shape) or len(chunk.shape) != len(tensor.shape):
        return False
    is_inside = all(_spans(chunk, tensor.shape))
    length = math.prod(chunk.shape) * ITEM_BYTES[tensor.dtype]
    return is_inside and 0 <= chunk.start <= manifest.files.get(chunk.file, -1) - length


def _spans(chunk: Chunk, shape: Sequence[int]) -> Iterator[bool]:
    for first, length, size in zip(chunk.at, chunk.shape, shape, strict=True):
        yield first >= 0 and 0 < length <= size - first


def _encode(content: object) -> bytes:
    # Python's own dialect of JSON has infinity and nan, which state needs: a best loss starts as
    # infinity.
    return json.dumps(content, separators=(",", ":")).encode()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}") from None


def _decode(data: bytes, path: Path) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise DamagedCheckpointError(f"{path} is no JSON") from None


def _damaged(path: Path) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{path} is damaged: it has another checksum than when it was written"
    )


def _convert(content: object, kind: type[_T], path: Path) -> _T:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        raise DamagedCheckpointError(f"{path}: {text[:1].lower()}{text[1:]}") from None
