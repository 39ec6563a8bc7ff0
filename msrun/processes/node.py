"""Entry of the process that becomes a node's reaper and forks its forkserver."""

from __future__ import annotations

import signal
import socket

from msrun.supervise import forkserver, reaper
from msrun.supervise.forkserver import Roles
from msrun.supervise.orders import Configure, Ready
from msrun.supervise.reaper import Next
from msrun.worker import mindspore, plain_script, stdio
from msrun.worker.bootstrap import become_server, become_worker
from msrun.worker.early_variables import why_exec
from msrun.worker.mindspore_call import MindSporeCall
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
    roles = Roles(
        worker=become_worker,
        store=become_store,
        server=become_server,
        mindspore=mindspore.become_scheduler,
        without_torch=_ready_without_torch,
        why_exec=why_exec,
        why_no_mindspore=mindspore.why_missing,
        door=MindSporeCall(),
    )
    return forkserver.run(configure, sock, listen_fds, signals, roles)


def _ready_without_torch(configure: Configure) -> Ready | None:
    return mindspore.ready_without_torch(configure) or plain_script.ready_without_torch(configure)
