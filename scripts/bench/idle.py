"""Join, sum one number, then idle until told to end: `idle.py FOLDER`.

Leaves `up-GENERATION-RANK` in FOLDER once it is past its all-reduce, and
`end-GENERATION-RANK` as its last act; each holds its pid and a CLOCK_MONOTONIC time.
Ends when FOLDER has a file `stop`.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder = Path(sys.argv[1])


def leave_note(word: str) -> None:
    """Write this rank's note so that a reader sees all of it or nothing."""
    generation, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    draft = folder / f"draft-{os.getpid()}"
    draft.write_text(f"{os.getpid()} {time.monotonic()}")
    draft.rename(folder / f"{word}-{generation}-{rank}")


dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
leave_note("up")
while not (folder / "stop").exists():
    time.sleep(0.02)
dist.destroy_process_group()
leave_note("end")
