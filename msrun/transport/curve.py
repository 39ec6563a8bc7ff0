"""CURVE on a socket: a server that admits holders of a job's keys, and a client that is one."""

from __future__ import annotations

import socket

import zmq

from msrun.transport.gate import DOMAIN, Gate
from msrun.transport.keys import key_pair

Context = zmq.Context[zmq.Socket[bytes]]


def admit(sock: zmq.Socket[bytes], context: Context, secret: bytes, role: str, *peers: str) -> Gate:
    """Have `sock` take connections of `peers` alone; the gate that is returned must be served.

    Args:
        sock: A socket that is not bound yet.
        context: Of `sock`.
        secret: Secret of which all keys are derived.
        role: Whose key the server has.
        peers: Roles whose keys are admitted.
    """
    gate = Gate(context, {key_pair(secret, peer).public: peer for peer in peers})
    own = key_pair(secret, role)
    sock.curve_server = True
    sock.curve_publickey = own.public
    sock.curve_secretkey = own.secret
    sock.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
    sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return gate


def identify(sock: zmq.Socket[bytes], secret: bytes, role: str, server: str) -> None:
    """Have `sock`, which is not connected yet, be a `role` and trust nobody but `server`."""
    own = key_pair(secret, role)
    sock.curve_publickey = own.public
    sock.curve_secretkey = own.secret
    sock.curve_serverkey = key_pair(secret, server).public


def take_over(sock: zmq.Socket[bytes], listening: socket.socket, address: str) -> None:
    """Have `sock` accept connections of `listening` at `address`; it owns the descriptor then."""
    sock.setsockopt(zmq.USE_FD, listening.detach())
    sock.bind(address)
