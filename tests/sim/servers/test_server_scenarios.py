"""Run every transcript in `scenarios/` against the machines of the parameter servers.

A block is one command, a `----` line and what came of it; a blank line ends it.  The folder names
the machine.  After a deliberate change: `REWRITE=1 pytest tests/sim/servers`, then read the diff
before committing it.
"""

import os
from pathlib import Path

import msgspec
import pytest

from msrun.cluster.servers import events
from msrun.cluster.servers import messages as wire
from msrun.cluster.servers.coordinator import CoordinatorState
from msrun.cluster.servers.ownership import Ownership, Table
from msrun.cluster.servers.server import ServerState
from msrun.cluster.servers.worker import WorkerState
from msrun.cluster.tick import Tick

pytestmark = pytest.mark.sim

SCENARIOS = Path(__file__).parent / "scenarios"
# What every line would repeat.
HIDDEN = {"worker", "life", "server", "server_life", "term", "branch"}
# What most steps do without.
UNUSUAL = {"rounds", "absent"}
TABLE = "embed"


def numbers(text):
    return [int(word) for word in text.split(",") if word]


def pairs(text):
    """Return `0:1,1:3` as a mapping."""
    return {int(k): int(v) for k, v in (word.split(":") for word in text.split(",") if word)}


def of_slices(text):
    """Return `0:96,2:7` as bytes of each slice."""
    return {wire.Slice(TABLE, index): float(nbytes) for index, nbytes in pairs(text).items()}


def owned(epoch, *, version=0, workers="0:0", owners="0", copies="", done="", branch="1"):
    return Ownership(
        epoch=int(epoch),
        version=int(version),
        clocks=pairs(workers),
        done=pairs(done),
        owners={TABLE: numbers(owners)},
        copies={TABLE: numbers(copies)} if copies else {},
        branch=int(branch),
    )


def show(value):  # noqa: PLR0911 - a table of kinds
    """Return a value in the fewest words."""
    match value:
        case Ownership():
            owners = ",".join(map(str, value.owners[TABLE]))
            return f"epoch {value.epoch} from {value.version} {show(value.clocks)} on {owners}"
        case dict():
            return ",".join(f"{key}:{show(each)}" for key, each in sorted(value.items())) or "-"
        case [wire.Slice() as piece, float() as nbytes]:
            return f"{show(piece)}:{nbytes:g}"
        case list() | tuple():
            return ",".join(map(show, value)) or "-"
        case events.ToRank(worker=worker):
            return f"worker {worker}"
        case events.ToPeer(server=server):
            return f"server {server}"
        case events.ToHead():
            return "coordinator"
        case wire.Slice(index=index):
            return str(index)
        case msgspec.Struct():
            return " ".join([type(value).__name__, *fields(value)])
    return str(value)


def fields(value):
    for name in value.__struct_fields__:
        each = getattr(value, name)
        is_hidden = name in HIDDEN or (name in UNUSUAL and not each)
        if not is_hidden and each is not False and each is not None:
            yield f"{name}={show(each)}"


def show_action(action):
    match action:
        case events.SendMessage(to=to, message=message, payload=payload):
            with_it = "" if payload is None else f" with {show(payload)}"
            return f"-> {show(to)} {show(message)}{with_it}"
        case events.SendNorms(message=message, pushes=pushes):
            return f"-> worker {message.worker} {show(message)} of {show(pushes)}"
        case events.SendRows(message=message, ask=ask):
            return f"-> worker {message.worker} {show(message)} with the rows of {show(ask)}"
    return show(action)


class Script:
    """Interpret commands against one machine and a clock that is moved by hand."""

    def __init__(self):
        self.now = 0.0
        self.state = None
        self.count = 0

    def run(self, command):
        verb, *words = command.split()
        named = dict(word.split("=", 1) for word in words if "=" in word)
        given = [word for word in words if "=" not in word]
        event = getattr(self, verb)(*given, **named)
        actions = self.state.handle(event, now=self.now)
        due = self.state.deadline()
        ending = "" if due is None else f" deadline={due:g}"
        return [*map(show_action, actions), f"{self._show_state()} now={self.now:g}{ending}"]

    def advance(self, seconds):
        self.now += float(seconds)
        return Tick()

    def rules(self, staleness="0", every="100"):
        return events.Rules(staleness=float(staleness), every=int(every))

    def order(self):
        self.count += 1
        return {"term": 0, "count": self.count}


