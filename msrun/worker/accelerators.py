"""Counts the devices of one kind as torch finds them, in a process of its own.

Loading torch takes a second, and asking some devices for their number opens them: no process from
which workers are forked may do that.
"""

from __future__ import annotations

import importlib
import sys

UNKNOWN = "unknown"
ANY = "auto"


def main(arguments: list[str]) -> None:
    """Print the number of devices of the kind named, `UNKNOWN` if torch knows no such kind."""
    (kind,) = arguments
    torch = importlib.import_module("torch")
    module = torch.accelerator
    if kind != ANY:
        try:
            module = torch.get_device_module(torch.device(kind))
        except RuntimeError:
            sys.stdout.write(UNKNOWN)
            return
    sys.stdout.write(f"\n{module.device_count() if module.is_available() else 0}")
