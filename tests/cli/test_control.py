"""Verbs that control a job: which job they mean, what they ask, what they show."""

import json

import pytest

from msrun.cli.main import main
from msrun.cli.verbs.status import duration
from msrun.cluster.bounds import RankSet
from msrun.cluster.liveness.stacks import Frame, StackGroup
from msrun.cluster.verdict import Verdict
from msrun.cluster.wire.control_messages import (
    Done,
    DrainNode,
    GetLog,
    GetNodes,
    GetStacks,
    Log,
    NodeRow,
    Nodes,
    RankRow,
    Ranks,
    SignalJob,
    Stacks,
    Status,
    StopJob,
)
from msrun.cluster.wire.messages import Formation
from msrun.errors import UnreachableError, UsageError
from msrun.processes.control_file import Card
from msrun.supervise.secret import read_secret
from msrun.transport.sockets import control_keys
from ranktable import parse_table


def card(job_id="train-1", **changes):
    told = {
        "job_id": job_id,
        "host": "127.0.0.1",
        "port": 4242,
        "keys": None,
        "pid": 77,
        "log_dir": "/logs",
        "workers": 2,
        "serves": True,
        "began": 876.5,
    }
    return Card(**told | changes)


STATUS = Status(
    job_id="train-1",
    phase="running",
    generation=1,
    uptime=3725.0,
    formation=Formation(nnodes_min=2, nnodes_max=4, lease=10.0),
    nodes=3,
    world_size=3,
    waiting_for="",
    failures=1,
    losses=0,
    max_restarts=3,
    causes=["generation 0: rank 1 (node b, local_rank 0, pid 9) exited with code 3 after 5.00s"],
    scheduler_restarts=0,
)
NODE = {
    "node_id": "a/1",
    "host": "a",
    "address": "10.0.0.1",
    "role": "serving",
    "node_rank": 0,
    "ranks": (0, 2),
    "slots": 2,
    "silent": 0.4,
    "scheduler": True,
    "devices": [],
}
NODES = Nodes(
    rows=[
        NodeRow(**NODE),
        NodeRow(**NODE | {"host": "b", "node_rank": 1, "ranks": (2, 1), "scheduler": False}),
    ],
    following=2,
)
MORE_NODES = Nodes(
    rows=[NodeRow(**NODE | {"host": "c", "role": "spare", "node_rank": None, "ranks": None})]
)
RANK = {"local_rank": 0, "host": "a", "pid": 10, "state": "running", "seconds": 62.0}
RANKS = Ranks(
    rows=[
        RankRow(rank=0, **RANK),
        RankRow(rank=1, **RANK | {"pid": None, "state": "starting", "seconds": None}),
    ]
)
ALL = [STATUS, NODES, MORE_NODES, RANKS]
TEXT = """\
job train-1:
  phase               running
  generation          1
  scheduler runs for  1h02m
  nodes               3 registered, takes 2 to 4
  ranks               3
  restarts            1 of 3

nodes:
  node  host  address   role                ranks  silent
  0     a     10.0.0.1  serving, scheduler  0-1    0s
  1     b     10.0.0.1  serving             2      0s
  -     c     10.0.0.1  spare, scheduler    -      0s

ranks:
  rank  host  local  pid  for    state
  0     a     0      10   1m02s  running
  1     a     0      -    -      starting

what ended earlier generations:
  generation 0: rank 1 (node b, local_rank 0, pid 9) exited with code 3 after 5.00s
"""


@pytest.fixture
def job(system):
    """One job on this machine, which gives the answers that follow."""

    def answer(*replies):
        system.cards = [card()]
        system.replies[:] = replies

    return answer


def asked(system):
    """Return what was asked of the one job; its connection is closed."""
    (client,) = system.clients
    assert client.closed
    return client.asked


def test_status(msrun, job):
    job(*ALL)

    outcome = msrun("status")

    assert (outcome.code, outcome.err, outcome.out) == (0, "", TEXT)


