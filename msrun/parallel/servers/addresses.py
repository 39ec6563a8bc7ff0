"""Where servers are: each publishes its address in the job's store.

The store belongs to one generation of the job's ranks: when they start again it is another one at
the same address, which is empty.  Servers live on, so a thread of each looks whether its address is
still there.  A server that starts again has another address; a rank looks for it when one that it
knows stays silent.
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

from msrun.environ import SERVERS_KEY
from msrun.errors import UsageError
from msrun.transport.keys import SECRET_BYTES

Address = tuple[str, int]
_PREFIX = "msrun_servers"
_SESSION = "session"
_LOOK_SECONDS = 0.5
_SEARCH_SECONDS = 0.1
_STORE_LIMIT = timedelta(seconds=60)


def read_key(directory: str) -> bytes | None:
    """Return the secret of the servers; None in a job without authentication.

    Raises:
        UsageError: The file holds none.
    """
    path = Path(directory) / SERVERS_KEY
    if not directory or not path.exists():
        return None
    try:
        secret = bytes.fromhex(path.read_text().strip())
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

    Attributes:
        addresses: Server -> its address, as far as known.
        session: Session of the ranks when the store was first reached; None before.
    """

    def __init__(
        self,
        master: Address,
        count: int,
        changed: Callable[[], None],
        own: tuple[int, Address] | None = None,
    ) -> None:
        self._master = master
        self._count = count
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
        if self.session is None:
            self.session = store.get(_SESSION).decode() if store.check([_SESSION]) else ""
            self._changed()
        announced = ""
        while not self._is_over:
            self._search.clear()
            if self._own and not store.check([str(self._own[0])]):
                self._publish(store, *self._own)
            if self._announced != announced:
                announced = self._announced
                store.set(_SESSION, announced)
            found = {number: self._read(store, number) for number in range(self._count)}
            known = {number: address for number, address in found.items() if address}
            if known != self.addresses:
                self.addresses = known
                self._changed()
            is_quiet = len(known) == self._count and self._own is None
            rest = _LOOK_SECONDS if len(known) == self._count else _SEARCH_SECONDS
            self._search.wait(None if is_quiet else rest)

    @staticmethod
    def _publish(store: Store, number: int, address: Address) -> None:
        host, port = address
        store.set(str(number), f"{port} {host}")

    @staticmethod
    def _read(store: Store, number: int) -> Address | None:
        if not store.check([str(number)]):
            return None
        port, _, host = store.get(str(number)).decode().partition(" ")
        return host, int(port)
