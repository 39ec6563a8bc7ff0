"""Run every transcript in `control/` against what the scheduler does for those who control a job.

The form, and the verbs that make a job, are those of `test_scenarios`.
"""

import os
import signal
from pathlib import Path

import msgspec
import pytest
from spoken import show_message, worker_end
from test_scenarios import SchedulerScript, blocks, verbs

from msrun.cluster.liveness.hang import IDLE, QUIET
from msrun.cluster.liveness.lease import Lease
from msrun.cluster.liveness.stacks import Frame, summary
from msrun.cluster.scheduler import events as scheduler_events
from msrun.cluster.scheduler.control import Control, SendReply
from msrun.cluster.scheduler.peers import AgentLinks
from msrun.cluster.scheduler.restart_policy import RestartPolicy
from msrun.cluster.scheduler.state import SchedulerState
from msrun.cluster.wire.control_messages import (
    Denied,
    Done,
    DrainNode,
    GetLog,
    GetNodes,
    GetRanks,
    GetServers,
    GetStacks,
    GetStatus,
    Log,
    Nodes,
    Ranks,
    ScaleServers,
    ServerPage,
    SignalJob,
    Stacks,
    Status,
    StopJob,
)
from msrun.cluster.wire.messages import (
    DumpStacks,
    Hung,
    LogPart,
    ReadLog,
    Running,
    RunningServer,
    ServersChanged,
    SignalRanks,
    Stack,
    Stalled,
)

pytestmark = pytest.mark.sim

PATHS = sorted(Path(__file__).parent.glob("control/*.txt"))


class ControlScript(SchedulerScript):
    """Commands for the control of a job, on top of those for the job."""

    def start(self, **settings):
        super().start(**settings)
        peers = AgentLinks(job_id="train", lease=Lease(), term=1)
        self.control = Control(state=self.state, peers=peers)

    def _machine(self):
        policy = RestartPolicy("train", self.limits)
        return SchedulerState(**self.settings, policy=policy, started_at=self.now)

    def run(self, command):
        lines = super().run(command)
        due = self.control.deadline() if hasattr(self, "control") else None
        return lines if due is None else [*lines, f"control deadline={due:g}"]

    # Those who ask.

    def status(self, job=""):
        return (job, GetStatus())

    def nodes(self):
        return ("", GetNodes())

    def ranks(self):
        return ("", GetRanks())

    def servers(self):
        return ("", GetServers())

    def ask_log(self, rank, lines="5"):
        return ("", GetLog(rank=int(rank), lines=int(lines)))

    def ask_stacks(self):
        return ("", GetStacks())

    def stop_job(self, now="no"):
        return ("", StopJob(now=now == "yes"))

    def drain(self, node):
        return ("", DrainNode(node=node))

    def scale(self, servers):
        return ("", ScaleServers(servers=int(servers)))

    def send_signal(self, name, first=None, last=None):
        ranks = [] if first is None else [(int(first), int(last or first))]
        return ("", SignalJob(signum=signal.Signals[name], ranks=ranks))

    # What agents say.

    def running(self, node, *pids, age="0"):
        return self._received(node, Running(pids=list(map(int, pids)), age=float(age)))

    def servers_changed(self, node, *rows):
        """Say which servers a node has, each as `number:pid:restarts`."""
        numbers = [map(int, row.split(":")) for row in rows]
        servers = [RunningServer(server=n, pid=pid, restarts=r) for n, pid, r in numbers]
        return self._received(node, ServersChanged(servers=servers))

    def stalled(self, node, rank, seconds="60", generation=None):
        body = Stalled(rank=int(rank), seconds=float(seconds), sign="beat")
        return self._received(node, body, generation)

    def quiet(self, node, rank, seconds="60"):
        return self._received(node, Stalled(rank=int(rank), seconds=float(seconds), sign=QUIET))

    def idle(self, node, rank, seconds="90"):
        return self._received(node, Stalled(rank=int(rank), seconds=float(seconds), sign=IDLE))

    def stack(self, node, rank, where="", inquiry="1", idle="0"):
        """Say where a rank is: `function@file:line`, or nothing, which is a problem."""
        function, _, place = where.partition("@")
        file, _, line = place.partition(":")
        folder = "/torch/distributed" if file == "c10d.py" else "/src"
        frames = [Frame(f"{folder}/{file}", int(line), function)] if where else []
        end = worker_end(int(rank), host=node, first_rank=self.first_ranks.get(node, 0))
        who = msgspec.structs.replace(end, stalled=float(idle))
        problem = "" if where else "it is stopped"
        body = Stack(inquiry=int(inquiry), worker=who, frames=frames, problem=problem)
        return self._received(node, body)

    def log(self, node, text="", inquiry="1", problem=""):
        body = LogPart(inquiry=int(inquiry), log_file="log", data=text.encode(), problem=problem)
        return self._received(node, body)

    def _perform(self, event):
        if event is None:
            return []
        if isinstance(event, tuple):
            actions = self.control.ask(*event, b"route", now=self.now)
        elif Control.is_for(event):
            actions = self.control.receive(event, now=self.now)
        elif isinstance(event, scheduler_events.Tick):
            actions = [*self.control.tick(now=self.now), *super()._perform(event)]
        elif isinstance(event, scheduler_events.Woke):
            self.control.woke(now=self.now)
            actions = super()._perform(event)
        else:
            actions = super()._perform(event)
        self.control.note(actions)
        return actions

    def _show(self, action):
        if isinstance(action, SendReply):
            return f"reply {show_reply(action.reply)}"
        body = getattr(action, "body", None)
        if not isinstance(body, (DumpStacks, ReadLog, SignalRanks, Hung)):
            return super()._show(action)
        return f"-> {action.node_id} g{action.generation} {show_order(body)}"


