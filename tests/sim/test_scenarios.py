"""Run every transcript in `scenarios/` against the real state machines.

A block is one command, a `----` line and what came of it; a blank line ends it.
After a deliberate change: `REWRITE=1 pytest tests/sim`, then read the diff before
committing it.
"""

# tidy: long file, the commands of both machines share one language.

import inspect
import os
import shlex
import signal
from pathlib import Path

import msgspec
import pytest
from spoken import show_message, show_verdict, worker_end

from msrun.cluster.agent import events as agent_events
from msrun.cluster.agent import servers as agent_servers
from msrun.cluster.agent import state as agent_state
from msrun.cluster.liveness.lease import Lease
from msrun.cluster.scheduler import events as scheduler_events
from msrun.cluster.scheduler import state as scheduler_state
from msrun.cluster.scheduler import wal
from msrun.cluster.scheduler.restart_policy import RestartPolicy
from msrun.cluster.verdict import Verdict
from msrun.cluster.wire.messages import (
    Drained,
    Finish,
    Formation,
    Interrupted,
    NodeFailed,
    Refused,
    Register,
    Restarting,
    Serve,
    ServerFailed,
    Start,
    Stop,
    Waiting,
    Warmed,
    WorkerExited,
)
from msrun.job import RestartLimits

pytestmark = pytest.mark.sim

SCENARIOS = Path(__file__).parent / "scenarios"


class Script:
    """Interpret commands against one machine and a clock that is moved by hand.

    A verb is a public method; it returns an event.
    """

    def __init__(self):
        self.now = 0.0
        self.state = None

    def run(self, command):
        """Return the actions that `command` leads to and the state after it, one a line."""
        verb, *words = shlex.split(command)
        assert verb in verbs(type(self)), f"no such verb: {verb}"
        named = dict(word.split("=", 1) for word in words if "=" in word)
        given = [word for word in words if "=" not in word]
        event = getattr(self, verb.replace("-", "_"))(*given, **named)
        actions = self._perform(event)
        for action in actions:
            self._check(action)
        due = self.state.deadline()
        if verb == "advance":
            assert due is None or due > self.now, "a deadline is due and was not acted on"
        at = f"generation={self.state.generation} now={self.now:g}"
        ending = "" if due is None else f" deadline={due:g}"
        ending += self._show_rest()
        return [*map(self._show, actions), f"{self.state.phase.value} {at}{ending}"]

    def _show_rest(self):
        return ""

    def _perform(self, event):
        return self.state.handle(event, now=self.now)


_STARTED = wal.GenerationStarted


