"""Run every transcript in `scenarios/` against the real state machines.

A block is one command, a `----` line and what came of it; a blank line ends it.
After a deliberate change: `REWRITE=1 pytest tests/sim`, then read the diff before
committing it.
"""

import inspect
import os
import shlex
import signal
from pathlib import Path

import pytest

from msrun.cluster import agent_state, scheduler_state, wal
from msrun.cluster.messages import (
    Drained,
    Finish,
    Interrupted,
    NodeFailed,
    Refused,
    Register,
    Restarting,
    Start,
    Stop,
    WorkerExited,
)
from msrun.cluster.restart_policy import RestartPolicy
from msrun.cluster.verdict import RankExit, Verdict
from msrun.job import RestartLimits

pytestmark = pytest.mark.sim

SCENARIOS = Path(__file__).parent / "scenarios"


def worker_end(rank, *, node_rank=0, first_rank=0, host="a", **words):
    """Return an end as `code=3 signal=SIGKILL ran=5 age=0.1 error=... oom=yes swept=yes` say."""
    signum = signal.Signals[words.pop("signal")] if "signal" in words else None
    code = words.pop("code", None)
    ran_for, age = float(words.pop("ran", 5)), float(words.pop("age", 0))
    flags = {name: words.pop(name, "no") == "yes" for name in ("oom", "core", "swept")}
    error = words.pop("error", "")
    assert not words
    return RankExit(
        rank=rank,
        node_rank=node_rank,
        host=host,
        local_rank=rank - first_rank,
        pid=100 + rank,
        code=None if code is None else int(code),
        signum=signum,
        ran_for=ran_for,
        age=age,
        error=error,
        log_file=f"logs/worker_{rank}.log",
        **flags,
    )


def show_verdict(verdict):
    said = f"code={verdict.code} generation={verdict.generation} restarts={verdict.restarts}"
    said += f" reason={verdict.reason!r}"
    if verdict.root:
        said += f" root={verdict.root.rank}"
    for group in verdict.collateral:
        said += f" collateral={group.ranks} {group.how!r}"
    if verdict.finished:
        said += f" finished={verdict.finished}"
    if verdict.stuck:
        said += f" stuck={verdict.stuck}"
    return said + (f" hint={verdict.hint!r}" if verdict.hint else "")


def show_message(body):  # noqa: C901, PLR0911 - one line a message
    match body:
        case Start():
            ranks = f"{body.first_rank}..{body.first_rank + body.count - 1} of {body.world_size}"
            store = f"store={body.store_host}:{body.store_port}"
            serving = " serve_store" if body.serve_store else ""
            return f"Start node={body.node_rank} of {body.nnodes} ranks={ranks} {store}{serving}"
        case Stop():
            return f"Stop {signal.Signals(body.signum).name} reason={body.reason!r}"
        case Restarting():
            count = f"{body.restart} of {body.max_restarts}"
            return f"Restarting {count} delay={body.delay:g} reason={body.reason!r}"
        case Finish():
            return f"Finish code={body.verdict.code}"
        case Refused():
            return f"Refused reason={body.reason!r}"
        case Register():
            return f"Register slots={body.slots}"
        case WorkerExited():
            swept = " (swept)" if body.exit.swept else ""
            return f"WorkerExited rank={body.exit.rank} {body.exit.how()}{swept}"
        case Drained():
            return "Drained" + (f" stuck={body.stuck}" if body.stuck else "")
        case Interrupted():
            return f"Interrupted {signal.Signals(body.signum).name}"
        case NodeFailed():
            return f"NodeFailed code={body.code} reason={body.reason!r}"


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
        return [*map(self._show, actions), f"{self.state.phase.value} {at}{ending}"]

    def _perform(self, event):
        return self.state.handle(event, now=self.now)