def show_order(body):
    match body:
        case DumpStacks(inquiry=inquiry):
            return f"DumpStacks #{inquiry}"
        case ReadLog():
            return f"ReadLog #{body.inquiry} rank={body.rank} lines={body.lines}"
        case SignalRanks():
            return f"SignalRanks {signal.Signals(body.signum).name} ranks={body.ranks}"
        case Hung(report=report):
            return f"Hung {report.partition(chr(10) * 2)[0]!r}"
    return show_message(body)


def show_reply(reply):  # noqa: PLR0911 - one line a reply
    match reply:
        case Denied(reason=reason):
            return f"Denied {reason!r}"
        case Done(sentence=sentence):
            return f"Done {sentence!r}"
        case Status():
            said = f"Status {reply.phase} generation={reply.generation} nodes={reply.nodes}"
            said += f" world_size={reply.world_size} failures={reply.failures}"
            said += f" uptime={reply.uptime:g} causes={reply.causes}"
            said += f" waits={reply.waiting_for!r}" if reply.waiting_for else ""
            return said + (f" code={reply.verdict.code}" if reply.verdict else "")
        case Nodes(rows=rows):
            return "Nodes " + " ".join(f"{row.host}:{row.role}:{row.ranks}" for row in rows)
        case Ranks(rows=rows):
            told = (f"{r.rank}@{r.host}:{r.pid}:{r.state}:{r.seconds}" for r in rows)
            return "Ranks " + " ".join(told)
        case ServerPage(rows=rows):
            told = (f"{r.server}@{r.host}:{r.pid}:{r.restarts}" for r in rows)
            return "Servers " + " ".join(told)
        case Log():
            return f"Log {reply.host} {reply.data!r}"
        case Stacks():
            return f"Stacks g{reply.generation} {summary(reply.groups)}"
    raise AssertionError(reply)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_control(path):
    script = ControlScript()
    actual = "\n\n".join(
        "\n".join([*comments, command, "----", *script.run(command)])
        for comments, command in blocks(path)
    )
    if os.environ.get("REWRITE"):
        path.write_text(actual + "\n")
    assert path.read_text() == actual + "\n"


def test_every_verb_of_control_is_used():
    used = {block[1].split()[0] for path in PATHS for block in blocks(path)}

    assert verbs(ControlScript) - verbs(SchedulerScript) <= used
