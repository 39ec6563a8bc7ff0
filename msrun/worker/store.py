"""The process that serves a generation's TCPStore."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

from msrun import entry, environ
from msrun.supervise import containment, process, title
from msrun.supervise.forkserver import SpawnContext
from msrun.supervise.orders import SpawnStore
from msrun.supervise.reaper import Next


def become_store(context: SpawnContext, order: SpawnStore) -> Next:
    """Turn this fresh fork into the store of `order`; return the call that serves it."""
    wakeup = signal.set_wakeup_fd(-1)
    for descriptor in (context.wakeup, wakeup):
        os.close(descriptor)
    process.die_with_parent(context.parent)
    title.set_name("msrun store")
    title.show_as(["msrun", "store", context.configure.job_id], environ.current())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, context.signals)
    if context.configure.cgroup:
        containment.enter_generation(context.configure.cgroup, order.generation)
    arguments = [order.host, str(order.port), str(context.listen_fd)]
    if not context.fork:
        os.set_inheritable(context.listen_fd, True)  # noqa: FBT003 - positional only
        start = [sys.executable, str(Path(entry.__file__)), f"{__name__}:serve"]
        os.execv(sys.executable, [*start, *arguments])  # noqa: S606 - no shell is wanted
    return partial(serve, arguments)


def serve(arguments: list[str]) -> NoReturn:
    """Serve a store for `HOST PORT LISTEN_FD` until this process is killed."""
    host, port, listen_fd = arguments[0], int(arguments[1]), int(arguments[2])
    distributed = importlib.import_module("torch.distributed")
    store = distributed.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )
    while store is not None:
        signal.pause()
    raise AssertionError