def test_status_as_json(msrun, job):
    job(*ALL)

    found = json.loads(msrun("status --json").out)

    assert list(found) == [
        "schema",
        "job_id",
        "phase",
        "generation",
        "uptime",
        "formation",
        "nodes",
        "world_size",
        "waiting_for",
        "failures",
        "losses",
        "max_restarts",
        "causes",
        "scheduler_restarts",
        *("verdict", "ranks", "servers"),
    ]
    assert (found["schema"], found["job_id"]) == (1, "train-1")
    assert found["nodes"][0] == NODE | {"ranks": [0, 2]}
    assert [row["host"] for row in found["nodes"]] == ["a", "b", "c"]
    assert found["ranks"][0] == {"rank": 0, **RANK}


def test_status_of_a_job_that_waits(msrun, job):
    waits = "1 of 2 nodes registered: a"
    forming = {"phase": "forming", "waiting_for": waits, "world_size": 0, "causes": []}
    job(*(replaced(STATUS, **forming), Nodes(rows=[]), Ranks(rows=[])))

    assert f"  waits               {waits}\n" in msrun("status").out


def replaced(struct, **changes):
    from msgspec.structs import replace

    return replace(struct, **changes)


def test_watch_goes_on_until_the_verdict(msrun, job, system):
    verdict = Verdict(job_id="train-1", code=3, reason="as told", generation=1, restarts=1)
    job(*ALL, replaced(STATUS, phase="failed", verdict=verdict), MORE_NODES, Ranks(rows=[]))

    outcome = msrun("status --watch")

    assert outcome.code == 0
    assert outcome.out.startswith(TEXT)
    assert "  exit code           3\n  result              as told\n" in outcome.out
    assert system.paused == [1.0]


def test_watch_ends_with_the_job(msrun, job):
    job(*ALL, UnreachableError("it did not answer"))

    outcome = msrun("status --watch")

    assert (outcome.code, outcome.out) == (0, TEXT + "\n")
    assert outcome.err.startswith("msrun: the job does not answer any more: ")


def test_stop(msrun, job, system):
    job(Done(sentence="job train-1 is being stopped"))

    outcome = msrun("stop")

    assert (outcome.code, outcome.err) == (0, "msrun: job train-1 is being stopped\n")
    assert asked(system) == [StopJob(now=False)]


def test_stop_now(msrun, job, system):
    job(Done(sentence="gone"))
    msrun("stop train-1 --now")

    assert asked(system) == [StopJob(now=True)]


@pytest.mark.parametrize("line", ["drain b", "drain train-1 b", "drain tr b"])
def test_drain(msrun, job, system, line):
    job(Done(sentence="node b leaves job train-1"))

    assert msrun(line).code == 0
    assert asked(system) == [DrainNode(node="b")]


@pytest.mark.parametrize("line", ["stop --json", "drain --json b", "signal --json USR1"])
def test_orders_as_json(msrun, job, line):
    job(Done(sentence="so it is"))
    outcome = msrun(line)

    assert (outcome.code, outcome.err) == (0, "")
    assert json.loads(outcome.out) == {"schema": 1, "done": "so it is"}


def test_what_the_job_refuses_is_one_sentence(msrun, job):
    job(UsageError("the job cannot do without node b: it takes 2 node(s)"))

    outcome = msrun("drain b")

    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "error: the job cannot do without node b: it takes 2 node(s)\n"


@pytest.mark.parametrize("name", ["USR1", "sigusr1", "10"])
def test_signal(msrun, job, system, name):
    job(Done(sentence="SIGUSR1 goes to 2 rank(s) on 1 node(s)"))

    assert msrun(f"signal {name} --rank 0,2-3").code == 0
    assert asked(system) == [SignalJob(signum=10, ranks=[(0, 0), (2, 3)])]


def test_more_ranges_than_a_question_has_room_for(msrun):
    outcome = msrun(f"signal USR1 --rank {','.join(map(str, range(0, 1026, 2)))}")

    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "error: --rank has 513 ranges of ranks, and may have 512\n"


def log(text, offset):
    return Log(host="a", log_file="/logs/worker_0.log", data=text, offset=offset)


def test_logs(msrun, job, system):
    job(log(b"one\ntwo \x1b[2J\n", 20))

    outcome = msrun("logs --lines 2")

    assert (outcome.code, outcome.out) == (0, "one\ntwo \\x1b[2J\n")
    assert asked(system) == [GetLog(rank=0, lines=2)]


