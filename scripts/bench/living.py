"""A worker that steps alone; its file has the time of each step, and of the signal to stop.

python living.py FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msrun


def main() -> None:
    """Step until it is stopped; from when the file `hang-RANK` is there, not any more."""
    folder = Path(sys.argv[1])
    rank, generation = os.environ["RANK"], os.environ["MSRUN_GENERATION"]
    path = folder / f"life-{os.uname().nodename}-{os.getpid()}"
    account = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what: str) -> None:
        os.write(account, f"{what} {time.monotonic()}\n".encode())

    def stop(*_: object) -> None:
        note("stop")
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    note(f"generation-{generation}")
    while generation != "0" or not (folder / f"hang-{rank}").exists():
        note("step")
        msrun.beat()
        time.sleep(0.005)
    note("hang")
    while True:
        time.sleep(0.005)


if __name__ == "__main__":
    main()
