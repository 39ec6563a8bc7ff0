"""Parameter servers are processes of the job: they outlive its workers, and nothing outlives it."""

import contextlib
import json
import re
import secrets
import shutil
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
from ports import free_port
from served import ELASTIC, TRAIN
from support import PATIENCE, environment, kill, script, until

from msrun.cluster.servers.events import DivisionRecord
from msrun.environ import SERVERS_KEY

pytestmark = [pytest.mark.process, pytest.mark.torch]


@pytest.fixture
def train(msrun, tmp_path):
    """Start a job of two workers with a table on two servers, and wait until it has begun."""
    (tmp_path / "servers.yaml").write_text("servers: {params: ['0.weight']}")

    def start(*words):
        program = script(tmp_path, TRAIN)
        sizes = ("--worker-num", 2, "--server-num", 2, "--parallel", "servers.yaml")
        job = msrun(*sizes, *words, program)
        job.until_logged("at go1", 0, 1)
        return job

    return start


def status(job):
    words = [sys.executable, "-m", "msrun", "status", job.name, "--json"]
    env = environment(job.runtime)
    return json.loads(subprocess.run(words, env=env, capture_output=True, check=True).stdout)


def servers(job):
    """Return (pid, restarts) of both servers, when both run."""
    rows = until(lambda: every_pid(status(job)["servers"]), "for both servers", pause=0.1)
    return [(row["pid"], row["restarts"]) for row in rows]


def every_pid(rows):
    return rows if len(rows) == 2 and all(row["pid"] for row in rows) else None


def test_a_killed_server_comes_back_alone_and_outlives_a_killed_worker(train, tmp_path):
    job = train("--max-restarts", 2)
    before = servers(job)
    kill(job.find("msrun server 1"))
    job.until_said("warning: server 1 (node ")
    (tmp_path / "go1").touch()
    job.until_logged("at go3", 0, 1)
    between = servers(job)
    worker = status(job)["ranks"][1]["pid"]
    kill(next(member for member in job.members() if member.pid == worker))

    assert job.wait() == 0
    assert "equal" in job.log(0)
    assert between[0] == before[0]
    assert between[1][0] != before[1][0]
    assert [restarts for _, restarts in between] == [0, 1]
    assert job.verdict()["restarts"] == 1
    assert "[msrun] server 1 starts again, restart 1\n" in (job.logs / "server_1.log").read_text()


def key(job):
    """Return the file with the key of the servers, and what it holds."""
    (path,) = job.runtime.rglob(f"servers/{SERVERS_KEY}")
    return path, path.read_text()


def test_a_server_has_a_key_of_the_job_and_nothing_of_its_script(train, tmp_path):
    job = train()
    path, text = key(job)
    mode = path.stat().st_mode & 0o777
    imported = {int(pid) for pid in (tmp_path / "imported").read_text().split()}
    ranks = {row["pid"] for row in status(job)["ranks"]}
    for name in ("go1", "go3"):
        (tmp_path / name).touch()

    assert job.wait() == 0
    assert imported == ranks
    assert re.fullmatch("[0-9a-f]{64}", text)
    assert mode == 0o600


def test_a_killed_scheduler_costs_neither_a_server_nor_a_step(train, tmp_path):
    """A server that is killed just after it starts again all the same."""
    job = train("--max-restarts", 2)
    before = servers(job)
    kill(job.find("msrun scheduler"))
    kill(job.find("msrun server 1"))
    (tmp_path / "go1").touch()
    job.until_logged("at go3", 0, 1)
    job.until_said("the scheduler was killed by SIGKILL")
    after = until(lambda: started_again(job, before), "for the second life of server 1")
    (tmp_path / "go3").touch()

    assert job.wait() == 0
    assert "equal" in job.log(0)
    assert after[0] == before[0]
    assert job.verdict()["restarts"] == 0


def started_again(job, before):
    """Return both servers once the second is another process than before."""
    found = servers(job)
    return found if found[1][0] != before[1][0] and found[1][1] == 1 else None


