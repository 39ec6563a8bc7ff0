"""As much of SPDY/3.1 as kubectl's port-forward speaks through a WebSocket.

The client opens two streams for each connection, named by their headers: one for errors and one
for data.  A stream must be answered, then both sides send data frames until each has sent a last
one.  Flow control is not used.  Source: the SPDY protocol, drafts 3 and 3.1.
"""

from __future__ import annotations

import contextlib
import struct
import subprocess
import threading
import zlib
from collections.abc import Callable

PROTOCOL = "SPDY/3.1+portforward.k8s.io"
_SYN_STREAM, _SYN_REPLY, _RST_STREAM, _PING, _GOAWAY = 1, 2, 3, 6, 7
_FIN = 1
_CONTROL = 0x80030000
_CHUNK = 1 << 14
# What both sides have compressed before the first header (2.6.10.1 of the draft).
_WORDS = (
    "options head post put delete trace accept accept-charset accept-encoding accept-language "
    "accept-ranges age allow authorization cache-control connection content-base content-encoding "
    "content-language content-length content-location content-md5 content-range content-type date "
    "etag expect expires from host if-match if-modified-since if-none-match if-range "
    "if-unmodified-since last-modified location max-forwards pragma proxy-authenticate "
    "proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade "
    "user-agent vary via warning www-authenticate method get status|200 OK|version HTTP/1.1 url "
    "public set-cookie keep-alive origin"
)
_REST = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request"
    "401 Unauthorized403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented"
    "503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, "
    "Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,application/xml,"
    "application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdch"
    "charset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)


def _dictionary() -> bytes:
    words = _WORDS.replace("|", " ").replace("200 OK", "200\0OK").split(" ")
    named = (word.replace("\0", " ").encode() for word in words)
    return b"".join(struct.pack(">I", len(word)) + word for word in named) + _REST.encode()


class PortForward:
    """The server's side of one client's connections.

    Args:
        send: Sends bytes to the client; any thread may call it.
        connect: Starts a program that relays to a port.
    """

    def __init__(
        self, send: Callable[[bytes], None], connect: Callable[[int], subprocess.Popen[bytes]]
    ) -> None:
        self._send, self._connect = send, connect
        self._inflate = zlib.decompressobj(zdict=_dictionary())
        self._deflate = zlib.compressobj(zdict=_dictionary())
        self._rest = b""
        self._lock = threading.Lock()
        self._errors: dict[str, int] = {}
        self._programs: dict[int, subprocess.Popen[bytes]] = {}

    def feed(self, data: bytes) -> None:
        """Take what the client sent."""
        self._rest += data
        while len(self._rest) >= 8:
            first, size = struct.unpack(">II", self._rest[:8])
            flags, size = size >> 24, size & 0xFFFFFF
            if len(self._rest) < 8 + size:
                return
            body, self._rest = self._rest[8 : 8 + size], self._rest[8 + size :]
            if first & 0x80000000:
                self._control(first & 0xFFFF, body)
            else:
                self._data(first, flags, body)

    def close(self) -> None:
        """End all connections."""
        for program in self._programs.values():
            program.kill()
            program.wait()
            for pipe in (program.stdin, program.stdout, program.stderr):
                with contextlib.suppress(OSError):
                    pipe.close()

    def _control(self, kind: int, body: bytes) -> None:
        if kind == _PING:
            self._frame(_CONTROL | _PING, 0, body)
        elif kind == _SYN_STREAM:
            stream = struct.unpack(">I", body[:4])[0]
            headers = _pairs(self._inflate.decompress(body[10:]))
            with self._lock:
                block = self._deflate.compress(bytes(4)) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
            self._frame(_CONTROL | _SYN_REPLY, 0, struct.pack(">I", stream) + block)
            number = headers["requestid"]
            if headers["streamtype"] == "error":
                self._errors[number] = stream
            else:
                self._open(stream, self._errors[number], int(headers["port"]))

    def _open(self, stream: int, errors: int, port: int) -> None:
        program = self._programs[stream] = self._connect(port)
        threading.Thread(target=self._pump, args=(stream, errors, program), daemon=True).start()

    def _pump(self, stream: int, errors: int, program: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := program.stdout.read1(_CHUNK):
                self._frame(stream, 0, data)
            said = program.stderr.read().splitlines()[-1:]
            self._frame(errors, _FIN, b"".join(said))
            self._frame(stream, _FIN, b"")

    def _data(self, stream: int, flags: int, body: bytes) -> None:
        program = self._programs.get(stream)
        if program is None:
            return
        with contextlib.suppress(OSError, ValueError):
            program.stdin.write(body)
            program.stdin.flush()
            if flags & _FIN:
                program.stdin.close()

    def _frame(self, first: int, flags: int, body: bytes) -> None:
        self._send(struct.pack(">II", first, flags << 24 | len(body)) + body)


def _pairs(block: bytes) -> dict[str, str]:
    """Return the headers of a block, their names in lower case."""
    place, texts = 4, []
    for _ in range(2 * struct.unpack(">I", block[:4])[0]):
        (size,) = struct.unpack(">I", block[place : place + 4])
        texts.append(block[place + 4 : place + 4 + size].decode())
        place += 4 + size
    return {name.lower(): text for name, text in zip(texts[::2], texts[1::2], strict=True)}
