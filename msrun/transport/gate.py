"""Admission to the control connection: holders of known keys may connect, and nobody else.

ZeroMQ asks a ZAP handler about every CURVE handshake, over a socket of the same context.  pyzmq's
own handlers need a thread or asyncio; here the process's loop answers, so that admission costs no
thread and no lock.  Two dangers are handled: a flood of handshakes must not keep the loop from its
other work (`_ANSWERS_MAX`), and the memory that ZeroMQ keeps for each connection that has asked
must not grow with the number of connections ever made (`_renew`).
"""

from __future__ import annotations

from collections.abc import Mapping

import zmq
from zmq.utils import z85

from msrun.transport import frames
from msrun.transport.loop import Loop

DOMAIN = "msrun"
_ADDRESS = "inproc://zeromq.zap.01"
# Handshakes that are answered at once, before the loop does its other work.
_ANSWERS_MAX = 1024
_RENEW_AFTER = 256


class Gate:
    """The admission of one context's CURVE servers.

    Source: ZeroMQ RFC 27 (ZAP).

    For every connection that has asked, ZeroMQ keeps two queues, 10 KiB, to the socket that
    answers, as long as both exist.  So after every `_RENEW_AFTER` answers a new socket takes over.
    The old one stays open until the next change, which is long enough for requests under way; a
    connection that asks between its unbinding and the new binding has to connect again.

    Args:
        context: ZeroMQ context of the servers.
        allowed: Public key -> the role of its holder, which the frames of its connection carry.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], allowed: Mapping[bytes, str]
    ) -> None:
        self._context = context
        self._allowed = {z85.decode(key): role for key, role in allowed.items()}
        self._loop: Loop | None = None
        self._answered = 0
        self._before: zmq.Socket[bytes] | None = None
        self.socket = self._open()

    def serve(self, loop: Loop) -> None:
        """Have `loop` answer the handshakes that ask for admission."""
        self._loop = loop
        loop.watch(self.socket, self.answer)

    def answer(self) -> None:
        """Answer the handshakes that ask for admission."""
        for asked in (self._before, self.socket):
            if asked is not None:
                self._answer_all(asked)
        if self._answered >= _RENEW_AFTER:
            self._renew()

    def _open(self) -> zmq.Socket[bytes]:
        opened = self._context.socket(zmq.REP)
        opened.setsockopt(zmq.LINGER, 0)
        opened.bind(_ADDRESS)
        return opened

    def _renew(self) -> None:
        """Answer on a new socket; the present one stays open for requests under way."""
        self._answered = 0
        self._close(self._before)
        self._before = self.socket
        self._before.unbind(_ADDRESS)
        self.socket = self._open()
        if self._loop:
            self._loop.watch(self.socket, self.answer)

    def _close(self, sock: zmq.Socket[bytes] | None) -> None:
        if sock is None:
            return
        if self._loop:
            self._loop.forget(sock)
        sock.close()

    def _answer_all(self, asked: zmq.Socket[bytes]) -> None:
        for _ in range(_ANSWERS_MAX):
            try:
                request = [frame.bytes for frame in frames.receive(asked)]
            except zmq.Again:
                return
            frames.send(asked, self._answer(request))
            self._answered += 1

    def _answer(self, asked: list[bytes]) -> list[bytes]:
        version, request, domain, _, _, mechanism, *credentials = asked
        is_ours = domain == DOMAIN.encode() and mechanism == b"CURVE" and len(credentials) == 1
        role = self._allowed.get(credentials[0]) if is_ours else None
        status = [b"200", b"OK"] if role else [b"400", b"unknown key"]
        return [version, request, *status, (role or "").encode(), b""]