KILL_SERVERS = Path(__file__).parents[2] / "scripts" / "kill_servers.py"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kills", "words"),
    [
        (80, ["--others", 0.2, "--most", 1]),
        (20, ["--others", 0.4, "--most", 1, "--nodes", 2]),
        (20, ["--others", 0.2, "--replicas", 0, "--every", 20]),
    ],
    ids=["copies", "nodes", "snapshots"],
)
def test_no_kill_of_any_process_loses_a_step(kills, words, runtime):
    """Ranks compare each loss with that of one process; with copies a lost server costs 1 s."""
    words = ["--kills", kills, "--seed", secrets.randbelow(10**6), *words]
    done = subprocess.run(
        [sys.executable, str(KILL_SERVERS), *map(str, words)],
        env=environment(runtime),
        capture_output=True,
        text=True,
        check=False,
    )
    print(words, done.stdout, done.stderr)

    assert done.returncode == 0
    (total,) = re.findall(r"^.* kills of servers, .*$", done.stdout, re.MULTILINE)[-1:]
    kinds = [int(number) for number in re.findall(r"(\d+) (?:kills of|of) ", total)]
    assert sum(kinds) >= kills
    assert all(kinds[: 4 if "--nodes" in words else 3])


def scale(job, servers):
    words = [sys.executable, "-m", "msrun", "scale", job.name, "--servers", str(servers)]
    done = subprocess.run(words, env=environment(job.runtime), capture_output=True, check=True)
    return done.stderr.decode()


def epoch(job, number):
    """Return the bytes of each server from an epoch on, which the log of server 0 tells."""
    line = f"msrun: epoch {number} from step "
    log = until(lambda: said(job, line), f"for {line!r}", pause=0.1)
    return [int(size) for size in re.findall(r"(\d+) bytes on server", log)]


def said(job, line):
    log = (job.logs / "server_0.log").read_text()
    return next((each for each in log.splitlines() if each.startswith(line)), None)


@pytest.mark.slow
def test_servers_come_and_go_while_a_job_runs(train, tmp_path):
    job = train("--insecure")
    before, (_, said_of_keys) = epoch(job, 1), key(job)
    assert scale(job, 3) == f"msrun: job {job.name} goes from 2 to 3 parameter server(s)\n"
    more = epoch(job, 2)
    (tmp_path / "go1").touch()
    job.until_logged("at go3", 0, 1)
    scale(job, 1)
    fewer = epoch(job, 3)
    rows = until(lambda: only(status(job)["servers"]), "for one server", pause=0.1)
    (tmp_path / "go3").touch()

    assert job.wait() == 0
    assert "equal" in job.log(0)
    assert said_of_keys == "insecure"
    assert rows == [0]
    total = sum(before)
    for sizes in (before, more, fewer):
        assert sum(sizes) == total
        assert sizes == [pytest.approx(total / len(sizes), rel=0.2)] * len(sizes)
    assert [len(before), len(more), len(fewer)] == [2, 3, 1]


def only(rows):
    numbers = [row["server"] for row in rows]
    return numbers if len(numbers) == 1 else None


def test_a_server_that_is_not_started_again_is_the_root_cause(train):
    job = train()
    kill(job.find("msrun server 1"))

    assert job.wait() == 137
    assert "error: server 1 (node HOST, pid N) was killed by SIGKILL after Ns" in job.block()
    root = job.verdict()["root"]
    assert (root["is_server"], root["rank"]) == (True, 1)
    assert root["log_file"] == str(job.logs / "server_1.log")


def test_a_killed_launcher_leaves_no_server(train):
    job = train()
    assert job.find("msrun server 0")
    job.send(signal.SIGKILL)

    assert job.wait() == 137
    until(lambda: not job.leftovers(), "for the reaper", seconds=PATIENCE)


@pytest.mark.slow
def test_a_server_that_cannot_keep_snapshots_is_the_root_cause(msrun, tmp_path):
    config = "servers: {params: ['0.weight'], snapshot: {dir: /dev/null/no}}"
    (tmp_path / "servers.yaml").write_text(config)
    words = ("--worker-num", 1, "--server-num", 1, "--parallel", "servers.yaml")

    job = msrun(*words, script(tmp_path, TRAIN))

    assert job.wait() == 1
    assert "error: server 0 (node HOST, pid N) exited with code 1 after Ns" in job.block()
    assert "/dev/null/no" in job.verdict()["root"]["error"]


