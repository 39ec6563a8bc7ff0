"""Real parameter servers beside the ranks of a test: a store, and a process for each server."""

import gc
import multiprocessing
import os
import re
import secrets
import signal
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from msrun.parallel.servers import process
from msrun.supervise.process import die_with_parent

START = multiprocessing.get_context("fork")
START_SECONDS = 20


def _serve(parent, env):
    # Groups that earlier tests have left as garbage have threads that are not here.
    gc.freeze()
    die_with_parent(parent)
    os.environ.update(env)
    os._exit(process.main())


def takes_sigterm(pid):
    """Return whether a process has a handler of SIGTERM: until then the signal kills it."""
    status = Path(f"/proc/{pid}/status").read_text()
    [caught] = re.findall(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
    return bool(int(caught, 16) & 1 << signal.SIGTERM - 1)


class ServerJob:
    """The servers of one job, of which `numbers` are started, and the environment of its ranks."""

    def __init__(self, folder, servers, ranks, *, key=True, numbers=None):
        self.folder = folder
        self.servers = servers
        # It outlives a store, as that of a launcher does.
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.next_store()
        (folder / "key").write_text(secrets.token_hex(32) if key else "insecure")
        self.env = {
            "MSRUN_SERVER_NUM": str(servers),
            "MSRUN_SERVERS_DIR": str(folder),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
        }
        self.processes = {}
        # A server dies with the thread that has forked it, which waits for this.
        self.over = threading.Event()
        for server in range(servers) if numbers is None else numbers:
            self.start(server)

    def next_store(self):
        """Have the empty store of another generation at the same address."""
        self.store = None
        port = self.listening.getsockname()[1]
        self.store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(self.listening.fileno()),
        )

    def start(self, server):
        total = max(self.servers, server + 1)  # after `msrun scale` it may be one more
        env = self.env | {"MSRUN_ROLE": "server", "MSRUN_SERVER_ID": str(server)}
        env |= {"MSRUN_SERVER_NUM": str(total)}
        started = START.Process(target=_serve, args=(os.getpid(), env))
        started.start()
        self.processes[server] = started

    def kill(self, server):
        """Kill a server at once."""
        self.processes[server].kill()
        self.processes[server].join()

    def end(self):
        """End all servers as the launcher does, once they run; return their exit codes."""
        for each in self.processes.values():
            until = time.monotonic() + START_SECONDS
            while each.is_alive() and not takes_sigterm(each.pid) and time.monotonic() < until:
                time.sleep(0.01)
            each.terminate()
        for each in self.processes.values():
            each.join(20)
            if each.is_alive():
                each.kill()
                each.join()
        self.over.set()
        self.listening.close()
        return [each.exitcode for each in self.processes.values()]


@contextmanager
def serving(folder, monkeypatch, servers, ranks, **options):
    """Run servers; ranks of this test find them."""
    folder.mkdir(parents=True, exist_ok=True)
    job = ServerJob(folder, servers, ranks, **options)
    with monkeypatch.context() as patch:
        for name, value in job.env.items():
            patch.setenv(name, value)
        try:
            yield job
        finally:
            ended = job.end()
    assert ended == [0] * len(ended)