def test_logs_of_several_ranks(msrun, job):
    job(log(b"one\n", 4), log(b"two", 3))

    assert msrun("logs --rank 0,3").out == "[rank 0] one\n[rank 3] two\n"


def test_logs_that_are_followed(msrun, job, system):
    replies = [log(b"one\nt", 5), log(b"wo\nthr", 10), log(b"", 10), UnreachableError("gone")]
    job(*replies)

    assert msrun("logs -f").out == "one\ntwo\n"
    assert [request.offset for request in asked(system)] == [None, 5, 10, 10]
    assert system.paused == [0.5]


def test_logs_as_json(msrun, job):
    job(log(b"one\ntwo\n", 8))

    assert json.loads(msrun("logs --json").out) == {
        "schema": 1,
        "logs": [
            {"rank": 0, "host": "a", "log_file": "/logs/worker_0.log", "lines": ["one", "two"]}
        ],
    }


GROUPS = [
    StackGroup(RankSet.of([0, 1]), [Frame("/x/train.py", 41, "step")]),
    StackGroup(RankSet.of([2]), [], "it is stopped, by SIGSTOP or a debugger"),
]


def test_stacks(msrun, job, system):
    job(Stacks(generation=0, groups=GROUPS, left_out=1))

    outcome = msrun("stacks")

    assert outcome.out == (
        "2 ranks (0-1) in step at train.py:41\n"
        "    /x/train.py:41 in step\n"
        "rank 2 without a stack: it is stopped, by SIGSTOP or a debugger\n"
    )
    assert outcome.err == "msrun: 1 more groups of ranks are not shown\n"
    assert asked(system) == [GetStacks()]


def test_stacks_as_json(msrun, job):
    job(Stacks(generation=0, groups=GROUPS))

    found = json.loads(msrun("stacks --json").out)

    assert list(found) == ["schema", "generation", "groups", "left_out"]
    assert found["groups"][0]["ranks"] == {"count": 2, "runs": [[0, 1]]}
    assert found["groups"][0]["frames"] == [{"file": "/x/train.py", "line": 41, "function": "step"}]


def test_ls(msrun, system):
    system.cards = [card(), card("other", pid=78, serves=False)]

    assert msrun("ls").out == (
        "jobs:\n"
        "  job      pid  workers  scheduler       for    logs\n"
        "  train-1  77   2        127.0.0.1:4242  2m03s  /logs\n"
        "  other    78   2        127.0.0.1:4242  2m03s  /logs\n"
    )


def test_ls_as_json(msrun, system):
    system.cards = [card()]

    assert json.loads(msrun("ls --json").out) == {
        "schema": 1,
        "jobs": [
            {
                "job_id": "train-1",
                "pid": 77,
                "workers": 2,
                "scheduler": "127.0.0.1:4242",
                "serves": True,
                "seconds": 123.5,
                "log_dir": "/logs",
            }
        ],
    }


def test_ls_removes_what_is_left_if_so_asked(msrun, system):
    system.left = ["train-1", "odd\n"]

    assert "removed" not in msrun("ls").err
    assert "msrun: removed what job 'odd\\n' had left\n" in msrun("ls --clean").err
    assert system.left == []


def test_ls_without_jobs(msrun):
    outcome = msrun("ls")

    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err == "msrun: no job of yours runs on this machine\n"


def test_one_job_with_two_launchers_here_needs_no_name(msrun, system):
    system.cards = [card(), card(serves=False, pid=78)]
    system.replies[:] = [Done(sentence="done")]

    assert msrun("stop").code == 0


def test_a_job_elsewhere(msrun, system, here):
    (here / "secret").write_bytes(bytes(32))
    (here / "secret").chmod(0o600)
    system.replies[:] = [Done(sentence="done")]

    assert msrun("stop train-9 --master-addr node1 --secret-file secret").code == 0
    keys = control_keys(read_secret(str(here / "secret")))
    assert system.clients[0].card == Card(job_id="train-9", host="10.0.0.9", port=29500, keys=keys)


