"""Where servers are: each publishes its address in the job's store.

The store belongs to one generation of the job's ranks: when they start again it is another one at
the same address, which is empty.  Servers live on, so a thread of each looks whether its address is
still there.  A server that starts again has another address; a rank looks for it when one that it
knows stays silent.

`msrun scale` changes how many there are.  The launcher writes the number into a file beside server
0, which puts it into the store: the number to come, as long as rows are on their way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import (  # type: ignore[attr-defined]  # in torch's documentation
    PrefixStore,
    Store,
    TCPStore,
)

from msrun.environ import SERVERS_COUNT, SERVERS_INSECURE, SERVERS_KEY
from msrun.errors import UsageError
from msrun.transport.keys import SECRET_BYTES

Address = tuple[str, int]
_PREFIX = "msrun_servers"
_SESSION = "session"
_TOTAL = "total"
_LOOK_SECONDS = 0.5
_SEARCH_SECONDS = 0.1
_STORE_LIMIT = timedelta(seconds=60)


def read_count(directory: str) -> int | None:
    """Return how many servers the launcher wants; None as long as that is what it began with."""
    try:
        return int((Path(directory) / SERVERS_COUNT).read_text())
    except FileNotFoundError:
        return None


def read_key(directory: str) -> bytes | None:
    """Return the secret of the servers; None in a job that is said to have none.

    Raises:
        UsageError: The file holds neither, or is not there: a server must not be open to all
            because a file was lost.
    """
    path = Path(directory) / SERVERS_KEY
    try:
        text = path.read_text().strip()
    except OSError as error:
        raise UsageError(f"no key of the parameter servers: {path}: {error.strerror}") from None
    if text == SERVERS_INSECURE:
        return None
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        text = f"{path} holds no key of {SECRET_BYTES} bytes in hexadecimal digits"
        raise UsageError(text)
    return secret


class AddressBook:
    """The addresses of all servers, as the store has them.  A thread of its own reads it.

    Args:
        master: Host and port of the store.
        count: Number of servers.
        changed: Called in that thread after a change.
        own: Number and address of the server that this process is; None in a rank.
        wanted: Called in that thread in server 0: returns how many servers there are to be, as
            `read_count`.

    Attributes:
        addresses: Server -> its address, as far as known.
        total: How many servers there are; those that are one too many count until they end.
        wanted: What the call returned last.
        session: The first session of the ranks that a store has named; empty where none has yet,
            None before a store was reached.
    """

    def __init__(
        self,
        master: Address,
        count: int,
        changed: Callable[[], None],
        own: tuple[int, Address] | None = None,
        wanted: Callable[[], int | None] | None = None,
    ) -> None:
        self._master = master
        self._ask_wanted = wanted
        self.wanted: int | None = None
        self.total = count
        self._own_total: int | None = None
        self._is_withdrawn = False
        self._changed = changed
        self._own = own
        self._search = threading.Event()
        self._is_over = False
        self._announced = ""
        self.addresses: dict[int, Address] = {}
        self.session: str | None = None
        self._thread = threading.Thread(target=self._run, name="msrun-servers-store", daemon=True)
        self._thread.start()

    def search(self) -> None:
        """Look for addresses now: a server is silent."""
        self._search.set()

    def announce(self, session: str) -> None:
        """Have the store say which session the ranks are in, for servers that start again."""
        self._announced = session
        self._search.set()

    def count(self, total: int) -> None:
        """Have all know how many servers there are; server 0 says so."""
        self._own_total = total
        self._search.set()

    def withdraw(self) -> None:
        """Take the own address back when the thread ends: this server is one too many."""
        self._is_withdrawn = True

    def close(self) -> None:
        """End the thread, unless it waits for the store."""
        self._is_over = True
        self._search.set()
        self._thread.join(_LOOK_SECONDS)

    def _run(self) -> None:
        while not self._is_over:
            try:
                host, port = self._master
                base = TCPStore(host, port, timeout=_STORE_LIMIT, wait_for_workers=False)
                self._follow(PrefixStore(_PREFIX, base))
            except RuntimeError:  # the store of a generation that has ended
                self._search.wait(_SEARCH_SECONDS)

    def _follow(self, store: Store) -> None:
        """Publish and read until the store breaks."""
        if self._own:
            self._publish(store, *self._own)
        session, announced, counted = "", "", None
        while not self._is_over:
            self._search.clear()
            if self._announced != announced:
                announced = self._announced
                store.set(_SESSION, announced)
            if self._own_total != counted and self._own_total is not None:
                counted = self._own_total
                store.set(_TOTAL, str(counted))
            if self._own and not session:
                session = _found(store, [_SESSION]).get(_SESSION, b"").decode()
            total = int(_found(store, [_TOTAL]).get(_TOTAL, self.total))
            wanted = self._ask_wanted() if self._ask_wanted else None
            found = _found(store, list(map(str, range(total))))
            if self._own and str(self._own[0]) not in found:
                self._publish(store, *self._own)
            known = {int(number): _address(said) for number, said in found.items()}
            before = (self.addresses, self.total, self.wanted, self.session)
            now = (known, total, wanted, self.session or session)
            if now != before:
                self.addresses, self.total, self.wanted, self.session = now
                self._changed()
            is_quiet = len(known) == total and self._own is None
            rest = _LOOK_SECONDS if len(known) == total else _SEARCH_SECONDS
            self._search.wait(None if is_quiet else rest)
        if self._is_withdrawn and self._own:
            store.delete_key(str(self._own[0]))

    @staticmethod
    def _publish(store: Store, number: int, address: Address) -> None:
        host, port = address
        store.set(str(number), f"{port} {host}")


def _found(store: Store, keys: list[str]) -> dict[str, bytes]:
    """Return what a store has of some keys, in two round trips where it has them all."""
    if not store.check(keys):
        keys = [key for key in keys if store.check([key])] if len(keys) > 1 else []
    return dict(zip(keys, store.multi_get(keys), strict=True)) if keys else {}


def _address(said: bytes) -> Address:
    port, _, host = said.decode().partition(" ")
    return host, int(port)