class SchedulerScript(Script):
    """Commands for the scheduler's machine; nodes are named by single letters."""

    def __init__(self):
        super().__init__()
        self.incarnations = {}
        self.first_ranks = {}
        self.written = []
        self.began = []

    def start(  # noqa: PLR0917 - all that users may ask for
        self,
        nnodes="1",
        join_timeout="60",
        last_call="5",
        worker_num=None,
        replaces="no",
        servers="0",
        **limits,
    ):
        known = inspect.signature(RestartLimits).parameters
        numbers = {name: float(value) for name, value in limits.items() if name in known}
        assert numbers.keys() == limits.keys()
        for name in numbers.keys() & {"max_restarts", "no_progress_limit", "exclude_after"}:
            numbers[name] = int(numbers[name])
        least, _, most = nnodes.partition(":")
        self.formation = Formation(
            nnodes_min=int(least),
            nnodes_max=int(most or least),
            world_size=None if worker_num is None else int(worker_num),
            lease=10.0,
            release="1.0",
            servers=int(servers),
        )
        self.settings = {
            "job_id": "train",
            "formation": self.formation,
            "join_timeout": float(join_timeout),
            "last_call": float(last_call),
            "replaces": replaces == "yes",
        }
        self.limits = RestartLimits(**numbers)
        self.state = self._machine()

    def _machine(self):
        policy = RestartPolicy("train", self.limits)
        return scheduler_state.SchedulerState(**self.settings, policy=policy, started_at=self.now)

    def restart(self, keep="all", whole="yes"):
        """Let another scheduler take over with what the first wrote down, or the start of it."""
        self.state = self._machine()
        self.written = self.written[: None if keep == "all" else int(keep)]
        self.began.append(wal.Began(len(self.began) + 1))
        records = [*self.began, *self.written]
        self.state.recover(records, now=self.now, is_whole=whole == "yes")

    def register(  # noqa: PLR0917 - all that a node may say
        self,
        node,
        slots="2",
        incarnation="1",
        host=None,
        address=None,
        node_rank=None,
        serves="no",
        running="-1",
        seen="-1",
        spared="-1",
        ended="",
        stuck=None,
        warm="yes",
        **formation,
    ):
        """Register a node; `ended=0:3,1:SIGTERM` are the ends of its workers."""
        self.incarnations[node] = int(incarnation)
        least, _, most = formation.pop("nnodes", "").partition(":")
        changed = {"nnodes_min": int(least), "nnodes_max": int(most or least)} if least else {}
        changed |= {"lease": float(formation.pop("lease"))} if "lease" in formation else {}
        exits = [end.split(":") for end in ended.split(",") if end]
        body = Register(
            host=host or node,
            slots=int(slots),
            store_host=address or host or node,
            store_port=29500,
            node_rank=None if node_rank is None else int(node_rank),
            serves=serves == "yes",
            formation=msgspec.structs.replace(self.formation, **changed, **formation),
            running=int(running),
            seen=int(seen),
            spared=int(spared),
            exits=[
                worker_end(int(rank), host=node, **{("signal" if how[0] == "S" else "code"): how})
                for rank, how in exits
            ],
            stuck=[stuck] if stuck else [],
            warm=warm == "yes",
        )
        return self._received(node, body)

    def warmed(self, node):
        return self._received(node, Warmed())

    def lost(self, node, silent="10", why=None, incarnation=None):
        return scheduler_events.Lost(
            node_id=node,
            incarnation=int(incarnation or self.incarnations.get(node, 1)),
            reason=why or f"no sign of life for {silent}s",
            heard_at=self.now - float(silent),
        )

    def unreachable(self, node, why="connection timed out"):
        incarnation = self.incarnations.get(node, 1)
        return scheduler_events.Unreachable(node, incarnation, why)

    def exit(self, node, rank, generation=None, incarnation=None, on_way="0", **words):
        first_rank = self.first_ranks.get(node, 0)
        end = worker_end(int(rank), first_rank=first_rank, host=node, **words)
        # Clocks of nodes have nothing to do with ours.
        body = WorkerExited(exit=end, at=self.now - float(on_way) + 1000 * ord(node))
        return self._received(node, body, generation, incarnation)

    def drained(self, node, stuck=None, generation=None):
        return self._received(node, Drained(stuck=[stuck] if stuck else []), generation)

    def interrupt(self, node, name):
        return self._received(node, Interrupted(signum=signal.Signals[name]))

    def node_failed(self, node, why="the reaper was killed by SIGKILL", code="120"):
        return self._received(node, NodeFailed(reason=why, code=int(code)))

    def server_failed(self, node, server, reason="", **words):
        end = worker_end(int(server), host=node, is_server=True, **words)
        return self._received(node, ServerFailed(exit=end, reason=reason))

    def misspeak(self, node):
        """Send what only a scheduler says."""
        return self._received(node, Refused(reason="no", code=2))

    def advance(self, seconds):
        self.now += float(seconds)
        return scheduler_events.Tick()

    def woke(self, seconds):
        """Let the scheduler be frozen for that long."""
        self.now += float(seconds)
        return scheduler_events.Woke()

    def _received(self, node, body, generation=None, incarnation=None):
        return scheduler_events.AgentMessage(
            node_id=node,
            incarnation=int(incarnation or self.incarnations.get(node, 1)),
            generation=self.state.generation if generation is None else int(generation),
            body=body,
        )

    def _perform(self, event):
        actions = super()._perform(event) if event else []
        ranks = []
        for action in actions:
            match action:
                case scheduler_events.SendToAgent(node_id=node, body=Start() as start):
                    self.first_ranks[node] = start.first_rank
                    ranks += range(start.first_rank, start.first_rank + start.count)
                    world_size = start.world_size
        starts = [a for a in actions if isinstance(getattr(a, "body", None), Start)]
        if any(isinstance(a, scheduler_events.Write) for a in actions):
            assert not starts or ranks == list(range(world_size)), "ranks are not 0, 1, 2, ..."
        return actions

    def _check(self, action):
        match action:
            case scheduler_events.Write(record=record):
                earlier = [r.generation for r in self.written if isinstance(r, _STARTED)]
                is_new = not isinstance(record, _STARTED) or record.generation not in earlier
                assert is_new, "a generation was announced twice"
                assert self.verdict is None, "something was written after the verdict"
                self.written.append(record)
            case scheduler_events.SendToAgent(body=Start(), generation=generation):
                started = [r.generation for r in self.written if isinstance(r, _STARTED)]
                assert generation in started
            case scheduler_events.SendToAgent(body=Finish(verdict=verdict)):
                assert verdict == self.verdict == self.state.verdict

    def _show_rest(self):
        if self.verdict is None or self.state.may_leave(now=self.now):
            return ""
        return f" untold={','.join(sorted(self.state.untold)) or '?'}"

    @property
    def verdict(self):
        """The verdict that was written, None before."""
        return next((r.verdict for r in self.written if isinstance(r, wal.Decided)), None)

    def _show(self, action):
        match action:
            case scheduler_events.Write(record=wal.GenerationStarted() as record):
                nodes = " ".join(f"{m.node_id}:{m.first_rank}+{m.count}" for m in record.members)
                spent = f"failures={record.restarts} losses={record.losses}"
                return f"write GenerationStarted {record.generation} {nodes} {spent}"
            case scheduler_events.Write(record=wal.ServersScaled(total=total)):
                return f"write ServersScaled {total}"
            case scheduler_events.Write(record=wal.Excluded(node_id=node, why=why)):
                return f"write Excluded {node} {why!r}"
            case scheduler_events.Write(record=wal.Decided(verdict=verdict)):
                return f"write Decided {show_verdict(verdict)}"
        return f"-> {action.node_id} g{action.generation} {show_message(action.body)}"


