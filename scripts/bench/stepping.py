"""A worker that joins a gloo group and steps; its file says when its first step was done.

python stepping.py FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    """Step until a peer is gone, or the file `done` is there."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    done = torch.zeros(1)
    dist.all_reduce(done)
    note = f"{time.monotonic()} {dist.get_world_size()} {os.getpid()}"
    path = folder / f"up-{os.uname().nodename}-{os.getpid()}"
    path.with_suffix(".new").write_text(note)
    path.with_suffix(".new").rename(path)
    while not done.item():
        done.fill_(float((folder / "done").exists()))
        dist.all_reduce(done)
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
