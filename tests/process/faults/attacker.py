"""A crowd of strangers at a port, as a program: `attacker.py CONNECTIONS SECONDS PORT`.

It opens connections as fast as the machine lets it, each of which sends half a greeting
and then nothing, replaces those that are closed, and ends after a while.
"""

import contextlib
import select
import socket
import sys
import time

HALF_A_GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f"


def main(connections, seconds, port):
    until = time.monotonic() + seconds
    poller = select.epoll()
    crowd = {}
    opened = 0
    while time.monotonic() < until:
        while opened < connections and len(crowd) < connections:
            stranger = socket.socket()
            stranger.settimeout(0)
            with contextlib.suppress(BlockingIOError):
                stranger.connect(("127.0.0.2", port))
            crowd[stranger.fileno()] = stranger
            poller.register(stranger, select.EPOLLOUT | select.EPOLLET)
            opened += 1
            if opened % 100 == 0:
                break
        for descriptor, _ in poller.poll(0.01):
            with contextlib.suppress(OSError):
                crowd[descriptor].send(HALF_A_GREETING)
    print(opened)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
