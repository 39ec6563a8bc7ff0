"""What goes on with a running pod: its log, commands in it, connections to its ports.

Commands and connections use the WebSocket protocols `v5.channel.k8s.io` and `v4.channel.k8s.io`:
the first byte of each message says which stream the rest belongs to.  kubectl's port-forward speaks
SPDY through a WebSocket instead (`spdy.py`); the python client's does not.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import subprocess
import sys
import threading
import time
import urllib.parse

from kube import spdy
from kube.failures import ApiError

STDIN, STDOUT, STDERR, STATUS, RESIZE = range(5)
CLOSE_STREAM = 255
_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, 1.3
_TEXT, _BINARY, _CLOSE, _PING, _PONG = 1, 2, 8, 9, 10
_POLL = 0.02
# Connects standard input and output with a port of the pod.
RELAY = """
import os, socket, sys, threading
peer = socket.create_connection(("localhost", int(sys.argv[1])))
def send():
    while data := os.read(0, 65536):
        peer.sendall(data)
    peer.shutdown(socket.SHUT_WR)
threading.Thread(target=send, daemon=True).start()
while data := peer.recv(65536):
    os.write(1, data)
"""


def send_log(handler, pod: dict) -> None:
    """Answer a request for a container's log, to its end where it is to be followed."""
    query, pods = handler.query, handler.api.pods
    if pods is None:
        raise ApiError(500, "InternalError", "this cluster has no kubelets")
    path = pods.log_of(pod, query.get("container"), previous=query.get("previous") == "true")
    tail = query.get("tailLines")
    with path.open("rb") as file:
        text = file.read() if tail is not None else b""
        lines = text.splitlines(keepends=True)
        start = b"".join(lines[max(0, len(lines) - int(tail)) :]) if tail is not None else b""
        handler._start_chunks("text/plain")
        stamp = _Stamps(pod) if query.get("timestamps") == "true" else bytes
        if start:
            handler._chunk(stamp(start))
        while handler.api.is_up:
            is_over = query.get("follow") not in ("true", "1") or pods.has_ended(pod)
            if data := b"".join(file.readlines(1 << 16)):
                handler._chunk(stamp(data))
            elif is_over:
                break
            else:
                time.sleep(_POLL)
    handler._end_chunks()


class _Stamps:
    """Puts a time before each line: the start of the pod, and its place as nanoseconds.

    So a line has the same time whenever it is asked for, and `sinceTime`, which is in seconds,
    leaves out none.
    """

    def __init__(self, pod: dict) -> None:
        self._second = pod["status"]["startTime"][:19]
        self._place = 0
        self._is_inside = False

    def __call__(self, data: bytes) -> bytes:
        out = b""
        for line in data.splitlines(keepends=True):
            stamp = f"{self._second}.{self._place:09}Z ".encode()
            out += line if self._is_inside else stamp + line
            self._is_inside = not line.endswith(b"\n")
            self._place += len(line)
        return out


def run(handler, pod: dict) -> None:
    """Answer `exec` and `portforward`."""
    offered = handler.headers.get("Sec-WebSocket-Protocol", "").replace(" ", "").split(",")
    is_tunnel = handler.sub == "portforward" and spdy.PROTOCOL in offered
    protocol = next((word for word in _PROTOCOLS if word in offered), None)
    protocol = spdy.PROTOCOL if is_tunnel else protocol
    if protocol is None:
        raise ApiError(400, "BadRequest", f"this server speaks {' and '.join(_PROTOCOLS)} only")
    if handler.api.pods is None:
        raise ApiError(500, "InternalError", "this cluster has no kubelets")
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(handler.path).query)
    has_stdin = query.get("stdin", [""])[0] in ("true", "1", "True")
    container = query.get("container", [None])[0]
    if is_tunnel:
        _upgrade(handler, protocol)
        _tunnel(_WebSocket(handler.rfile, handler.wfile), handler.api.pods, pod, container)
        return
    if handler.sub == "portforward":
        ports = [int(port) for words in query["ports"] for port in words.split(",")]
        commands = [[sys.executable, "-c", RELAY, str(port)] for port in ports]
    else:
        commands = [handler.words]
    programs = [handler.api.pods.run_in(pod, container, words) for words in commands]
    _upgrade(handler, protocol)
    socket = _WebSocket(handler.rfile, handler.wfile)
    try:
        if handler.sub == "portforward":
            _forward(socket, ports, programs)
        else:
            _execute(socket, programs[0], has_stdin=has_stdin)
    finally:
        for program in programs:
            program.kill()
            program.wait()
            for pipe in (program.stdin, program.stdout, program.stderr):
                with contextlib.suppress(OSError):
                    pipe.close()