REFUSALS = {
    "status": "no job of yours runs on this machine\n"
    "  hint: where another node has its scheduler: --master-addr HOST",
    "status --nope": "there is no option --nope",
    "status a b": "'b' is one word too many: one JOB at a time",
    "status --master-port 1": "--master-port needs the node of the scheduler: --master-addr HOST",
    "status --secret-file x": "--secret-file needs the node of the scheduler: --master-addr HOST",
    "status --master-addr nowhere": "--master-addr 'nowhere' is no host that this machine knows",
    "status --master-addr node1 --master-port 0": "--master-port '0' is out of range "
    "(choose a whole number from 1 to 65535)",
    "drain": "msrun drain needs a NODE: msrun drain [JOB] NODE",
    "signal": "msrun signal needs a SIGNAL: msrun signal [JOB] SIGNAL",
    "signal WHAT": "'WHAT' is no signal (choose such as USR1, SIGUSR1, or 1 to 64)",
    "signal 0": "'0' is no signal (choose such as USR1, SIGUSR1, or 1 to 64)",
    "signal USR1 --rank x": "--rank 'x' is no list of ranks (choose such as 0,2-3)",
    "signal USR1 --rank 3-2": "--rank '3-2' is no list of ranks (choose such as 0,2-3)",
    "logs --lines x": "--lines 'x' is not a whole number (choose a whole number from 0 to 1000)",
    "logs --rank 0-99": "--rank 0-99 is more than 64 ranks at a time",
    "logs --follow --json": "--follow and --json exclude each other",
    "ls --nope": "there is no option --nope",
}


@pytest.mark.parametrize(("line", "message"), REFUSALS.items())
def test_refusals(msrun, system, line, message):
    outcome = msrun(line)

    assert (outcome.code, outcome.out, outcome.err) == (2, "", f"error: {message}\n")
    assert system.clients == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "2 jobs run on this machine (choose train-1 or train-2)"),
        ("tr", "'tr' is more than one job (choose train-1 or train-2)"),
        ("x", "'x' is no job of yours on this machine (choose train-1 or train-2)"),
    ],
)
def test_which_job(msrun, system, name, message):
    system.cards = [card(), card("train-2")]

    assert msrun(f"stop {name}").err == f"error: {message}\n"


def test_a_whole_name_is_stronger_than_a_beginning(msrun, system):
    system.cards = [card("train-1"), card("train-10")]
    system.replies[:] = [Done(sentence="done")]

    msrun("stop train-1")

    assert system.clients[0].card.job_id == "train-1"


@pytest.mark.parametrize("verb", ["status", "logs", "stacks", "signal", "drain", "stop", "ls"])
def test_every_verb_has_help(capsys, system, verb):
    assert main([verb, "--help"], system=system) == 0
    assert f"Usage: msrun {verb} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (61, "1m01s"), (3700, "1h01m"), (100_000, "1d03h")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_a_rank_table_of_a_job(msrun, job, system):
    job(
        replaced(NODES, following=2),
        Nodes(rows=[NodeRow(**NODE | {"address": "10.0.0.9", "role": "spare", "ranks": None})]),
    )

    outcome = msrun("ranktable build --job train")

    table = parse_table(outcome.out)
    assert (outcome.code, outcome.err) == (0, "")
    assert [(server.server_id, device.device_id) for server, device in table.by_rank()] == [
        ("10.0.0.1", 0),
        ("10.0.0.1", 1),
        ("10.0.0.1", 2),
    ]
    assert asked(system) == [GetNodes(), GetNodes(first=2)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--job x", "'x' is no job of yours on this machine (choose train-1)"),
        ("--job train --slurm", "--slurm contradicts --job (choose one)"),
        ("--job train --slots 2", "--slots contradicts --job, whose nodes and devices are known"),
        ("--master-addr a", "--master-addr needs --job, whose scheduler it finds"),
        ("--job train --master-port 1", "--master-port needs the node of the scheduler: "),
    ],
)
def test_a_rank_table_of_no_job(msrun, job, words, sentence):
    job()

    outcome = msrun(f"ranktable build {words}")

    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"error: {sentence}")