# Its server has no memory for the optimizer's state, which the first step makes.
LIMITED = """
    import os, resource
    import psutil, torch, msrun

    with msrun.init({"servers": {"params": ["weight"]}}) as rt:
        model = rt.shard(torch.nn.Embedding(4096, 4096))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = rt.optimizer(optimizer)
        model(torch.arange(4)).sum().backward()
        siblings = psutil.Process(os.getppid()).children()
        server = next(each for each in siblings if each.name() == "msrun server")
        lines = open(f"/proc/{server.pid}/status").read().splitlines()
        used = next(int(line.split()[1]) for line in lines if line.startswith("VmData"))
        limit = (used + 1024 << 10, resource.RLIM_INFINITY)
        resource.prlimit(server.pid, resource.RLIMIT_DATA, limit)
        while True:
            optimizer.step()
            optimizer.zero_grad()
            model(torch.arange(4)).sum().backward()
"""


@pytest.mark.slow
def test_a_server_without_memory_for_a_step_is_the_root_cause(msrun, tmp_path):
    job = msrun("--worker-num", 1, "--server-num", 1, script(tmp_path, LIMITED))

    assert job.wait() == 1
    root = job.verdict()["root"]
    assert (root["is_server"], root["rank"]) == (True, 0)
    assert re.search(r"parameter server 0 has no memory for \d+ more bytes", root["error"])
    assert re.search(r"beside \d{8,9} bytes of rows", root["error"])
    assert "--server-num" in job.block()


@pytest.fixture
def node(msrun, tmp_path):
    """Start one of two nodes of a job, in a place of its own."""
    (tmp_path / "secret").write_bytes(bytes(range(32)))
    (tmp_path / "secret").chmod(0o600)
    port, job_id = free_port(), f"nodes-{secrets.token_hex(4)}"

    def start(node_rank, place, *words):
        own = ["--nnodes", 2, "--node-rank", node_rank, "--master-addr", "127.0.0.1"]
        own += ["--master-port", port, "--job-id", job_id, "--lease", "3s"]
        own += ["--secret-file", tmp_path / "secret", "--workers-per-node", 1, "--server-num", 3]
        (tmp_path / place).mkdir(mode=0o700)
        job = msrun(*own, *words, env={"XDG_RUNTIME_DIR": str(tmp_path / place)})
        job.runtime = tmp_path / place
        return job

    return start


def kill_at_once(job):
    """Kill all of a node, so that nothing there can notice that another process is gone."""
    members = job.members()
    pids = {each.pid for each in members}
    groups = [path for path in job.cgroups() if pids & pids_below(path)]
    for each in members:
        each.suspend()
    kill(*members)
    job.process.wait()
    # A node that is gone has neither files nor control groups.
    shutil.rmtree(job.runtime)
    for group in groups:
        until(lambda: not pids_below(group), "for the end of all")  # noqa: B023 - at once
        for each in sorted(group.rglob("*/"), reverse=True):
            until(partial(is_removed, each), "for the end of a group")
        until(partial(is_removed, group), "for the end of a group")


