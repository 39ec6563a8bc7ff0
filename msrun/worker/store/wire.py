"""torch's store protocol: the bytes of one client become calls of `StoreKeys`, and answers bytes.

Facts, of torch 2.13's TCPStoreBackend.hpp and its libuv server; the classic client sends the same.
Integers are little-endian.  A request is one byte, the kind, and its arguments; a string is a
length of 64 bits and its bytes.  The first request must be VALIDATE with a known number, and is not
answered.  SET, APPEND, MULTI_SET and QUEUE_PUSH are not answered either.  A client sends WAIT
before each GET, and after its timeout CANCEL_WAIT, whose answer may come behind that of the wait.

A request that has not arrived in whole leaves no trace.  It is parsed again when as many bytes are
there as it has at least: a large value is copied once, and a long list of keys parsed a few times.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import ClassVar, Protocol

from msrun.worker.store.keys import StoreKeys, StoreRefusal

VALIDATION = 0x3C85F7CE
KEY_BYTES_MAX = 8 << 10
PAYLOAD_BYTES_MAX = 8 << 20
KEYS_MAX = 128 << 10
REQUEST_BYTES_MAX = 256 << 20
"""Of one request of several keys; torch's server sets no limit."""

(
    VALIDATE,
    SET,
    COMPARE_SET,
    GET,
    ADD,
    CHECK,
    WAIT,
    NUM_KEYS,
    DELETE_KEY,
    APPEND,
    MULTI_GET,
    MULTI_SET,
    CANCEL_WAIT,
    PING,
    QUEUE_PUSH,
    QUEUE_POP,
    QUEUE_LEN,
    LIST_KEYS,
    BARRIER,
) = range(19)
READY, NOT_READY = b"\0", b"\1"
STOP_WAITING, WAIT_CANCELED = b"\0", b"\1"

_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_U32 = struct.Struct("<I")
_u64 = _U64.unpack_from
_i64 = _I64.unpack_from


class _Incomplete(Exception):  # noqa: N818 - no error: the rest is on its way
    """The request has not arrived in whole; it is longer than `args[0]` bytes, at least that."""


class Line(Protocol):
    """The way back to a client."""

    def send(self, data: bytes) -> None:
        """Send `data` after all that was sent before."""