class ServerScript(Script):
    """Commands for server 0."""

    def start(self, life="0", disk="", traffic="", **rules):
        snapshots = []
        for word in disk.split(";") if disk else []:
            epoch, version, clocks, *done = word.split("/")
            where = {"epoch": int(epoch), "version": int(version)}
            left = pairs(",".join(done))
            snapshots.append(wire.Snapshot(**where, clocks=pairs(clocks), done=left))
        rules = self.rules(**rules)
        self.state = ServerState(
            server=0, life=int(life), rules=rules, disk=snapshots, traffic=of_slices(traffic)
        )
        return Tick()

    def adopt(self, epoch, before="", **words):
        old = owned(int(epoch) - 1, owners=before) if before else None
        adopt = wire.Adopt(ownership=owned(epoch, **words), before=old, **self.order())
        return events.Arrived(adopt)

    def open(self, epoch):
        return events.Arrived(wire.Open(epoch=int(epoch), **self.order()))

    def freeze(self, epoch, goal="-1"):
        return events.Arrived(wire.Freeze(epoch=int(epoch), goal=int(goal), **self.order()))

    def overtaken(self, epoch):
        """An order that was sent before the last one."""
        return events.Arrived(wire.Open(epoch=int(epoch), term=0, count=0))

    def saved(self, epoch, version):
        return events.Saved(int(epoch), int(version))

    def hello(self, worker, life="0", epoch="1"):
        return events.Arrived(
            wire.WorkerHello(worker=int(worker), life=int(life), epoch=int(epoch))
        )

    def push(self, worker, clock, **words):
        return self._step(wire.Push, worker, clock, f"gradients-{worker}-{clock}", **words)

    def measure(self, worker, clock, **words):
        words = {"round": 1} | words
        return self._step(wire.Measure, worker, clock, f"gradients-{worker}-{clock}", **words)

    def commit(self, worker, clock, **words):
        words = {"rounds": 1} | words
        return self._step(wire.Push, worker, clock, f"factor-{worker}", is_commit=True, **words)

    def pull(self, worker, clock, **words):
        words = {"settled": clock} | words
        return self._step(wire.Pull, worker, clock, "ids", **words)

    def leave(self, worker, clock, **words):
        words = {"settled": clock} | words
        return self._step(wire.Leave, worker, clock, None, **words)

    def _step(self, kind, worker, clock, payload, epoch="1", **words):
        known = {"life": "0", "floor": "0", "settled": "0", "safe": "0"} | words
        numbers_of = {name: int(word) for name, word in known.items() if word is not True}
        numbers_of |= {name: True for name, word in known.items() if word is True}
        message = kind(worker=int(worker), clock=int(clock), epoch=int(epoch), **numbers_of)
        return events.Arrived(message, payload)

    def fetch(self, server, slices, epoch="2", base="1", version="0"):
        pieces = [wire.Slice(TABLE, index) for index in numbers(slices)]
        return events.Arrived(
            wire.FetchSlices(
                server=int(server),
                epoch=int(epoch),
                base=int(base),
                version=int(version),
                slices=pieces,
            )
        )

    def slices(self, server, slices, epoch="2"):
        pieces = [wire.Slice(TABLE, index) for index in numbers(slices)]
        contents = wire.SliceContents(server=int(server), epoch=int(epoch), slices=pieces)
        return events.Arrived(contents, f"rows-of-{server}")

    def copies(self, server, version, life="1", epoch="1", workers="0"):
        clocks = dict.fromkeys(numbers(workers), int(version))
        now = wire.Snapshot(epoch=int(epoch), version=int(version), clocks=clocks)
        contents = wire.CopyContents(server=int(server), life=int(life), epoch=int(epoch), now=now)
        return events.Arrived(contents, f"rows-of-{server}")

    def _show_state(self):
        state = self.state
        shown = f"{state.phase.value} epoch={state.epoch} version={state.version}"
        return f"{shown} clocks={show(state.clocks)}"


