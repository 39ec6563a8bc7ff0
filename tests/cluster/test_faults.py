"""Faults of one node's processes, seen from the others: the rows F of the fault matrix.

`tests/process` has each of them on one machine; here somebody else has to learn of it.
"""

import contextlib
import shlex
import signal
import sys
import time

import memory
import psutil
import pytest
from audit import AT_ONCE, codes
from served import ELASTIC, TRAIN
from support import STOPS, kill, script, shell, until

pytestmark = pytest.mark.process

WAIT = "echo up; until [ -e go ]; do sleep 0.01; done"
DEAF = "trap '' INT TERM; echo up; while :; do sleep 0.01; done"


@pytest.fixture
def pair(new_lab):
    """Two hosts a and b."""
    return new_lab("a", "b")


def until_up(nodes, *, each=1):
    """Wait until the workers of all nodes have said so."""
    for number, node in enumerate(nodes):
        node.until_logged("up", *range(number * each, (number + 1) * each))


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_the_users_own_signal_reaches_the_workers_of_its_node_and_no_other(pair, form, signum):
    """F-05."""
    program = f"trap 'echo got it' {signum.name[3:]}; {WAIT}"
    nodes = form(pair.hosts, *shell(program))
    until_up(nodes)

    nodes[1].send(signum)
    nodes[1].until_logged("got it", 1)
    (pair.folder / "go").touch()

    assert codes(nodes) == [0, 0]
    assert nodes[0].log(0) == "up\n"
    assert nodes[0].verdict()["restarts"] == 0


