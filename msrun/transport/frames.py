"""Messages of several frames, without the overhead of pyzmq's multipart calls.

Their flags are enums, which would cost a scheduler of thousands of nodes a quarter of its time.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq

NOBLOCK = int(zmq.NOBLOCK)
SNDMORE = int(zmq.SNDMORE)


def receive(sock: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """Return the frames of one message.

    Raises:
        zmq.Again: None waits.
    """
    frames = [sock.recv(NOBLOCK, copy=False)]
    while frames[-1].more:
        frames.append(sock.recv(NOBLOCK, copy=False))
    return frames


def send(sock: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
    """Send `frames` as one message.

    Raises:
        zmq.ZMQError: They cannot be queued at once.
    """
    for frame in frames[:-1]:
        sock.send(frame, NOBLOCK | SNDMORE)
    sock.send(frames[-1], NOBLOCK)
