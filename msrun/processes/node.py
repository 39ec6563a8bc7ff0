"""Entry of the process that becomes a node's reaper and forks its forkserver."""

from __future__ import annotations

import signal
import socket

from msrun.supervise import forkserver, reaper
from msrun.supervise.orders import Configure
from msrun.supervise.reaper import Next
from msrun.worker import stdio
from msrun.worker.bootstrap import become_worker
from msrun.worker.early_variables import why_exec
from msrun.worker.store.process import become_store


def main(arguments: list[str]) -> Next:
    """Serve on the descriptors in `arguments`, as of `reaper.run`."""
    return reaper.run(arguments, _forkserver_main)


def _forkserver_main(
    configure: Configure,
    sock: socket.socket,
    listen_fds: tuple[int, ...],
    signals: dict[signal.Signals, reaper.SignalHandler],
) -> Next:
    # Before torch is imported: handlers made at import keep these streams in every worker.
    stdio.install()
    become = (become_worker, become_store)
    return forkserver.run(configure, sock, listen_fds, signals, become, why_exec=why_exec)