class AgentScript(Script):
    """Commands for the agent's machine."""

    def __init__(self):
        super().__init__()
        self.generation = -1
        self.started = None
        self.drained = set()
        self.told = set()
        self.concluded = False

    def start(  # noqa: PLR0917 - all that a node is made of
        self,
        slots="2",
        grace="10",
        form_by="inf",
        join_timeout="0",
        lease="inf",
        serves="yes",
        servers="0",
        max_restarts="2",
    ):
        limits = RestartLimits(max_restarts=int(max_restarts))
        own = agent_servers.NodeServers("train", int(servers), limits)
        register = Register(
            host="a", slots=int(slots), store_host="a", store_port=29500, serves=serves == "yes"
        )
        self.state = agent_state.AgentState(
            job_id="train",
            register=register,
            grace=float(grace),
            form_by=float(form_by),
            join_timeout=float(join_timeout),
            lease=Lease(float(lease)),
            servers=own if own.total else None,
        )

    def reached(self):
        return agent_events.Reached()

    def cut(self):
        return agent_events.SchedulerSilent()

    def forgotten(self):
        return agent_events.Forgotten()

    def ready(self):
        return agent_events.TreeReady()

    def not_ready(self, why):
        return agent_events.TreeReady(error=why)

    def receive(self, message, generation=None, age="0", **words):
        build = {
            "Start": self._start_message,
            "Stop": self._stop_message,
            "Restarting": self._restarting_message,
            "Finish": lambda code="0": Finish(verdict=self._verdict(int(code))),
            "Refused": lambda code="2": Refused(reason="install the same", code=int(code)),
            "Waiting": lambda spare="no": Waiting(
                reason="1 of 2 nodes registered: a", spare=spare == "yes"
            ),
            "Serve": lambda servers, total: Serve(
                servers=[int(n) for n in servers.split(",") if n], total=int(total)
            ),
            "Drained": Drained,
        }[message]
        current = max(self.state.generation, 0)
        return agent_events.SchedulerMessage(
            current if generation is None else int(generation), build(**words), float(age)
        )

    def ended(self, rank, generation=None, **words):
        end = worker_end(int(rank), **words)
        return agent_events.WorkerEnded(self._generation(generation), end)

    def server_started(self, server, pid):
        return agent_events.ServerStarted(int(server), int(pid))

    def server_ended(self, server, **words):
        return agent_events.ServerEnded(worker_end(int(server), is_server=True, **words))

    def swept(self, stuck=None, generation=None):
        return agent_events.GenerationSwept(self._generation(generation), (stuck,) if stuck else ())

    def tree_lost(self, why="the reaper was killed by SIGKILL", code="120"):
        return agent_events.TreeLost(why, int(code))

    def scheduler_lost(self, verdict=None, code="70"):
        written = None if verdict is None else self._verdict(int(verdict))
        return agent_events.SchedulerLost("the scheduler was killed by SIGKILL", written, int(code))

    def signal(self, name):
        return agent_events.Signalled(signal.Signals[name])

    def advance(self, seconds):
        self.now += float(seconds)
        return agent_events.Tick()

    def _generation(self, given):
        return self.state.generation if given is None else int(given)

    def _verdict(self, code):
        return Verdict(job_id="train", code=code, reason="as told", generation=0, restarts=0)

    def _start_message(self, count="2", first="0", nnodes="1", node="0"):
        return Start(
            node_rank=int(node),
            nnodes=int(nnodes),
            first_rank=int(first),
            count=int(count),
            world_size=int(first) + int(count),
            store_host="a",
            store_port=29500,
            serve_store=True,
        )

    def _stop_message(self, signum="SIGTERM", servers="no"):
        reason = "rank 1 exited with code 3"
        return Stop(reason=reason, signum=signal.Signals[signum], servers=servers == "yes")

    def _restarting_message(self):
        reason = "rank 1 exited with code 3"
        return Restarting(reason=reason, log_file="log", delay=0.0, restart=1, max_restarts=2)

    def _perform(self, event):
        actions = super()._perform(event) if event else self.state.begin()
        assert not (actions and self.concluded), "something was done after the end"
        assert self.state.generation >= self.generation
        self.generation = self.state.generation
        return actions

    def _check(self, action):
        match action:
            case agent_events.StartWorkers(generation=generation):
                assert self.started is None or self.started in self.drained
                self.started = generation
            case agent_events.Join():  # to a scheduler that may know nothing
                self.told.clear()
            case agent_events.SendToScheduler(body=Drained(), generation=generation):
                assert generation not in self.told, "drained twice"
                self.told.add(generation)
                self.drained.add(generation)
            case agent_events.Conclude():
                assert not self.concluded
                self.concluded = True

    def _show(self, action):  # noqa: C901, PLR0911 - one line an action
        match action:
            case agent_events.SendToScheduler(generation=generation, body=body):
                return f"-> scheduler g{generation} {show_message(body)}"
            case agent_events.Join(register=body):
                exits = " ".join(f"{e.rank}:{e.how()}:{e.age:g}" for e in body.exits)
                ended = f" ended={exits!r}" if exits else ""
                stuck = f" stuck={body.stuck}" if body.stuck else ""
                warm = " warm" * body.warm
                spared = f" spared={body.spared}" if body.spared >= 0 else ""
                return f"join running={body.running} seen={body.seen}{spared}{ended}{stuck}{warm}"
            case agent_events.Tell(sentence=sentence, warn=warn):
                return f"{'warn' if warn else 'tell'} {sentence!r}"
            case agent_events.StartWorkers(generation=generation, start=start):
                return f"start g{generation} {show_message(start)}"
            case agent_events.ForwardSignal(ranks=ranks, signum=signum):
                return f"signal {signal.Signals(signum).name} ranks={list(ranks)}"
            case agent_events.SweepGeneration(generation=generation, spare=spare):
                return f"sweep g{generation}" + (f" spare={list(spare)}" if spare else "")
            case agent_events.StartServer(server=server, restarts=restarts):
                return f"start-server {server} restarts={restarts}"
            case agent_events.SignalServers(servers=servers, signum=signum):
                return f"signal {signal.Signals(signum).name} servers={list(servers)}"
            case agent_events.CountServers(total=total):
                return f"count-servers {total}"
            case agent_events.Announce(restarting=restarting):
                return f"announce {show_message(restarting)}"
            case agent_events.Conclude(verdict=verdict):
                return f"conclude {show_verdict(verdict)}"


