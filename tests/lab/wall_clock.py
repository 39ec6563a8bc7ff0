"""Clocks that are wrong, jump, or stood still, for the programs that a test chooses."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")


def missing() -> str | None:
    """Return what this machine lacks for wrong clocks, None when it has all."""
    return None if shutil.which("cc") else "no cc on PATH"


class WallClock:
    """The clocks of one machine in `folder`, right at first.

    Attributes:
        env: Variables with which programs read it instead of the machine's.
    """

    def __init__(self, folder: Path) -> None:
        library = folder / "wall_clock.so"
        self._offset = folder / "wall_clock"
        self._offset.write_bytes(bytes(16))
        flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror"]
        subprocess.run(["cc", *flags, "-o", library, _SOURCE], check=True)
        self.env = {"LD_PRELOAD": str(library), "MSRUN_TESTS_CLOCK": str(self._offset)}

    def set_wrong(self, seconds: int) -> None:
        """Let the clock be `seconds` ahead of the machine's from now on, or behind it if < 0."""
        with self._offset.open("r+b") as file:  # in place: it is mapped
            file.write(struct.pack("=q", seconds))

    def stood_still(self, seconds: float) -> None:
        """Let the monotonic clock be so much behind, as after a machine that was suspended."""
        with self._offset.open("r+b") as file:
            file.seek(8)
            file.write(struct.pack("=q", int(seconds * 1e9)))
