"""Opens Gloo's transport as the environment asks for it, in a process of its own."""

from __future__ import annotations

import importlib
import sys

READY = "ready"
_LOOPBACK = "127.0.0.1"


def main(_: list[str]) -> None:
    """Print `READY` if torch can open the transport, with its keys, else why it cannot."""
    distributed = importlib.import_module("torch.distributed")
    try:
        distributed.ProcessGroupGloo.create_device(hostname=_LOOPBACK)
    except RuntimeError as error:
        answer = next(iter(str(error).splitlines()), "") or type(error).__name__
    else:
        answer = READY
    sys.stdout.write(f"\n{answer}\n")
