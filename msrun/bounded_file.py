"""Files that users write, read whole up to a limit."""

from __future__ import annotations

from pathlib import Path

from msrun.errors import UsageError

_MIB = 2**20


def read_bounded(path: str | Path, name: str, *, mebibytes: int) -> bytes:
    """Return the content of the file, which messages call `name`.

    Raises:
        UsageError: It cannot be read, or is larger.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(mebibytes * _MIB + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{name} cannot be read: {reason}") from None
    if len(content) > mebibytes * _MIB:
        raise UsageError(f"{name} is larger than {mebibytes} MiB")
    return content
