"""A package in MindSpore's place: its workers and its scheduler meet over the same variables.

Real MindSpore takes seconds to import and is not everywhere; `tests/mindspore` has it.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

_INIT = """
    import mmap
    from pathlib import Path
    with Path(__file__).with_name("lib").joinpath("libfake.so").open("rb") as file:
        library = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
"""
_COMMUNICATION = """
    import os, socket, time
    held = []
    def init():
        where = os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"])
        if os.environ["MS_ROLE"] == "MS_SCHED":
            workers = int(os.environ["MS_WORKER_NUM"])
            with socket.create_server(where) as server:
                lines = [server.accept()[0] for _ in range(workers)]
            print("all", workers, "are here", flush=True)
            for line in lines:
                line.sendall(b"go")
            for line in lines:
                line.recv(1)
            return
        while True:
            try:
                line = socket.create_connection(where)
                if line.recv(2) == b"go":
                    return held.append(line)
            except OSError:
                pass
            time.sleep(0.05)
"""


def install(folder: Path) -> dict[str, str]:
    """Make the package below `folder`; return the variables by which Python finds it."""
    package = folder / "mindspore"
    (package / "lib").mkdir(parents=True)
    (package / "lib" / "libfake.so").write_bytes(bytes(4096))
    (package / "__init__.py").write_text(textwrap.dedent(_INIT))
    (package / "communication.py").write_text(textwrap.dedent(_COMMUNICATION))
    return {"PYTHONPATH": str(folder)}
