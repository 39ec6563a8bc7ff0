"""MindSpore's own scheduler, which its workers need: they do not meet through torch's store.

`mindspore.communication.init()` connects to `MS_SCHED_HOST` and `MS_SCHED_PORT` and speaks a
protocol of MindSpore's, whose other end is `init()` itself in a process with `MS_ROLE=MS_SCHED`.
Such a process is run for each generation on the node of rank 0, as a child of the forkserver: from
the start where the program is known to use MindSpore, else when a worker connects
(`mindspore_call.py`).  It has a port of its own, which the workers of other nodes learn
from the generation's store.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import NoReturn

from msrun import entry, environ
from msrun.supervise import containment, logs, process, title
from msrun.supervise.forkserver import SpawnContext
from msrun.supervise.orders import Configure, Ready, SpawnMindSpore
from msrun.supervise.reaper import Next
from msrun.worker import stdio

_IMPORT = r"^[ \t]*(?:import|from)[ \t]+{}(?![\w])"
_USES_MINDSPORE = re.compile(_IMPORT.format("mindspore").encode(), re.MULTILINE)
_USES_TORCH = re.compile(_IMPORT.format("torch").encode(), re.MULTILINE)
_SOURCE_BYTES_MAX = 1 << 20
_STORE_SECONDS = 60.0


def ready_without_torch(configure: Configure) -> Ready | None:
    """Return that the node is ready if its workers use MindSpore, None if they use torch.

    Without --framework they use it if the text of the program imports it, and does not import
    torch.  MindSpore must not be forked with, so each worker is an interpreter of its own.
    """
    if configure.framework == "mindspore":
        problem = why_missing()
        error = f"--framework mindspore: {problem}" if problem else None
        return Ready(fork=False, seconds=0.0, error=error, mindspore=True)
    if configure.framework == "auto" and _imports_mindspore(configure) and not why_missing():
        return Ready(fork=False, seconds=0.0, mindspore=True)
    return None


def why_missing() -> str:
    """Return why this interpreter cannot run MindSpore's scheduler; empty when it can."""
    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec("mindspore"):
            return ""
    return (
        f"its scheduler needs MindSpore, which {sys.executable} does not have "
        "(install msrun into the Python environment that has it)"
    )


def _imports_mindspore(configure: Configure) -> bool:
    path = Path(configure.cwd, configure.argv[0])
    if configure.kind == "command":
        return False
    if configure.kind == "module":
        path = Path(configure.cwd, *configure.argv[0].split("."))
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    try:
        with path.open("rb") as file:
            text = file.read(_SOURCE_BYTES_MAX)
    except (OSError, ValueError):
        return False
    return bool(_USES_MINDSPORE.search(text)) and not _USES_TORCH.search(text)


def become_scheduler(context: SpawnContext, order: SpawnMindSpore) -> Next:
    """Turn this fresh fork into MindSpore's scheduler of `order`."""
    wakeup = signal.set_wakeup_fd(-1)
    for descriptor in (context.wakeup, wakeup, *context.listen_fds):
        os.close(descriptor)
    os.setsid()
    process.die_with_parent(context.parent)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if context.configure.cgroup:
        containment.enter_generation(context.configure.cgroup, order.generation)
    banner = logs.banner(order.generation) if order.append else ""
    try:
        stdio.redirect(order.log_file, append=order.append, banner=banner)
        stdin = os.open(os.devnull, os.O_RDONLY)
        os.dup2(stdin, 0)
        os.close(stdin)
        environ.add(order.env)
        for signum, handler in context.signals.items():
            signal.signal(signum, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, context.signals)
        start = [sys.executable, str(Path(entry.__file__)), f"{__name__}:main"]
        os.execv(sys.executable, start)  # noqa: S606 - no shell is wanted
    except OSError as error:
        os.write(2, f"msrun: cannot start MindSpore's scheduler: {error}\n".encode())
        os._exit(1)


def main(_arguments: list[str]) -> NoReturn:
    """Be MindSpore's scheduler until the workers have left it."""
    title.set_name("msrun mindspore")
    title.show_as(["msrun", "mindspore-scheduler"], environ.current())
    communication = importlib.import_module("mindspore.communication")
    communication.init()
    sys.exit(0)


def ask_store() -> None:
    """Have this process find MindSpore's scheduler where the store of its generation says.

    Raises:
        OSError: The store does not answer, or the node of rank 0 runs no such scheduler.
    """
    from msrun.worker.store import wire  # Other workers have no use for it.
    from msrun.worker.store.keys import MINDSPORE_KEY

    address = environ.master(environ.current())
    if address is None:
        raise OSError("there is no store that knows MindSpore's scheduler")
    key = struct.pack("<Q", len(MINDSPORE_KEY)) + MINDSPORE_KEY
    with socket.create_connection(address, _STORE_SECONDS) as line:
        validation = struct.pack("<BI", wire.VALIDATE, wire.VALIDATION)
        line.sendall(validation + struct.pack("<BQ", wire.CHECK, 1) + key)
        if _read(line, 1) != wire.READY:
            raise OSError(
                "the node of rank 0 does not know that this job uses MindSpore "
                "(pass --framework mindspore)"
            )
        line.sendall(bytes([wire.GET]) + key)
        (length,) = struct.unpack("<Q", _read(line, 8))
        host, port = _read(line, length).decode().split(" ")
    environ.add(environ.mindspore_scheduler_at(host, port))


def _read(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = line.recv(count - len(data))
        if not more:
            raise OSError("the store closed the connection")
        data += more
    return data