SCRIPTS = {"scheduler": SchedulerScript, "agent": AgentScript}
PATHS = sorted(SCENARIOS.glob("*/*.txt"))


def verbs(script):
    """Return the verbs of `script` as transcripts spell them."""
    inherited = {"run", "verdict"}
    return {
        name.replace("_", "-")
        for name in dir(script)
        if not name.startswith("_") and name not in inherited
    }


def blocks(path):
    """Return (comment lines, command) of every block in `path`."""
    found = []
    for block in path.read_text().strip().split("\n\n"):
        lines = block.split("\n")
        comments = [line for line in lines if line.startswith("#")]
        found.append((comments, lines[len(comments)]))
    return found


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_scenario(path):
    script = SCRIPTS[path.parent.name]()
    actual = "\n\n".join(
        "\n".join([*comments, command, "----", *script.run(command)])
        for comments, command in blocks(path)
    )
    if os.environ.get("REWRITE"):
        path.write_text(actual + "\n")
    assert path.read_text() == actual + "\n"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_scenario_opens_with_its_rule_in_one_sentence(path):
    (rule, command), *_ = blocks(path)

    assert " ".join(line.removeprefix("# ") for line in rule).endswith(".")
    assert command.split()[0] == "start"


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_every_verb_is_used(name):
    used = {blk[1].split()[0] for path in SCENARIOS.glob(f"{name}/*.txt") for blk in blocks(path)}

    assert used == verbs(SCRIPTS[name])
