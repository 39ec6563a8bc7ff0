"""A cable that loses, doubles and reorders frames; run by `python -I -S`, started by `hosts.py`.

`bad_cable.py SHARE ONE OTHER` carries every frame from one network interface to the other and
back, but for that share of them which it loses, the same share that comes twice, and as many that
are overtaken.  It ends with its standard input, or with either interface.
"""

from __future__ import annotations

import heapq
import random
import select
import socket
import sys
import time

ALL_PROTOCOLS = 3
SOL_PACKET = 263
# With it come and go what the kernel left to do: checksums, and large segments to be cut.
PACKET_VNET_HDR = 15
FRAME_MAX = 1 << 17
LATE_SECONDS = 0.05


def attach(interface: str) -> socket.socket:
    """Return a socket for the frames of an interface."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sock.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    sock.bind((interface, ALL_PROTOCOLS))
    return sock


def carry(share: float, one: socket.socket, other: socket.socket) -> None:
    """Carry frames until standard input ends."""
    rng = random.Random(1)
    ends = {one: other, other: one}
    under_way: list[tuple[float, int, socket.socket, bytes]] = []
    count = 0
    while True:
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, _, to, frame = heapq.heappop(under_way)
            try:
                to.send(frame)
            except OSError:  # the host is off, or its queue full
                continue
        wait = max(0.0, under_way[0][0] - now) if under_way else None
        readable, _, _ = select.select([sys.stdin, *ends], [], [], wait)
        if sys.stdin in readable:
            return
        for sock in readable:
            try:
                frame, (_, _, kind, *_) = sock.recvfrom(FRAME_MAX)
            except OSError:  # an end of it was taken away
                return
            if kind == socket.PACKET_OUTGOING or rng.random() < share:
                continue
            for _ in range(2 if rng.random() < share else 1):
                count += 1
                late = LATE_SECONDS * rng.random() if rng.random() < share else 0.0
                heapq.heappush(under_way, (time.monotonic() + late, count, ends[sock], frame))


if __name__ == "__main__":
    carry(float(sys.argv[1]), attach(sys.argv[2]), attach(sys.argv[3]))
