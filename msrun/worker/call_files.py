"""The private directory of one call: a function for workers, and their values on the way back.

Both ends are processes of one user on one machine.  The directory has mode 0700 and its files 0600,
and a file that is not its reader's own is not read: whoever can write it could run code there.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from msrun.bounded_file import read_own
from msrun.errors import UsageError

# Of a function with its arguments, and of the value of one rank.
BYTES_MAX = 1 << 30
_TEXT_BYTES_MAX = 64 * 1024
_SETUP_BYTES_MAX = 1 << 20
_ORDER_BYTES_MAX = 1 << 24
# Of files that a rank leaves, and no draft of one.
_LEFT = ("value", "problem")
_RANK = re.compile(r"[0-9]{1,9}")


class CallSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker does before it loads the function.

    Args:
        name: The function, for messages.
        sys_path: `sys.path` of the caller.
        argv: `sys.argv` of the caller.
        main_path: Script of the caller, which defines `__main__`; empty without one.
        main_module: Dotted name of it, when it was started with `python -m`.
    """

    name: str
    sys_path: list[str]
    argv: list[str]
    main_path: str = ""
    main_module: str = ""


@dataclass(frozen=True, slots=True)
class CallFiles:
    """The files in the directory of one call."""

    directory: Path

    def write_call(self, setup: CallSetup, call: bytes) -> None:
        """Leave the function for the workers."""
        self._write("call", call)
        self._write("setup", msgspec.json.encode(setup))

    def write_order(self, order: bytes) -> None:
        """Leave the order for the launcher."""
        self._write("order", order)

    def read_order(self) -> bytes:
        """Return what the launcher is to do."""
        return self._needed("order", _ORDER_BYTES_MAX)

    def read_setup(self) -> CallSetup:
        """Return what a worker does first."""
        return msgspec.json.decode(self._needed("setup", _SETUP_BYTES_MAX), type=CallSetup)

    def read_call(self) -> bytes:
        """Return the function and its arguments."""
        return self._needed("call", BYTES_MAX)

    def write_value(self, generation: int, rank: int, value: bytes) -> None:
        """Leave the value of a rank for the caller."""
        self._write(f"value_{generation}_{rank}", value)

    def write_problem(self, generation: int, rank: int, sentence: str) -> None:
        """Leave the reason why the caller cannot have the value of a rank."""
        self._write(f"problem_{generation}_{rank}", _clipped(sentence))

    def write_traceback(self, generation: int, rank: int, text: str) -> None:
        """Leave the exception that ended a rank."""
        self._write(f"traceback_{generation}_{rank}", _clipped(text))

    def ranks(self, generation: int) -> list[int]:
        """Return the ranks that have left a value or a problem, ascending."""
        names = [path.name.split("_") for path in self.directory.glob(f"*_{generation}_*")]
        return sorted({int(n[2]) for n in names if n[0] in _LEFT and _RANK.fullmatch(n[2])})

    def read_value(self, generation: int, rank: int) -> bytes | None:
        """Return what a rank has left as its value; None without."""
        return self._read(f"value_{generation}_{rank}", BYTES_MAX)

    def read_problem(self, generation: int, rank: int) -> str:
        """Return why there is no value of a rank; empty where there is one, or none was left."""
        return (self._read(f"problem_{generation}_{rank}", _TEXT_BYTES_MAX) or b"").decode(
            errors="replace"
        )

    def read_traceback(self, generation: int, rank: int) -> str:
        """Return the exception that ended a rank; empty where it left none."""
        return (self._read(f"traceback_{generation}_{rank}", _TEXT_BYTES_MAX) or b"").decode(
            errors="replace"
        )

    def _write(self, name: str, data: bytes) -> None:
        """Write a file that is whole from its first moment."""
        draft = self.directory / f"{name}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
            file.write(data)
        draft.rename(self.directory / name)

    def _needed(self, name: str, limit: int) -> bytes:
        data = self._read(name, limit)
        if data is None:
            raise UsageError(f"{self.directory / name} is no file of this user's own")
        return data

    def _text(self, name: str) -> str:
        return (self._read(name, _TEXT_BYTES_MAX) or b"").decode(errors="replace")

    def _read(self, name: str, limit: int) -> bytes | None:
        """Return a file of this user's own; None without one."""
        return read_own(self.directory / name, limit)


def _clipped(text: str) -> bytes:
    """Return the end of `text`, where a traceback has the exception."""
    data = text.encode(errors="backslashreplace")
    return data[-_TEXT_BYTES_MAX // 2 :].decode(errors="ignore").encode()
