"""What ZeroMQ itself takes: N connections with CURVE to one ROUTER, and a word each way on each.

    python scripts/bench/bare_connections.py 1000

Prints seconds from the first connection to the last answer.  No scheduler that has a
connection of its own for each agent can be faster; rendezvous.py says how near ours comes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from threading import Barrier

import zmq

PROCESSES = 4
WORD = b"x" * 200


def main() -> None:
    """Take the words of as many clients as the command line says."""
    clients = int(sys.argv[1])
    server_keys, client_keys = zmq.curve_keypair(), zmq.curve_keypair()
    started = multiprocessing.get_context("spawn")
    sock = zmq.Context().socket(zmq.ROUTER)
    sock.setsockopt(zmq.BACKLOG, 4096)
    sock.curve_server = True
    sock.curve_publickey, sock.curve_secretkey = server_keys
    port = sock.bind_to_random_port("tcp://127.0.0.1")
    shares = [len(range(first, clients, PROCESSES)) for first in range(PROCESSES)]
    together = started.Barrier(PROCESSES + 1)
    crowds = [
        started.Process(target=connect, args=(port, share, server_keys[0], client_keys, together))
        for share in shares
    ]
    for crowd in crowds:
        crowd.start()
    together.wait()
    began = time.monotonic()
    for _ in range(clients):
        sock.send_multipart(sock.recv_multipart())
    together.wait()
    ended = time.monotonic()
    for crowd in crowds:
        crowd.join()
    sys.stdout.write(f"{ended - began}\n")


def connect(
    port: int, clients: int, server: bytes, own: tuple[bytes, bytes], together: Barrier
) -> None:
    """Be so many clients, each with its connection."""
    sock = zmq.Context().socket(zmq.ROUTER)
    sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
    sock.curve_serverkey = server
    sock.curve_publickey, sock.curve_secretkey = own
    together.wait()
    for number in range(clients):
        name = b"n%d" % number
        sock.setsockopt(zmq.CONNECT_ROUTING_ID, name)
        sock.setsockopt(zmq.ROUTING_ID, b"a" + os.urandom(16))
        sock.connect(f"tcp://127.0.0.1:{port}")
        sock.send_multipart([name, WORD])
    for _ in range(clients):
        sock.recv_multipart()
    together.wait()


if __name__ == "__main__":
    main()
