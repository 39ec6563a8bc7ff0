"""What a store holds, and who waits for what: the semantics of torch's TCPStore, bounded.

A waiter is any object with a method `wake`.  Where torch's own server is odd we are not: a key and
a queue of one name both end a wait, and a push wakes one waiter and forgets it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import Protocol

VALUE_BYTES_MAX = 64 << 20
"""Of one key, to which `append` adds without end; one message brings at most 8 MiB."""
MINDSPORE_KEY = b"msrun/mindspore"
"""Where MindSpore's scheduler is, in a job of several nodes that has one."""
_KEY_COST = 160  # of Python's objects around a key and its value
_INT64 = 1 << 63
_NUMBER = re.compile(rb"-?[0-9]{1,19}").fullmatch


class StoreRefusal(Exception):  # noqa: N818 - the client's mistake, for which it is disconnected
    """A client asked for what the store does not do; its connection ends."""


class Waiter(Protocol):
    """Who waits for keys."""

    def wake(self) -> None:
        """All of the keys are there."""


class StoreKeys:
    """Keys, queues and waits of one store.

    Args:
        bytes_max: Of all keys and values together.
    """

    def __init__(self, bytes_max: int) -> None:
        self.values: dict[bytes, bytes] = {}
        self.size = 0
        self._bytes_max = bytes_max
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiting: dict[bytes, dict[Waiter, None]] = {}
        self._missing: dict[Waiter, set[bytes]] = {}

    def set(self, key: bytes, value: bytes) -> None:
        """Set `key` to `value`."""
        before = self.values.get(key)
        if before is None:
            self._grow(_KEY_COST + len(key) + len(value), key)
        else:
            self._grow(len(value) - len(before), key)
        self.values[key] = value
        if self._waiting:
            self._arrived(key)

    def _grow(self, count: int, key: bytes) -> None:
        if count > 0 and self.size + count > self._bytes_max:
            limit = f"{self._bytes_max >> 20} MiB"
            raise StoreRefusal(f"the store is full: {shown(key)} would exceed its {limit}")
        self.size += count

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Set `key` to `desired` if it is `expected`, or missing and nothing is; return its value.

        Of a missing key for which something was expected, torch returns what was expected.
        """
        value = self.values.get(key)
        if value is None:
            if expected:
                return expected
            self.set(key, desired)
            return desired
        if value == expected:
            self.set(key, desired)
            return desired
        return value

    def add(self, key: bytes, amount: int) -> int:
        """Add to the decimal number at `key`, 0 when there is none; return the sum."""
        total = self._number(key) + amount
        if not -_INT64 <= total < _INT64:
            raise StoreRefusal(f"the number at {shown(key)} exceeds 64 bits")
        self.set(key, b"%d" % total)
        return total

    def _number(self, key: bytes) -> int:
        value = self.values.get(key, b"0")
        if not _NUMBER(value):
            raise StoreRefusal(f"{shown(key)} holds no number to add to")
        return int(value)

    def append(self, key: bytes, value: bytes) -> None:
        """Append `value` to what is at `key`."""
        before = self.values.get(key, b"")
        if len(before) + len(value) > VALUE_BYTES_MAX:
            limit = f"{VALUE_BYTES_MAX >> 20} MiB"
            raise StoreRefusal(f"the value at {shown(key)} would exceed {limit}")
        self.set(key, before + value)

    def delete(self, key: bytes) -> bool:
        """Remove `key`; return whether it was there."""
        value = self.values.pop(key, None)
        if value is None:
            return False
        self.size -= _KEY_COST + len(key) + len(value)
        return True

    def has(self, key: bytes) -> bool:
        """Whether there is a value at `key`, or in the queue of that name."""
        return key in self.values or bool(self._queues.get(key))

    def wait(self, waiter: Waiter, keys: Sequence[bytes]) -> bool:
        """Return whether all `keys` are there; else `waiter` is woken once, when they are."""
        missing = {key for key in keys if not self.has(key)}
        if not missing:
            return True
        self.forget(waiter)
        self._missing[waiter] = missing
        for key in missing:
            self._waiting.setdefault(key, {})[waiter] = None
        return False

    def barrier(self, waiter: Waiter, key: bytes, world_size: int) -> bool:
        """Count `waiter` in; return whether all have come, else it is woken when they have."""
        count = self._number(key) + 1
        value = b"%d" % count
        if count >= world_size:
            self.set(key, value)
            return True
        # Not by `set`, which would wake those who came before.
        before = self.values.get(key)
        self._grow(len(value) + (_KEY_COST + len(key) if before is None else -len(before)), key)
        self.values[key] = value
        self.forget(waiter)
        self._missing[waiter] = {key}
        self._waiting.setdefault(key, {})[waiter] = None
        return False

    def forget(self, waiter: Waiter) -> None:
        """End the wait of `waiter`, if there is one."""
        for key in self._missing.pop(waiter, ()):
            waiting = self._waiting[key]
            del waiting[waiter]
            if not waiting:
                del self._waiting[key]

    def _arrived(self, key: bytes) -> None:
        for waiter in self._waiting.pop(key, ()):
            self._found(waiter, key)

    def _found(self, waiter: Waiter, key: bytes) -> None:
        missing = self._missing[waiter]
        missing.remove(key)
        if not missing:
            del self._missing[waiter]
            waiter.wake()

    def push(self, key: bytes, value: bytes) -> None:
        """Put `value` at the end of a queue, and wake one of those who wait for it."""
        self._grow(_KEY_COST + len(key) + len(value), key)
        self._queues.setdefault(key, deque()).append(value)
        if waiting := self._waiting.get(key):
            waiter = next(iter(waiting))
            del waiting[waiter]
            if not waiting:
                del self._waiting[key]
            self._found(waiter, key)

    def pop(self, key: bytes) -> tuple[int, bytes]:
        """Return the length of a queue and its first value, which leaves it."""
        queue = self._queues.get(key)
        if not queue:
            return 0, b""
        length, value = len(queue), queue.popleft()
        self.size -= _KEY_COST + len(key) + len(value)
        if not queue:
            del self._queues[key]
        return length, value

    def queue_length(self, key: bytes) -> int:
        """Return the number of values in a queue."""
        return len(self._queues.get(key, ()))


def shown(key: bytes) -> str:
    """Return `key` for a sentence, of a long one the beginning."""
    return repr(key[:80].decode("utf-8", "replace"))
