"""Many agents in one process: they register, take their placement and go on beating.

Started by rendezvous.py, which writes one JSON line of settings to standard input; the
answers are JSON lines on standard output: `ready`, then `placed`, then `beating`.
"""

from __future__ import annotations

import heapq
import json
import os
import sys
import time
from pathlib import Path

import msgspec
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from msrun.cluster.agent.events import SchedulerMessage
from msrun.cluster.agent.uplink import Uplink
from msrun.cluster.liveness.lease import lease
from msrun.cluster.wire import codec
from msrun.cluster.wire.link import first_resend
from msrun.cluster.wire.messages import Envelope, Formation, Register, Start
from msrun.transport import frames
from msrun.transport.keys import key_pair
from msrun.transport.sockets import AGENT, SCHEDULER, endpoint, listen

PATIENCE = 110.0
# Several have heard something after it, which costs this process less than each by itself.
REST_SECONDS = 0.002


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
    """The agents of this process, each with a connection of its own.

    All connections are of one socket: what is measured is the scheduler, and to look at
    hundreds of sockets would cost this process more than all of it.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._store = listen("127.0.0.1", 0)
        self._socket = zmq.Context().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        times = lease(settings.formation.lease)
        names = [f"n{settings.first + i:05}" for i in range(settings.agents)]
        self._uplinks = {
            name: Uplink(
                job_id=settings.job_id,
                node_id=name,
                incarnation=1,
                lease=times,
                first_resend=first_resend(settings.formation.nnodes_max, times),
            )
            for name in names
        }
        self._due: list[tuple[float, str]] = []
        self._waiting = set(names)

    def register(self) -> None:
        """Connect all agents and queue what they say first, one on each connection."""
        address = endpoint("127.0.0.1", self._settings.port)
        secret = bytes.fromhex(self._settings.secret)
        if secret:
            own = key_pair(secret, AGENT)
            self._socket.curve_publickey = own.public
            self._socket.curve_secretkey = own.secret
            self._socket.curve_serverkey = key_pair(secret, SCHEDULER).public
        port = self._store.getsockname()[1]
        for name, uplink in self._uplinks.items():
            # The one is what this end calls the connection, the other what the scheduler does.
            self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, name.encode())
            self._socket.setsockopt(zmq.ROUTING_ID, b"a" + os.urandom(16))
            self._socket.connect(address)
            register = Register(
                host=name,
                slots=8,
                store_host="127.0.0.1",
                store_port=port,
                formation=self._settings.formation,
            )
            self._send(uplink.join(-1, register, now=time.monotonic()))
            self._note_deadline(name)

    def until_placed(self) -> None:
        """Serve until every agent has its ranks."""
        end = time.monotonic() + PATIENCE
        while self._waiting:
            self._serve(1.0)
            if time.monotonic() > end:
                sys.exit(f"{len(self._waiting)} agents have no ranks after {PATIENCE:g} s")

    def beat(self, seconds: float) -> None:
        """Serve for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._serve(min(left, 0.05))

    def _serve(self, patience: float) -> None:
        self._socket.poll(int(patience * 1000))
        time.sleep(REST_SECONDS)
        while True:
            try:
                _, frame = frames.receive(self._socket)
            except zmq.Again:
                break
            self._take(codec.decode(frame.buffer))
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, name = heapq.heappop(self._due)
            self._send(self._uplinks[name].tick(now=now)[1])
            self._note_deadline(name)

    def _note_deadline(self, name: str) -> None:
        """Look at an agent again when it has something to do; only ever later than noted."""
        due = self._uplinks[name].deadline()
        if due is not None:
            heapq.heappush(self._due, (due, name))

    def _take(self, envelope: Envelope) -> None:
        uplink = self._uplinks[envelope.node_id]
        events, answers = uplink.receive(envelope, now=time.monotonic())
        self._send(answers)
        for event in events:
            if isinstance(event, SchedulerMessage) and isinstance(event.body, Start):
                self._waiting.discard(envelope.node_id)

    def _send(self, said: list[Envelope]) -> None:
        for frame in said:
            frames.send(self._socket, [frame.node_id.encode(), codec.encode(frame)])


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
