"""The ports of the operator: whether it lives, whether it is ready, and its metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from msrun.errors import UsageError
from msrun.units import PORT_MAX, shown

_HEAD_BYTES_MAX = 8 << 10
_SECONDS = 5.0
_TEXT = "text/plain; version=0.0.4; charset=utf-8"

Route = Callable[[], str | None]
"""Returns what stands at a path, None where the answer is no."""


def parse_address(text: str, option: str) -> tuple[str, int] | None:
    """Return host and port of `HOST:PORT` or `:PORT`; None of `0`, which is no port at all.

    Raises:
        UsageError: It is none of these.
    """
    if text == "0":
        return None
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) <= PORT_MAX:
        raise UsageError(f"{option} {shown(text)} is no address (choose :8080, HOST:PORT or 0)")
    return host.removeprefix("[").removesuffix("]"), int(port)


class ProbeServer:
    """Answers GET at some addresses."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []

    async def listen(self, address: tuple[str, int], routes: Mapping[str, Route]) -> None:
        """Answer at an address from now on.

        Raises:
            UsageError: Another program has it.
        """

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, TimeoutError, ValueError):
                async with asyncio.timeout(_SECONDS):
                    await _answer(reader, writer, routes)
            writer.close()

        host, port = address
        try:
            server = await asyncio.start_server(answer, host or None, port, limit=_HEAD_BYTES_MAX)
        except OSError as error:
            where = f"{host or '*'}:{port}"
            raise UsageError(f"nobody can listen at {where}: {error.strerror}") from None
        self._servers.append(server)

    def close(self) -> None:
        """Answer no more."""
        for server in self._servers:
            server.close()


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, routes: Mapping[str, Route]
) -> None:
    """Read one request and answer it; a client that says more is not listened to."""
    method, path, _ = (await reader.readline()).decode("latin-1").split(" ", 2)
    while (await reader.readline()).strip():
        pass
    route = routes.get(path.partition("?")[0])
    status, text = "404 Not Found", "there is nothing here\n"
    if method not in ("GET", "HEAD"):
        status, text = "405 Method Not Allowed", "only GET\n"
    elif route is not None:
        found = route()
        status, text = ("503 Service Unavailable", "no\n") if found is None else ("200 OK", found)
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {_TEXT}\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode())
    if method != "HEAD":
        writer.write(body)
    await writer.drain()