class SchedulerScript(Script):
    """Commands for the scheduler's machine; nodes are named by single letters."""

    def __init__(self):
        super().__init__()
        self.incarnations = {}
        self.first_ranks = {}
        self.written = []

    def start(self, nnodes="1", join_timeout="60", **limits):
        known = inspect.signature(RestartLimits).parameters
        numbers = {name: float(value) for name, value in limits.items() if name in known}
        assert numbers.keys() == limits.keys()
        for name in numbers.keys() & {"max_restarts", "no_progress_limit"}:
            numbers[name] = int(numbers[name])
        self.state = scheduler_state.SchedulerState(
            job_id="train",
            nnodes=int(nnodes),
            join_timeout=float(join_timeout),
            policy=RestartPolicy("train", RestartLimits(**numbers)),
        )

    def register(self, node, slots="2", incarnation="1", host=None, node_rank=None):
        self.incarnations[node] = int(incarnation)
        body = Register(
            host=host or node,
            slots=int(slots),
            store_host=host or node,
            store_port=29500,
            node_rank=None if node_rank is None else int(node_rank),
        )
        return self._received(node, body)

    def exit(self, node, rank, generation=None, incarnation=None, **words):
        first_rank = self.first_ranks.get(node, 0)
        end = worker_end(int(rank), first_rank=first_rank, host=node, **words)
        return self._received(node, WorkerExited(exit=end), generation, incarnation)

    def drained(self, node, stuck=None, generation=None):
        return self._received(node, Drained(stuck=[stuck] if stuck else []), generation)

    def interrupt(self, node, name):
        return self._received(node, Interrupted(signum=signal.Signals[name]))

    def node_failed(self, node, why="the reaper was killed by SIGKILL", code="120"):
        return self._received(node, NodeFailed(reason=why, code=int(code)))

    def misspeak(self, node):
        """Send what only a scheduler says."""
        return self._received(node, Refused(reason="no"))

    def advance(self, seconds):
        self.now += float(seconds)
        return scheduler_state.Tick()

    def _received(self, node, body, generation=None, incarnation=None):
        return scheduler_state.Received(
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
                case scheduler_state.Send(node_id=node, body=Start() as start):
                    self.first_ranks[node] = start.first_rank
                    ranks += range(start.first_rank, start.first_rank + start.count)
                    world_size = start.world_size
        assert not ranks or ranks == list(range(world_size)), "ranks are not 0, 1, 2, ..."
        return actions

    def _check(self, action):
        match action:
            case scheduler_state.Write(record=record):
                is_new = isinstance(record, wal.Decided) or record not in self.written
                assert is_new, "a generation was announced twice"
                assert self.verdict is None, "something was written after the verdict"
                self.written.append(record)
            case scheduler_state.Send(body=Start(), generation=generation):
                assert wal.GenerationStarted(generation) in self.written
            case scheduler_state.Send(body=Finish(verdict=verdict)):
                assert verdict == self.verdict == self.state.verdict

    @property
    def verdict(self):
        """The verdict that was written, None before."""
        return next((r.verdict for r in self.written if isinstance(r, wal.Decided)), None)

    def _show(self, action):
        match action:
            case scheduler_state.Write(record=wal.GenerationStarted(generation=generation)):
                return f"write GenerationStarted {generation}"
            case scheduler_state.Write(record=wal.Decided(verdict=verdict)):
                return f"write Decided {show_verdict(verdict)}"
        return f"-> {action.node_id} g{action.generation} {show_message(action.body)}"


class AgentScript(Script):
    """Commands for the agent's machine."""

    def __init__(self):
        super().__init__()
        self.generation = -1
        self.started = None
        self.drained = set()
        self.concluded = False

    def start(self, slots="2", grace="10", form_by="inf"):
        register = Register(host="a", slots=int(slots), store_host="a", store_port=29500)
        self.state = agent_state.AgentState(
            job_id="train", register=register, grace=float(grace), form_by=float(form_by)
        )

    def ready(self):
        return agent_state.TreeReady()

    def not_ready(self, why):
        return agent_state.TreeReady(error=why)

    def receive(self, message, generation=None, **words):
        build = {
            "Start": self._start_message,
            "Stop": self._stop_message,
            "Restarting": self._restarting_message,
            "Finish": lambda code="0": Finish(verdict=self._verdict(int(code))),
            "Refused": lambda: Refused(reason="job train has its 1 node(s) already"),
            "Drained": Drained,
        }[message]
        current = max(self.state.generation, 0)
        return agent_state.Received(
            current if generation is None else int(generation), build(**words)
        )

    def ended(self, rank, generation=None, **words):
        end = worker_end(int(rank), **words)
        return agent_state.WorkerEnded(self._generation(generation), end)

    def swept(self, stuck=None, generation=None):
        return agent_state.Swept(self._generation(generation), (stuck,) if stuck else ())

    def tree_lost(self, why="the reaper was killed by SIGKILL", code="120"):
        return agent_state.TreeLost(why, int(code))

    def scheduler_lost(self, verdict=None):
        written = None if verdict is None else self._verdict(int(verdict))
        return agent_state.SchedulerLost("the scheduler was killed by SIGKILL", written)

    def signal(self, name):
        return agent_state.Signalled(signal.Signals[name])

    def advance(self, seconds):
        self.now += float(seconds)
        return agent_state.Tick()

    def _generation(self, given):
        return self.state.generation if given is None else int(given)

    def _verdict(self, code):
        return Verdict(job_id="train", code=code, reason="as told", generation=0, restarts=0)

    def _start_message(self, count="2", first="0", nnodes="1"):
        return Start(
            node_rank=0,
            nnodes=int(nnodes),
            first_rank=int(first),
            count=int(count),
            world_size=int(first) + int(count),
            store_host="a",
            store_port=29500,
            serve_store=True,
        )

    def _stop_message(self, signum="SIGTERM"):
        return Stop(reason="rank 1 exited with code 3", signum=signal.Signals[signum])

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
            case agent_state.StartWorkers(generation=generation):
                assert self.started is None or self.started in self.drained
                self.started = generation
            case agent_state.Send(body=Drained(), generation=generation):
                assert generation not in self.drained, "drained twice"
                self.drained.add(generation)
            case agent_state.Conclude():
                assert not self.concluded
                self.concluded = True

    def _show(self, action):
        match action:
            case agent_state.Send(generation=generation, body=body):
                return f"-> scheduler g{generation} {show_message(body)}"
            case agent_state.StartWorkers(generation=generation, start=start):
                return f"start g{generation} {show_message(start)}"
            case agent_state.SignalWorkers(ranks=ranks, signum=signum):
                return f"signal {signal.Signals(signum).name} ranks={list(ranks)}"
            case agent_state.Sweep(generation=generation):
                return f"sweep g{generation}"
            case agent_state.Announce(restarting=restarting):
                return f"announce {show_message(restarting)}"
            case agent_state.Conclude(verdict=verdict):
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
