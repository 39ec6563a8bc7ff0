"""The number of devices that torch alone can count, from a short-lived child that asks it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from msrun import entry
from msrun.errors import UsageError
from msrun.worker.accelerators import ANY, UNKNOWN

_SECONDS = 120.0
# Without any of these there is no device of torch's but those that are counted without it.
_FILES = ("dev/kfd", "dev/dri", "dev/accel", "dev/vfio", "dev/dxg")


def count(kind: str, environment: Mapping[str, str], root: Path = Path("/")) -> int | None:
    """Return how many devices of `kind` torch finds; None when it does not know the kind.

    Args:
        kind: Such as `xpu`; `auto` is any, and counts as none where no device file hints at one.
        environment: Of the workers.
        root: Where /dev is.

    Raises:
        UsageError: torch cannot be loaded, or does not answer.
    """
    if kind == ANY and not any((root / file).exists() for file in _FILES):
        return 0
    command = [sys.executable, str(Path(entry.__file__)), "msrun.worker.accelerators:main", kind]
    what = f"torch cannot count the {kind} devices of this machine"
    try:
        answer = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"{what} within {_SECONDS:g}s", hint="give a number") from None
    said = answer.stdout.split()
    if answer.returncode or not said or not (said[-1].isdecimal() or said[-1] == UNKNOWN):
        lines = [line for line in answer.stderr.splitlines() if line.strip()]
        raise UsageError(
            f"{what}: {lines[-1] if lines else 'it says nothing'}", hint="give a number"
        )
    return None if said[-1] == UNKNOWN else int(said[-1])
