"""Whole messages over a socket pair between processes of one node."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Generic, TypeVar, cast

import msgspec

_HEADER = struct.Struct("!I")
FRAME_BYTES_MAX = 8 * 1024 * 1024
_DESCRIPTORS_MAX = 4

Incoming = TypeVar("Incoming")


def dump(message: object) -> bytes:
    """Return `message`, a msgspec struct, as one line of ASCII.

    JSON, because it alone carries the names of files and variables that are not UTF-8.
    """
    return json.dumps(msgspec.to_builtins(message)).encode()


def load(line: bytes | bytearray, kind: object) -> object:
    """Return the struct of type or union `kind` that `dump` wrote.

    Raises:
        ValueError: It is none.
    """
    return msgspec.convert(json.loads(line), kind)


class ChannelClosed(Exception):  # noqa: N818 - an event of the peer's, not an error of ours
    """The peer is gone."""


class Channel(Generic[Incoming]):
    """One end of a pair: sends any message, receives messages of the union `Incoming`.

    Args:
        sock: A connected stream socket; owned by the channel.
        incoming: The union of struct types that the peer sends.
    """

    def __init__(self, sock: socket.socket, incoming: object) -> None:
        self._socket = sock
        self._buffer = bytearray()
        self._descriptors: list[int] = []
        self._incoming = incoming

    def fileno(self) -> int:
        """Return the descriptor to poll for `receive`."""
        return self._socket.fileno()

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send `message`; one that the peer cannot get any more is dropped.

        A peer that is gone shows as `ChannelClosed` from `receive`, the one place
        where its end is dealt with.

        Args:
            message: The message.
            descriptors: Open files that go with it, at most `_DESCRIPTORS_MAX`, which the peer
                takes with `take_descriptors`.
        """
        body = dump(message)
        data = _HEADER.pack(len(body)) + body
        try:
            if descriptors:
                data = data[socket.send_fds(self._socket, [data], descriptors) :]
            self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return
        except BlockingIOError:
            # The peer has read nothing for as long as the socket allows.  Half a message may have
            # left, so that this end and the other one close.
            self._socket.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[Incoming]:
        """Return the messages that have arrived in whole; blocks when there are no bytes.

        Raises:
            ChannelClosed: The peer is gone and everything it sent was returned.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._socket, 1 << 16, _DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            raise ChannelClosed from None
        self._descriptors += descriptors
        if not data:
            raise ChannelClosed
        self._buffer += data
        return self._take()

    def take_descriptors(self, count: int) -> list[int]:
        """Return the open files that came with a message, in the order of the messages."""
        taken, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        return taken

    def _take(self) -> list[Incoming]:
        messages: list[Incoming] = []
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > FRAME_BYTES_MAX:
                raise ChannelClosed
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append(
                cast("Incoming", load(self._buffer[_HEADER.size : end], self._incoming))
            )
            del self._buffer[:end]
        return messages

    def finish(self) -> None:
        """Tell the peer that nothing more will be sent; it may still answer."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        """Give the socket up."""
        self._socket.close()