def is_removed(group):
    """Remove a control group, unless the kernel is not yet done with its processes."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def pids_below(group):
    texts = [path.read_text() for path in group.rglob("cgroup.procs")]
    return {int(pid) for text in texts for pid in text.split()}


def are_apart(job):
    """Return whether each slice and its copy are on different nodes of two."""
    (path,) = job.runtime.rglob("head/decision")
    ownership = msgspec.msgpack.decode(path.read_bytes(), type=DivisionRecord).ownership
    pairs = zip(ownership.owners["0.weight"], ownership.copies["0.weight"], strict=True)
    return all(owner % 2 != copy % 2 for owner, copy in pairs)


def test_a_node_that_is_killed_loses_no_step(node, tmp_path):
    """Its server, its rank and its launcher at once; another node takes its place."""
    text = ELASTIC.replace('{"params": ["0.weight"]}', '{"params": ["0.weight"], "replicas": 1}')
    words = ("--max-restarts", 2, script(tmp_path, text))
    a, b = node(0, "a", *words), node(1, "b", *words)
    b.until_logged("goes on with 2", 1)
    assert b.find("msrun server 1")
    assert are_apart(a)
    kill_at_once(b)
    c = node(1, "c", *words)
    until(lambda: a.log(0).count("goes on with 2") > 1, "for the second life", seconds=60)
    assert c.find("msrun server 1")
    (tmp_path / "over").touch()

    assert [a.wait(60), c.wait(60)] == [0, 0]
    begins = [line.split() for line in a.log(0).splitlines() if line.startswith("begins with")]
    assert [int(words[2]) for words in begins] == [2, 2]
    assert [int(words[4]) > 0 for words in begins] == [False, True]
    assert a.log(0).rstrip().endswith("equal")


def below(terminal, name):
    """Return the processes with this name that the process of a terminal has started."""
    family = psutil.Process(terminal.process.pid).children(recursive=True)
    return [each for each in family if name in " ".join(each.cmdline())]


# Its server is stopped while a parameter of 64 MiB goes there, over sockets.
WAIT = """
    import os, threading, time
    import psutil, torch, msrun

    def wait(server):
        server.suspend()
        quiet = 0
        for _ in range(100):  # until a step's own work is done, which may wait for a core
            quiet = quiet + 1 if taken(0.1) < 0.02 else 0
            if quiet == 5:
                break
        used.append(taken(1))
        server.resume()

    def taken(seconds):
        before = time.process_time()
        threading.Event().wait(seconds)
        return time.process_time() - before

    used = []
    torch.set_num_threads(1)
    with msrun.init({"servers": {"params": ["weight"], "shared_memory": False}}) as rt:
        model = rt.shard(torch.nn.Linear(4096, 4096, bias=False))
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model.weight.grad = torch.ones(4096, 4096)
        optimizer.step()
        siblings = psutil.Process(os.getppid()).children()
        server = next(each for each in siblings if each.name() == "msrun server")
        waiting = threading.Thread(target=wait, args=(server,))
        waiting.start()
        while waiting.is_alive():
            optimizer.step()
        print("used", used[0])
"""


@pytest.mark.slow
def test_a_rank_that_waits_for_a_server_uses_no_processor(msrun, tmp_path):
    job = msrun("--worker-num", 1, "--server-num", 1, script(tmp_path, WAIT))

    assert job.wait() == 0
    (used,) = re.findall(r"^used (\S+)$", job.log(0), re.MULTILINE)
    assert float(used) < 0.2  # of one second


@pytest.mark.slow
def test_servers_by_hand_are_nodes_of_their_own(cluster, tmp_path):
    """MindSpore's words: each process is started by its user, in any order."""
    (tmp_path / "servers.yaml").write_text("servers: {params: ['0.weight']}")
    given = {"workers": 2, "MS_SERVER_NUM": 2, "MSRUN_PARALLEL": "servers.yaml"}
    program = script(tmp_path, f"import msrun; msrun.join()\n{textwrap.dedent(TRAIN)}")
    servers = [
        cluster.start(role, program, MS_NODE_ID=node_id, **given)
        for role, node_id in (("MS_PSERVER", "1"), ("MS_SERVER", "x"))
    ]
    cluster.start("MS_SCHED", program, **given)
    workers = [cluster.start("MS_WORKER", program, **given) for _ in range(2)]
    for number, server in zip((1, 0), servers, strict=True):
        until(lambda: below(server, f"msrun server {number}"), "for a server", seconds=90)  # noqa: B023 - at once
    for name in ("go1", "go3"):
        (tmp_path / name).touch()

    assert [process.wait(90) for process in cluster.processes] == [0] * 5
    assert all(worker.out.splitlines()[-1].endswith("equal") for worker in workers)
    assert all("this process has a parameter server" in server.err for server in servers)