@pytest.mark.parametrize("asked", [0, 1], ids=["node of the scheduler", "other node"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.few(2)
def test_a_second_signal_ends_at_once_what_ignores_the_first_on_every_node(
    pair, form, signum, asked
):
    """F-06."""
    nodes = form(pair.hosts, "--grace", "10m", *shell(DEAF))
    until_up(nodes)
    nodes[asked].send(signum)
    log = nodes[0].logs / "scheduler.log"
    until(lambda: "received Interrupted" in log.read_text(), "for the first signal's effect")
    again_at = time.monotonic()
    nodes[asked].send(signum)

    assert codes(nodes) == [STOPS[signum]] * 2
    assert time.monotonic() - again_at <= 1.0


LOADERS = """
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        def __len__(self):
            return 1 << 30

        def __getitem__(self, index):
            return torch.full((1000,), float(index))

    for number, batch in enumerate(DataLoader(Numbers(), batch_size=4, num_workers=2)):
        if number == 0:
            print("up", flush=True)
"""


def loaders(host):
    """Return how many processes of a host have the name of a loader's worker."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [p.name()[:14] for p in host.processes()].count("pt_data_worker")
    return 0


@pytest.mark.torch
def test_data_loaders_end_with_their_nodes_agent_and_the_job_with_it(pair, form):
    """F-03."""
    nodes = form(pair.hosts, "--max-restarts", 0, script(pair.folder, LOADERS))
    until_up(nodes)
    b = pair.host("b")
    # The first batch is that of the first of them.
    until(lambda: loaders(b) == 2, "for both loaders")

    nodes[1].send(signal.SIGKILL)
    nodes[1].wait()
    until(lambda: not b.processes(), "for the end of all", seconds=1.0)

    assert nodes[0].wait() == 120
    assert pair.host("a").processes() == []
    assert "node b was lost: its launcher has ended" in nodes[0].block()


LEAVES = """
    import os, torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    if os.environ["RANK"] == "0":
        os._exit(0)
    while True:
        dist.barrier()
"""


@pytest.mark.torch
def test_a_rank_that_leaves_amid_a_collective_is_named_on_every_node(pair, form):
    """F-13."""
    nodes = form(pair.hosts, script(pair.folder, LEAVES))

    assert codes(nodes) == [1, 1]
    for node in nodes:
        assert "error: rank 1 (node b, local_rank 0" in node.block()
        assert "rank 0 had finished with code 0" in node.block()


EARLY = """
    import os, torch.distributed as dist

    if os.environ["RANK"] != "0":
        dist.init_process_group("gloo")
"""


@pytest.mark.torch
def test_a_rank_that_ends_before_the_others_have_met_it_is_named_within_seconds(pair, form):
    """F-14."""
    nodes = form(pair.hosts, "--workers-per-node", 2, script(pair.folder, EARLY))
    log = nodes[0].logs / "scheduler.log"
    until(lambda: log.exists() and "received WorkerExited" in log.read_text(), "for its end")
    ended_at = time.monotonic()
    for node in nodes:
        node.until_said("rank 0 has finished; still running: rank 1 on node a; rank 2-3 on node b")
    assert time.monotonic() - ended_at <= 5.0
    nodes[0].send(signal.SIGTERM)

    assert codes(nodes) == [143, 143]


def test_a_worker_that_crashes_at_its_start_is_not_started_again_and_again(pair, form):
    """F-15."""
    crash = "[ $RANK = 1 ] && { date +%s%N; exit 6; }; exec sleep 600"
    nodes = form(pair.hosts, "--max-restarts", 10, "--no-progress-limit", 3, *shell(crash))

    assert codes(nodes) == [123, 123]
    starts = [int(line) / 1e9 for line in nodes[1].log(1).splitlines() if line.isdigit()]
    assert len(starts) == 3
    assert starts[2] - starts[1] >= 1.5
    for node in nodes:
        assert "rank 1 (node b, local_rank 0" in node.block()
        assert "the same early failure came 3 times in a row" in node.block()


EAT = "eaten = []\nwhile True: eaten.append(b'x' * (8 << 20))"


def test_a_rank_that_the_kernel_killed_for_memory_is_named_on_every_node(pair, form):
    """F-16."""
    eat = f'[ $RANK = 1 ] && exec {shlex.quote(sys.executable)} -c "{EAT}"; exec sleep 600'
    with memory.limited() as group:
        a, b = pair.hosts
        nodes = [*form([a], *shell(eat)), *form([b], *shell(eat), wrapper=memory.entering(group))]
        assert codes(nodes) == [137, 137]

    for node in nodes:
        assert "error: rank 1 (node b, local_rank 0" in node.block()
        assert "was killed by SIGKILL (out of memory)" in node.block()
        assert node.verdict()["root"]["oom"] is True


def test_a_killed_reaper_ends_its_node_and_is_told_on_the_others(pair, form):
    """F-21."""
    nodes = form(pair.hosts, "--grace", "1s", *shell(f"trap '' TERM; setsid sleep 600 & {WAIT}"))
    until_up(nodes)
    nodes[1].find("msrun reaper").kill()

    assert codes(nodes) == [120, 120]
    assert [host.processes() for host in pair.hosts] == [[], []]
    for node in nodes:
        assert "the reaper (pid N) ended" in node.block()


@pytest.mark.parametrize(
    ("mode", "code"), [(0o755, 126), (None, 127)], ids=["no program", "missing"]
)
def test_a_program_that_cannot_be_started_on_one_node_is_not_tried_again(pair, form, mode, code):
    """F-24."""
    program = pair.host("b").file("/tmp") / "program"
    if mode:
        program.write_bytes(b"\x7fELF is not all it takes")
        program.chmod(mode)
    text = f"[ $RANK = 1 ] && exec /tmp/program; {WAIT}"
    nodes = form(pair.hosts, "--max-restarts", 3, *shell(text))

    assert codes(nodes) == [code, code]
    for node in nodes:
        assert "rank 1 (node b, local_rank 0" in node.block()
        assert "it cannot be started, so it is not restarted" in node.err
    assert nodes[0].verdict()["restarts"] == 0


@pytest.mark.slow
def test_nodes_with_servers_come_and_go_in_an_elastic_job(lab, form):
    (lab.folder / "servers.yaml").write_text("servers: {params: ['0.weight']}")
    sizes = (
        "--nnodes",
        "1:2",
        "--workers-per-node",
        1,
        "--server-num",
        2,
        "--lease",
        "3s",
        *AT_ONCE,
    )
    words = (*sizes, "--max-restarts", 2, "--parallel", "servers.yaml")
    program = script(lab.folder, ELASTIC)
    (a,) = form(lab.hosts[:1], *words, program)
    a.until_logged("goes on with 1", 0)
    (b,) = form(lab.hosts[1:2], *words, program)
    b.until_logged("goes on with 2", 1)
    assert b.find("msrun server 1")
    b.kill_host()
    until(lambda: a.log(0).count("goes on with 1") > 1, "for one node", seconds=60)
    (lab.folder / "over").touch()

    assert a.wait(60) == 0
    log = a.log(0)
    assert log.rstrip().endswith("equal")
    begins = [line.split() for line in log.splitlines() if line.startswith("begins with")]
    assert [int(words[2]) for words in begins] == [1, 2, 1]
    assert all(int(words[4]) > 0 for words in begins[1:])


@pytest.mark.slow
def test_servers_on_several_nodes_outlive_a_server_and_move_with_a_lost_node(lab, form):
    (lab.folder / "servers.yaml").write_text("servers: {params: ['0.weight']}")
    sizes = ("--nnodes", 2, "--workers-per-node", 1, "--server-num", 2, "--lease", "3s")
    words = (*sizes, "--max-restarts", 2, "--parallel", "servers.yaml")
    program = script(lab.folder, TRAIN)
    a, b = form(lab.hosts[:2], *words, program)
    a.until_logged("at go1", 0)
    b.until_logged("at go1", 1)
    (c,) = form(lab.hosts[2:], *words, program)
    c.until_said("stands by as a spare")
    kill(b.find("msrun server 1"))
    b.until_said("warning: server 1 (node b")
    (lab.folder / "go1").touch()
    a.until_logged("at go3", 0)
    b.kill_host()

    assert [a.wait(60), c.wait()] == [0, 0]
    assert "equal" in a.log(0)
    assert "equal" in c.log(1)
    assert c.verdict()["restarts"] == 1