class StoreClient:
    """One client of a store.

    Args:
        keys: What the store holds.
        line: The way back to this client.
    """

    __slots__ = ("_answers", "_chunks", "_is_validated", "_keys", "_line", "_needed", "_waiting")

    def __init__(self, keys: StoreKeys, line: Line) -> None:
        self._keys = keys
        self._line = line
        self._answers: list[bytes] = []
        self._chunks: list[bytes] = []
        self._needed = 0  # bytes that must be there before it is worth while to parse again
        self._waiting = 0
        self._is_validated = False

    def wake(self) -> None:
        """Tell the client that all keys for which it waits are there."""
        if self._answers:  # it waited and then set the key itself, in one go
            self._answers.append(STOP_WAITING)
        else:
            self._line.send(STOP_WAITING)

    def end(self) -> None:
        """Forget the client's waits; its connection has ended."""
        self._keys.forget(self)

    def feed(self, data: bytes) -> None:
        """Serve the requests that `data`, the next bytes of the client, completes.

        Raises:
            StoreRefusal: The connection must end; answers to earlier requests have been sent.
        """
        if self._chunks:
            self._chunks.append(data)
            self._waiting += len(data)
            if self._waiting < self._needed:
                return
            data = b"".join(self._chunks)
            self._chunks = []
        at, end = 0, len(data)
        try:
            while at < end:
                at = self._serve(data, at)
        except _Incomplete as rest:
            self._keep(data[at:], rest.args[0] - at)
        except struct.error:  # not even the next number is there
            self._keep(data[at:], 0)
        finally:
            if self._answers:
                self._line.send(b"".join(self._answers))
                self._answers.clear()

    def _serve(self, data: bytes, at: int) -> int:
        kind = data[at]
        if not self._is_validated:
            if kind != VALIDATE or _U32.unpack_from(data, at + 1)[0] != VALIDATION:
                raise StoreRefusal("the client does not speak torch's store protocol")
            self._is_validated = True
            return at + 5
        if kind >= len(self._requests):
            raise StoreRefusal(f"request {kind} is unknown")
        return self._requests[kind](self, data, at + 1)

    def _keep(self, rest: bytes, needed: int) -> None:
        """Keep the beginning of a request until it has at least `needed` bytes."""
        if max(needed, len(rest)) > REQUEST_BYTES_MAX:
            limit = f"{REQUEST_BYTES_MAX >> 20} MiB"
            raise StoreRefusal(f"a request is longer than {limit}")
        self._chunks = [rest]
        self._waiting = len(rest)
        self._needed = needed

    def _validate(self, _data: bytes, _at: int) -> int:
        raise StoreRefusal("a client validates itself once")

    def _set(self, data: bytes, at: int) -> int:
        key, at = _key(data, at)
        value, at = _payload(data, at)
        self._keys.set(key, value)
        return at

    def _compare_set(self, data: bytes, at: int) -> int:
        key, at = _key(data, at)
        expected, at = _payload(data, at)
        desired, at = _payload(data, at)
        self._answer(self._keys.compare_set(key, expected, desired))
        return at

    def _get(self, data: bytes, at: int) -> int:
        key, at = _key(data, at)
        value = self._keys.values.get(key, b"")
        self._answers.append(_U64.pack(len(value)) + value)
        return at

    def _add(self, data: bytes, at: int) -> int:
        key, at = _key(data, at)
        (amount,) = _i64(data, at)
        self._answers.append(_I64.pack(self._keys.add(key, amount)))
        return at + 8

    def _check(self, data: bytes, at: int) -> int:
        keys, at = _key_list(data, at)
        self._answers.append(READY if all(map(self._keys.has, keys)) else NOT_READY)
        return at

    def _wait(self, data: bytes, at: int) -> int:
        keys, at = _key_list(data, at)
        if self._keys.wait(self, keys):
            self._answers.append(STOP_WAITING)
        return at

    def _num_keys(self, _data: bytes, at: int) -> int:
        self._answers.append(_I64.pack(len(self._keys.values)))
        return at

    def _delete_key(self, data: bytes, at: int) -> int:
        key, at = _key(data, at)
        self._answers.append(_I64.pack(self._keys.delete(key)))
        return at

    def _append(self, data: bytes, at: int) -> int:
        key, at = _key(data, at)
        value, at = _payload(data, at)
        self._keys.append(key, value)
        return at

    def _multi_get(self, data: bytes, at: int) -> int:
        keys, at = _key_list(data, at)
        for key in keys:
            self._answer(self._keys.values.get(key, b""))
        return at

    def _multi_set(self, data: bytes, at: int) -> int:
        count, at = _count(data, at)
        pairs = []
        for rest in range(count, 0, -1):
            _has(data, at + 16 * rest)
            key, at = _key(data, at)
            value, at = _payload(data, at)
            pairs.append((key, value))
        for key, value in pairs:
            self._keys.set(key, value)
        return at

    def _cancel_wait(self, _data: bytes, at: int) -> int:
        self._keys.forget(self)
        self._answers.append(WAIT_CANCELED)
        return at

    def _ping(self, data: bytes, at: int) -> int:
        _U32.unpack_from(data, at)
        self._answers.append(data[at : at + 4])
        return at + 4

    def _queue_push(self, data: bytes, at: int) -> int:
        key, at = _key(data, at)
        value, at = _payload(data, at)
        self._keys.push(key, value)
        return at

    def _queue_pop(self, data: bytes, at: int) -> int:
        key, at = _key(data, at)
        length, value = self._keys.pop(key)
        self._answers.append(_I64.pack(length))
        if length:
            self._answer(value)
        return at

    def _queue_len(self, data: bytes, at: int) -> int:
        key, at = _key(data, at)
        self._answers.append(_I64.pack(self._keys.queue_length(key)))
        return at

    def _list_keys(self, _data: bytes, at: int) -> int:
        self._answers.append(_I64.pack(len(self._keys.values)))
        for key in self._keys.values:
            self._answer(key)
        return at

    def _barrier(self, data: bytes, at: int) -> int:
        key, at = _key(data, at)
        (world_size,) = _i64(data, at)
        if self._keys.barrier(self, key, world_size):
            self._answers.append(STOP_WAITING)
        return at + 8

    def _answer(self, value: bytes) -> None:
        self._answers.append(_U64.pack(len(value)))
        self._answers.append(value)

    _requests: ClassVar[tuple[Callable[[StoreClient, bytes, int], int], ...]] = (
        _validate,
        _set,
        _compare_set,
        _get,
        _add,
        _check,
        _wait,
        _num_keys,
        _delete_key,
        _append,
        _multi_get,
        _multi_set,
        _cancel_wait,
        _ping,
        _queue_push,
        _queue_pop,
        _queue_len,
        _list_keys,
        _barrier,
    )


def _key(data: bytes, at: int) -> tuple[bytes, int]:
    (length,) = _u64(data, at)
    if length > KEY_BYTES_MAX:
        raise StoreRefusal(f"a key has {length} bytes (at most {KEY_BYTES_MAX})")
    end: int = at + 8 + length
    if end > len(data):
        raise _Incomplete(end)
    return data[at + 8 : end], end


def _payload(data: bytes, at: int) -> tuple[bytes, int]:
    (length,) = _u64(data, at)
    if length > PAYLOAD_BYTES_MAX:
        raise StoreRefusal(f"a value has {length} bytes (at most {PAYLOAD_BYTES_MAX})")
    end: int = at + 8 + length
    if end > len(data):
        raise _Incomplete(end)
    return data[at + 8 : end], end


def _count(data: bytes, at: int) -> tuple[int, int]:
    (count,) = _u64(data, at)
    if count > KEYS_MAX:
        raise StoreRefusal(f"a request has {count} keys (at most {KEYS_MAX})")
    return count, at + 8


def _has(data: bytes, end: int) -> None:
    if end > len(data):
        raise _Incomplete(end)


def _key_list(data: bytes, at: int) -> tuple[list[bytes], int]:
    count, at = _count(data, at)
    keys = []
    for rest in range(count, 0, -1):
        _has(data, at + 8 * rest)
        key, at = _key(data, at)
        keys.append(key)
    return keys, at
