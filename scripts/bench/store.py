"""Operations a second of our store and of torch's libuv server, in turns, with torch's own client.

    python scripts/bench/store.py                     # 1, 4 and 16 clients, 5 turns
    python scripts/bench/store.py --crowd 10000       # so many connections, all waiting for one key

Each client sets, gets, adds and checks; a get is two requests.  The clients need more time than
either server, so the seconds of CPU that a server took for a thousand requests are told too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import socket
import statistics
import struct
import subprocess
import sys
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

OURS = """
import sys
from msrun.supervise.orders import SpawnStore
from msrun.worker.store.serving import serve
serve(SpawnStore(generation=0), (int(sys.argv[1]),))
"""
THEIRS = """
import signal, socket, sys
import torch.distributed as dist
fd = int(sys.argv[1])
listening = socket.socket(fileno=fd)
port = listening.getsockname()[1]
listening.detach()
store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False,
    master_listen_fd=fd)
signal.pause()
"""
SERVERS = {"ours": OURS, "torch": THEIRS}
ROUND = 5  # requests
HELLO = struct.pack("<BI", 0, 0x3C85F7CE)


class Server:
    """One store process."""

    def __init__(self, kind: str) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=4096) as listening:
            self.port = listening.getsockname()[1]
            listen_fd = listening.fileno()
            command = [sys.executable, "-c", SERVERS[kind], str(listen_fd)]
            self.process = subprocess.Popen(
                command, pass_fds=[listen_fd], stderr=subprocess.DEVNULL
            )
        with socket.create_connection(("127.0.0.1", self.port)) as sock:
            sock.sendall(HELLO + b"\x0d1234")
            sock.recv(4)

    def cpu(self) -> float:
        """Return the seconds of CPU that it has taken."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


def client(port: int, rounds: int, said: Queue[int], go: Event) -> None:
    """Be one client."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    said.put(0)
    go.wait()
    own = os.getpid()
    for number in range(rounds):
        key = f"{own}/{number % 100}"
        store.set(key, "x" * 64)
        store.get(key)
        store.add(str(own), 1)
        store.check([key])
    said.put(0)


def measure(kind: str, clients: int, rounds: int) -> tuple[float, float]:
    """Return requests a second, and milliseconds of CPU for a thousand."""
    import torch.distributed  # noqa: F401 - once for all clients

    server = Server(kind)
    context = multiprocessing.get_context("fork")
    said, go = context.Queue(), context.Event()
    each = max(1, rounds // clients)
    crowd = [
        context.Process(target=client, args=(server.port, each, said, go)) for _ in range(clients)
    ]
    for process in crowd:
        process.start()
    for _ in crowd:
        said.get()
    cpu, began = server.cpu(), time.monotonic()
    go.set()
    for _ in crowd:
        said.get()
    took, requests = time.monotonic() - began, ROUND * each * clients
    cpu = server.cpu() - cpu
    for process in crowd:
        process.join()
    server.close()
    return requests / took, 1e6 * cpu / requests


def crowd_of(kind: str, clients: int) -> tuple[float, float]:
    """Return the seconds until so many clients are connected, and until all have one key."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = Server(kind)
    wait = b"\6" + struct.pack("<QQ", 1, 2) + b"/k"
    began = time.monotonic()
    socks = []
    for _ in range(clients):
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.sendall(HELLO + b"\x0d1234" + wait)
        socks.append(sock)
    for sock in socks:
        sock.recv(4)
    joined = time.monotonic()
    socks[0].sendall(b"\1" + struct.pack("<Q", 2) + b"/k" + struct.pack("<Q", 1) + b"v")
    for sock in socks:
        sock.recv(1)
    ended = time.monotonic()
    for sock in socks:
        sock.close()
    server.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return joined - began, ended - joined


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4000)
    parser.add_argument("--crowd", type=int)
    options = parser.parse_args()
    if options.crowd:
        for kind in SERVERS:
            joined, woken = crowd_of(kind, options.crowd)
            say(f"{kind:>5}: {options.crowd} connected in {joined:.2f} s, woken in {woken:.2f} s")
        return
    for clients in (1, 4, 16):
        found = {kind: [measure(kind, clients, options.rounds)] for kind in SERVERS}
        for _ in range(options.turns - 1):
            for kind, figures in found.items():
                figures.append(measure(kind, clients, options.rounds))
        medians = {
            kind: [statistics.median(column) for column in zip(*figures, strict=True)]
            for kind, figures in found.items()
        }
        words = "; ".join(
            f"{kind} {rate:,.0f} requests/s, {cpu:.1f} ms CPU a thousand"
            for kind, (rate, cpu) in medians.items()
        )
        ratio = medians["torch"][0] / medians["ours"][0]
        say(f"{clients:>2} clients: {words}; torch/ours {ratio:.2f}")
    say(f"load {os.getloadavg()[0]:.1f}")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
