"""Many agents in one process: they register, take their placement and go on beating.

Started by rendezvous.py, which writes one JSON line of settings to standard input; the
answers are JSON lines on standard output: `ready`, then `placed`, then `beating`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import msgspec
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from msrun.cluster import codec
from msrun.cluster.agent_events import Received
from msrun.cluster.lease import lease
from msrun.cluster.messages import Envelope, Formation, Register, Start
from msrun.cluster.uplink import Uplink
from msrun.transport.keys import key_pair
from msrun.transport.sockets import AGENT, SCHEDULER, endpoint, listen


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What one process of agents is told.

    Args:
        job_id: The job.
        port: Port of the scheduler on the loopback interface.
        secret: The job's secret in hexadecimal; empty without authentication.
        first: Number of its first agent.
        agents: How many it is.
        formation: What all of them say.
        beat_seconds: For how long they go on beating.
    """

    job_id: str
    port: int
    secret: str
    first: int
    agents: int
    formation: Formation
    beat_seconds: float


class Agents:
    """The agents of this process, each with a connection of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._store = listen("127.0.0.1", 0)
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, settings.agents + 8)
        self._poller = zmq.Poller()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        times = lease(settings.formation.lease)
        names = [f"n{settings.first + i:05}" for i in range(settings.agents)]
        self._uplinks = {
            name: Uplink(job_id=settings.job_id, node_id=name, incarnation=1, lease=times)
            for name in names
        }
        self._waiting = set(names)

    def register(self) -> None:
        """Connect all agents and queue what they say first, one on each connection."""
        address = endpoint("127.0.0.1", self._settings.port)
        secret = bytes.fromhex(self._settings.secret)
        own, scheduler = key_pair(secret, AGENT), key_pair(secret, SCHEDULER)
        for name in self._uplinks:
            sock = self._sockets[name] = self._context.socket(zmq.DEALER)
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.ROUTING_ID, b"a" + os.urandom(16))
            if secret:
                sock.curve_publickey = own.public
                sock.curve_secretkey = own.secret
                sock.curve_serverkey = scheduler.public
            sock.connect(address)
            self._poller.register(sock, zmq.POLLIN)
        port = self._store.getsockname()[1]
        for name, uplink in self._uplinks.items():
            register = Register(
                host=name,
                slots=8,
                store_host="127.0.0.1",
                store_port=port,
                formation=self._settings.formation,
            )
            self._send(uplink.join(-1, register, now=time.monotonic()))

    def until_placed(self) -> None:
        """Serve until every agent has its ranks."""
        while self._waiting:
            self._serve(1.0)

    def beat(self, seconds: float) -> None:
        """Serve for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._serve(min(left, 0.05))

    def _serve(self, patience: float) -> None:
        for sock, _ in self._poller.poll(int(patience * 1000)):
            while True:
                try:
                    envelope = codec.decode(sock.recv(zmq.NOBLOCK))
                except zmq.Again:
                    break
                self._take(envelope)
        now = time.monotonic()
        for uplink in self._uplinks.values():
            due = uplink.deadline()
            if due is not None and due <= now:
                self._send(uplink.tick(now=now)[1])

    def _take(self, envelope: Envelope) -> None:
        uplink = self._uplinks[envelope.node_id]
        events, frames = uplink.receive(envelope, now=time.monotonic())
        self._send(frames)
        for event in events:
            if isinstance(event, Received) and isinstance(event.body, Start):
                self._waiting.discard(envelope.node_id)

    def _send(self, frames: list[Envelope]) -> None:
        for frame in frames:
            self._sockets[frame.node_id].send(codec.encode(frame))


def main() -> None:
    """Be the agents that standard input describes."""
    settings = msgspec.json.decode(sys.stdin.readline(), type=Settings)
    agents = Agents(settings)
    _say("ready")
    sys.stdin.readline()
    began = time.monotonic()
    agents.register()
    agents.until_placed()
    _say("placed", began=began, ended=time.monotonic())
    agents.beat(settings.beat_seconds)
    _say("beating")
    sys.stdin.readline()


def _say(what: str, **numbers: float) -> None:
    sys.stdout.write(json.dumps({"what": what, **numbers}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