class WorkerScript(Script):
    """Commands for worker 0."""

    def start(self, life="0", **rules):
        self.state = WorkerState(worker=0, life=int(life), rules=self.rules(**rules))
        return Tick()

    def moved(self, epoch, **words):
        return events.Arrived(wire.Moved(ownership=owned(epoch, **words)))

    def begin(self, ask):
        self.parts = getattr(self, "parts", 0) + 1
        return events.StepBegins(ask)

    def measure(self, gradients):
        return events.StepMeasures(gradients)

    def end(self, gradients):
        return events.StepEnds(gradients)

    def commit(self, factor):
        return events.StepEnds(factor, is_commit=True)

    def reconnected(self, server):
        return events.Reconnected(int(server))

    def finish(self):
        return events.Finished()

    def welcome(self, server, clock, **words):
        return self._said(wire.Welcome, server, clock, **words)

    def ack(self, server, clock, **words):
        return self._said(wire.Ack, server, clock, **words)

    def rows(self, server, asked, clock="", **words):
        words = {"version": asked, "part": getattr(self, "parts", 0), "oldest": asked} | words
        return self._said(wire.Rows, server, clock or asked, asked=asked, **words)

    def norms(self, server, asked, absent="", **words):
        words = {"round": 1, "rounds": words.get("round", 1), "version": asked} | words
        message = self._said(wire.Norms, server, asked, asked=asked, **words)
        with_them = msgspec.structs.replace(message.message, absent=numbers(absent))
        return events.Arrived(with_them, f"norms-of-{server}")

    def _said(self, kind, server, clock, epoch="1", **words):
        known = {"server_life": "0", "life": "0", "version": clock, "durable": "0"} | words
        more = {name: int(word) for name, word in known.items()}
        for name in ("is_done", "has_left"):
            more[name] = bool(more.get(name))
        message = kind(server=int(server), worker=0, epoch=int(epoch), clock=int(clock), **more)
        return events.Arrived(message, f"rows-of-{server}")

    def _show_state(self):
        state = self.state
        shown = f"{state.phase.value} epoch={state.epoch} clock={state.clock}"
        return f"{shown} kept={show(state.kept)}"


class CoordinatorScript(Script):
    """Commands for the coordinator of one table."""

    def start(self, servers="0", workers="0", slices="2", term="0", **rules):
        self.slices = int(slices)
        self.log = getattr(self, "state", None) and self.state.decision
        self.state = CoordinatorState(
            term=int(term),
            rules=self.rules(**rules),
            tables=(Table(name=TABLE, rows=100, row_bytes=4, slices=self.slices),),
            servers=tuple(numbers(servers)),
            workers=tuple(numbers(workers)),
            decision=self.log,
        )
        return Tick()

    def scale(self, servers, workers):
        return events.Scale(tuple(numbers(servers)), tuple(numbers(workers)))

    def hello(self, server, life="0"):
        return events.Arrived(wire.ServerHello(server=int(server), life=int(life)))

    def adopted(self, server, epoch, life="0"):
        return self._from(wire.Adopted, server, epoch, life)

    def opened(self, server, epoch, life="0"):
        return self._from(wire.Opened, server, epoch, life)

    def missing(self, server, epoch, life="0"):
        return self._from(wire.SnapshotMissing, server, epoch, life)

    def frozen(self, server, epoch, version, count, life="0", **words):
        return self._from(
            wire.Frozen,
            server,
            epoch,
            life,
            term=self.state.term,
            count=int(count),
            version=int(version),
            clocks=pairs(words.get("clocks", "0:0")),
            done={},
            saved=numbers(words.get("saved", "")),
            traffic=sorted(of_slices(words.get("traffic", "")).items()),
        )

    def _from(self, kind, server, epoch, life, **more):
        return events.Arrived(kind(server=int(server), life=int(life), epoch=int(epoch), **more))

    def ask(self, worker, epoch="0"):
        return events.Arrived(wire.AskOwnership(worker=int(worker), life=0, epoch=int(epoch)))

    def rollback(self, worker, epoch):
        return events.Arrived(wire.NeedRollback(worker=int(worker), life=0, epoch=int(epoch)))

    def _show_state(self):
        return "changing" if self.state.is_changing else "settled"


SCRIPTS = {"server": ServerScript, "worker": WorkerScript, "coordinator": CoordinatorScript}
PATHS = sorted(SCENARIOS.glob("*/*.txt"))


def replay(path):
    script = SCRIPTS[path.parent.name]()
    blocks = []
    for block in path.read_text().strip().split("\n\n"):
        head = [line for line in block.split("\n----")[0].split("\n") if line]
        comments = [line for line in head if line.startswith("#")]
        commands = [line for line in head if not line.startswith("#")]
        lines = [*comments, *commands, "----"]
        for command in commands:
            lines += script.run(command)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_scenario(path):
    actual = replay(path)
    if os.environ.get("REWRITE"):
        path.write_text(actual)

    assert path.read_text() == actual
    assert actual.startswith("# ")
    assert actual.split("\n")[0].endswith(".")
