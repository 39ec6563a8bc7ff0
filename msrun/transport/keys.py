"""Derives the key pairs of scheduler, agents and control from a job's secret."""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass

import zmq
from zmq.utils import z85

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A Curve25519 pair in Z85, as ZeroMQ takes it."""

    public: bytes
    secret: bytes


def new_secret() -> bytes:
    """Return a fresh secret for one job."""
    return os.urandom(SECRET_BYTES)


def key_pair(secret: bytes, role: str) -> KeyPair:
    """Return the pair of `role`, the same for every holder of the job's secret."""
    private = z85.encode(hkdf(secret, f"msrun curve25519 {role}".encode()))
    return KeyPair(zmq.curve_public(private), private)


def hkdf(secret: bytes, info: bytes, salt: bytes = b"", length: int = 32) -> bytes:
    """Return `length` bytes, at most 255 x 32, derived from `secret` for `info`.

    Source: RFC 5869 with SHA-256.
    """
    key = hmac.digest(salt or bytes(hashlib.sha256().digest_size), secret, "sha256")
    block, output = b"", b""
    for counter in range(1, -(-length // hashlib.sha256().digest_size) + 1):
        block = hmac.digest(key, block + info + bytes([counter]), "sha256")
        output += block
    return output[:length]