def _upgrade(handler, protocol: str) -> None:
    """Have the connection speak WebSocket from now on."""
    key = handler.headers["Sec-WebSocket-Key"] + _GUID
    handler.send_response(101)
    handler.send_header("Upgrade", "websocket")
    handler.send_header("Connection", "Upgrade")
    accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
    handler.send_header("Sec-WebSocket-Accept", accept)
    handler.send_header("Sec-WebSocket-Protocol", protocol)
    handler.end_headers()
    handler.close_connection = True


def _tunnel(socket: _WebSocket, pods, pod: dict, container: str | None) -> None:
    forward = spdy.PortForward(
        socket.send_bytes,
        lambda port: pods.run_in(pod, container, [sys.executable, "-c", RELAY, str(port)]),
    )
    try:
        with contextlib.suppress(OSError, ValueError):
            for data in socket.frames():
                forward.feed(data)
    finally:
        forward.close()


class _WebSocket:
    """The messages of one connection; any thread may send."""

    def __init__(self, reader, writer) -> None:
        self._reader, self._writer = reader, writer
        self._lock = threading.Lock()

    def send(self, stream: int, data: bytes, kind: int = _BINARY) -> None:
        self._frame(kind, bytes([stream]) + data)

    def close(self, code: int = 1000) -> None:
        with contextlib.suppress(OSError):
            self._frame(_CLOSE, code.to_bytes(2, "big"))

    def _frame(self, kind: int, data: bytes) -> None:
        size = len(data)
        if size < 126:
            head = bytes([0x80 | kind, size])
        elif size < 1 << 16:
            head = bytes([0x80 | kind, 126]) + size.to_bytes(2, "big")
        else:
            head = bytes([0x80 | kind, 127]) + size.to_bytes(8, "big")
        with self._lock:
            self._writer.write(head + data)
            self._writer.flush()

    def send_bytes(self, data: bytes) -> None:
        self._frame(_BINARY, data)

    def messages(self):
        """Yield streams and what came for them, until the client closes."""
        return ((data[0], data[1:]) for data in self.frames())

    def frames(self):
        """Yield what came, until the client closes."""
        while len(head := self._reader.read(2)) == 2:
            size = head[1] & 0x7F
            if size >= 126:
                size = int.from_bytes(self._reader.read(2 if size == 126 else 8), "big")
            mask = self._reader.read(4) if head[1] & 0x80 else bytes(4)
            data = self._reader.read(size)
            data = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
            match head[0] & 0x0F:
                case kind if kind == _CLOSE:
                    return
                case kind if kind == _PING:
                    self._frame(_PONG, data)
                case _ if data:
                    yield data


def _execute(socket: _WebSocket, program: subprocess.Popen[bytes], *, has_stdin: bool) -> None:
    def pump(pipe, stream: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := pipe.read1(1 << 16):
                socket.send(stream, data)

    def listen() -> None:
        with contextlib.suppress(OSError, ValueError):
            for stream, data in socket.messages():
                if stream == STDIN:
                    program.stdin.write(data)
                    program.stdin.flush()
                elif stream == CLOSE_STREAM and data == bytes([STDIN]):
                    program.stdin.close()
            program.kill()  # nobody is there any more

    if not has_stdin:
        program.stdin.close()
    readers = [
        threading.Thread(target=pump, args=(pipe, stream), daemon=True)
        for pipe, stream in ((program.stdout, STDOUT), (program.stderr, STDERR))
    ]
    for reader in (*readers, threading.Thread(target=listen, daemon=True)):
        reader.start()
    for reader in readers:
        reader.join()
    with contextlib.suppress(OSError):
        socket.send(STATUS, json.dumps(_status_of(program.wait())).encode())
    socket.close()


def _status_of(code: int) -> dict:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    code = code if code > 0 else 128 - code
    return {
        "metadata": {},
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


def _forward(socket: _WebSocket, ports: list[int], programs: list[subprocess.Popen[bytes]]) -> None:
    def pump(number: int, program: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := program.stdout.read1(1 << 16):
                socket.send(2 * number, data)
        if error := program.stderr.read():
            with contextlib.suppress(OSError, ValueError):
                socket.send(2 * number + 1, error.splitlines()[-1])
        if len(programs) == 1:
            socket.close()

    for number, port in enumerate(ports):
        for stream in (2 * number, 2 * number + 1):
            socket.send(stream, port.to_bytes(2, "little"))
    for pair in enumerate(programs):
        threading.Thread(target=pump, args=pair, daemon=True).start()
    with contextlib.suppress(OSError, ValueError):
        for stream, data in socket.messages():
            pipe = programs[stream // 2].stdin
            pipe.write(data)
            pipe.flush()
