"""How far the collectives of this rank are, told to the agent when it asks.

A rank that hangs in a collective runs no Python, so another thread answers.  It waits for bytes in
the FIFO `ask_<rank>` in the private directory of the generation, and costs nothing until then.  The
answer is the file `collectives_<rank>`: JSON, a list of group, number and name.

torch counts by itself: its flight recorder is on unless TORCH_FR_BUFFER_SIZE says otherwise.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from pathlib import Path

from msrun import environ

QUESTION = "ask"
ANSWER = "collectives"


def answer_questions() -> None:
    """Begin to answer the agent; outside of a job nothing happens.

    Raises:
        OSError: The FIFO cannot be made.
    """
    question, answer = environ.rank_file(QUESTION), environ.rank_file(ANSWER)
    if question is None or answer is None:
        return
    os.mkfifo(question, 0o600)
    # Both ends, so that it is never at its end.
    descriptor = os.open(question, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    name, target = "msrun-collectives", _serve
    threading.Thread(target=target, args=(descriptor, answer), name=name, daemon=True).start()


def _serve(descriptor: int, answer: str) -> None:
    while os.read(descriptor, 4096):
        try:
            draft = Path(f"{answer}.draft")
            draft.write_text(json.dumps(_entered()))
            draft.replace(answer)
        except Exception:  # noqa: BLE001, S112 - no answer is an answer too
            continue


def _entered() -> list[tuple[str, int, str]]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    # By name: this package knows no torch, and only a rank that has torch comes here.
    found: list[tuple[str, int, str]] = importlib.import_module(
        "msrun.parallel.torch_compat"
    ).collectives_entered()
    return found
