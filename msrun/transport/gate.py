"""Who may connect: the holders of known keys, and nobody else."""

from __future__ import annotations

from collections.abc import Mapping

import zmq
from zmq.utils import z85

from msrun.transport import frames
from msrun.transport.loop import Loop

DOMAIN = "msrun"
_ADDRESS = "inproc://zeromq.zap.01"
# Of handshakes answered at once, so that they keep the loop from nothing else.
_ANSWERS_MAX = 1024
_RENEW_AFTER = 256


class Gate:
    """Admits to one context's CURVE servers the holders of known keys, and nobody else.

    Source: ZeroMQ RFC 27 (ZAP), whose requests arrive on a socket of the same context,
    so that the process's own loop answers them and no thread is needed.

    ZeroMQ keeps two queues to that socket, 10 KiB, for every connection that has asked, as long
    as both live.  So among thousands another takes its place now and then: what is under way has
    come long before that one is closed, and who asks between the two has to connect again.

    Args:
        context: ZeroMQ context of the servers.
        allowed: Public key -> the role of whoever holds it, which its frames then carry.
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
        """Put another socket in the place of ours, which stays for who has asked it."""
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
