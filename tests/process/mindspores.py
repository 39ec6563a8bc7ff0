"""Real MindSpore, where it is installed, and a package in its place.

Real MindSpore takes seconds to import and is not everywhere.  The package has workers and a
scheduler that meet over the same variables.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import textwrap
from pathlib import Path

import pytest


def real_python() -> str:
    """Return an interpreter with MindSpore and all that msrun needs; skip the test without."""
    if named := os.environ.get("MINDSPORE_PYTHON"):
        return named
    if importlib.util.find_spec("mindspore"):
        return sys.executable
    pytest.skip("no MindSpore; MINDSPORE_PYTHON names an interpreter that has it")


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


def install_fake(folder: Path) -> dict[str, str]:
    """Make the package below `folder`; return the variables by which Python finds it."""
    package = folder / "mindspore"
    (package / "lib").mkdir(parents=True)
    (package / "lib" / "libfake.so").write_bytes(bytes(4096))
    (package / "__init__.py").write_text(textwrap.dedent(_INIT))
    (package / "communication.py").write_text(textwrap.dedent(_COMMUNICATION))
    return {"PYTHONPATH": str(folder)}
