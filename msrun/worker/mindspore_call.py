"""Notices that a worker calls MindSpore's scheduler, before there is one.

Only a job whose program is known to use MindSpore has its scheduler from the start.  In others a
listening socket stands where `MS_SCHED_PORT` points: who connects may be MindSpore in a worker.  It
is when a process of the job on this node has MindSpore's libraries loaded; others are ignored, such
as a scan of ports.  MindSpore tries to connect again and again, so the connection itself is closed.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from msrun.supervise import process
from msrun.supervise.orders import SpawnMindSpore

_LIBRARIES = "/mindspore/lib/lib"


class MindSporeCall:
    """The socket at which a worker with MindSpore is noticed, closed while none is expected."""

    def __init__(self) -> None:
        self._order: SpawnMindSpore | None = None
        self._socket: socket.socket | None = None

    @property
    def order(self) -> SpawnMindSpore | None:
        """What to do when a worker calls; None while it is closed."""
        return self._order

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when somebody connects."""
        return self._socket.fileno() if self._socket else -1

    def expect(self, order: SpawnMindSpore) -> None:
        """Listen for the workers of `order`, until `close`."""
        self.close()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((order.host, order.port))
            sock.listen()
        except OSError:  # the agent keeps the port; whoever took it from there is no worker
            sock.close()
            return
        sock.settimeout(0)
        self._socket, self._order = sock, order

    def answer(self) -> SpawnMindSpore | None:
        """Return the order if a worker calls, and listen no longer; None if others did."""
        order = self._order
        if self._socket is None or order is None:
            return None
        with contextlib.suppress(OSError):  # none is left that waits
            while True:
                connection, _ = self._socket.accept()
                connection.close()
        if not any(map(_has_mindspore, process.descendants(os.getpid()))):
            return None
        self.close()
        return order

    def close(self) -> None:
        """Give the port free."""
        if self._socket:
            self._socket.close()
        self._socket = self._order = None


def _has_mindspore(pid: int) -> bool:
    try:
        return _LIBRARIES in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return False
