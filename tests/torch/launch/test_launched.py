"""One script under `msrun`, torchrun and plain `python`: the same object, the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch.distributed as dist
from ranks import run_ranks
from support import environment, script

import msrun
from msrun.errors import UsageError

pytestmark = [pytest.mark.process, pytest.mark.torch]

PROGRAM = r"""
import atexit, json, sys

NAMES = ("tensor", "fsdp", "pipelining", "checkpoint")
here = [name for name in NAMES if f"torch.distributed.{name}" in sys.modules]
here += ["runtime"] if "msrun.parallel.runtime" in sys.modules else []

import torch
import torch.distributed as dist
from torch import nn

found = {}


def report():
    # Written at once, since ranks of torchrun share a file.
    sys.stdout.write(json.dumps(found | {"group at exit": dist.is_initialized()}) + "\n")


atexit.register(report)

import msrun

with msrun.init() as first:
    total = torch.ones(1)
    dist.all_reduce(total)
rt = msrun.init()
found = {"place": [rt.rank, rt.world_size, rt.local_rank, rt.local_world_size, rt.node_rank]}
if sys.argv[1:] and rt.rank == 0:
    raise ValueError(sys.argv[1])
# The parameters of the first rank count, so they are the same however many there are.
torch.manual_seed(rt.rank)
model = rt.shard(nn.Linear(4, 2))
optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
x, y = torch.arange(32.0).view(8, 4) / 32, torch.arange(16.0).view(8, 2) / 16
share, count = rt.coordinate["dp"], rt.layout.size("dp")
batch = [part.chunk(count)[share] for part in (x, y)]
losses = [rt.step(model, optimizer, nn.functional.mse_loss, *batch).item() for _ in range(3)]
found |= {
    "here before": here,
    "in the group before": total.item(),
    "accumulate": rt.config.accumulate,
    "losses": losses,
}
"""
DATA = {"mesh": {"dp": -1}, "accumulate": 2}
# All that costs an import; with one rank each of them is there and changes nothing.
EVERYTHING = {
    "mesh": {"pp": 1, "dp": -1, "tp": 1},
    "plan": [{"match": "*", "style": "colwise"}],
    "optimizer": {"zero": 1},
    "pipeline": {"stages": {"": 0}, "microbatches": 1},
    "checkpoint": {"dir": "ckpt"},
}
WRONG_SIZE = {"mesh": {"dp": 3}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with the program and the configurations."""
    folder = tmp_path_factory.mktemp("launched")
    script(folder, PROGRAM)
    named = {"data": DATA, "everything": EVERYTHING, "wrong-size": WRONG_SIZE}
    for name, tree in named.items():
        script(folder, json.dumps({"parallel": tree}), f"{name}.yaml")
    return folder


def answers(text):
    """Return what each rank found, by rank."""
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda answer: answer["place"])


@pytest.fixture(scope="module")
def alone(folder, plain):
    """What plain Python finds, without any configuration."""
    code, output = plain(folder, "program.py")

    assert code == 0, output
    return answers(output)[0]


def check(found, alone):
    """Two ranks were who they should be, and trained as one process does."""
    assert [answer["place"] for answer in found] == [[rank, 2, rank, 2, 0] for rank in (0, 1)]
    for answer in found:
        assert answer["losses"] == pytest.approx(alone["losses"], abs=1e-6)
        assert (answer["accumulate"], answer["group at exit"]) == (2, False)
        assert answer["in the group before"] == 2


def test_under_plain_python(alone):
    assert alone["place"] == [0, 1, 0, 1, 0]
    assert alone["losses"] == sorted(alone["losses"], reverse=True)
    assert (alone["accumulate"], alone["group at exit"]) == (1, False)


def test_under_msrun(folder, finished, alone):
    job = finished(folder, "--parallel", "data.yaml", "--workers-per-node", 2, "program.py")

    assert job.process.returncode == 0
    found = [answers(job.log(rank))[0] for rank in (0, 1)]
    check(found, alone)
    # It was imported by the parent, which could be forked all the same.
    assert ["runtime" in answer["here before"] for answer in found] == [True, True]
    assert "warning" not in job.err


def test_under_torchrun(folder, plain, alone):
    env = {"MSRUN_CONFIG": "data.yaml", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    words = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "program.py")

    code, output = plain(folder, *words, env=environment(folder / "run") | env)

    assert code == 0, output
    check(answers(output), alone)


def test_a_parent_with_everything_can_be_forked(folder, finished):
    program = script(folder, PROGRAM.partition("import torch\n")[0] + "print(here)", "here.py")
    job = finished(folder, "--parallel", "everything.yaml", program)

    assert job.process.returncode == 0
    assert "warning" not in job.err
    assert job.log() == "['tensor', 'fsdp', 'pipelining', 'checkpoint', 'runtime']\n"


def test_the_group_of_a_failed_program_is_left_to_its_death_where_it_has_peers(
    folder, plain, finished
):
    """Alone it tells nobody by that, and torch might abort a Python that has begun to end."""
    words = ("program.py", "broken")
    code, output = plain(folder, *words)
    job = finished(folder, "--workers-per-node", 2, *words)

    assert (code, job.process.returncode) == (1, 1)
    for text, has_peers in ((output, False), (job.log(), True)):
        assert "ValueError: broken" in text
        assert answers(text)[0]["group at exit"] is has_peers


def test_a_mistake_names_its_key_in_a_rank_of_torchrun(folder, plain):
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK")
    env = dict.fromkeys(names, "0") | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    env |= {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    env |= {"MSRUN_CONFIG": "wrong-size.yaml"}

    code, output = plain(folder, "program.py", env=environment(folder / "run") | env)

    assert code == 1
    assert "ConfigError: parallel.mesh: dp 3 is not world_size 1\n" in output


def test_importing_msrun_imports_no_torch():
    code = "import sys, msrun; print(msrun.init.__name__, 'torch' in sys.modules)"
    out = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=30)

    assert out == "init False\n"


# In one process, as two ranks that have a group already.


def adopt():
    first, second = msrun.init(DATA), msrun.init()
    third = msrun.init({"parallel": DATA})
    is_same = first is second is third
    first.close()
    return is_same, first.rank, dist.is_initialized(), msrun.init() is first


THREADS = """
import atexit, os
import torch, torch.distributed as dist
import msrun

def count():
    return len(os.listdir("/proc/self/task"))

before = count()
atexit.register(lambda: print(before, count()))  # after msrun's own
rt = msrun.init()
dist.all_reduce(torch.ones(1))
print(count() > before)
"""


def test_no_thread_of_the_group_outlives_the_program(plain, tmp_path):
    code, output = plain(tmp_path, script(tmp_path, THREADS))

    is_more, counts = output.splitlines()
    assert (code, is_more) == (0, "True")
    assert len({*counts.split()}) == 1


def interface():
    return os.environ.get("GLOO_SOCKET_IFNAME")


def test_ranks_of_tests_are_on_loopback_and_what_else_tests_start_is_not():
    assert (run_ranks(interface, 1), interface()) == (["lo"], None)


def test_a_group_that_is_there_is_adopted_and_left_alone():
    assert run_ranks(adopt, 2) == [(True, rank, True, False) for rank in (0, 1)]


def call_again():
    msrun.init(DATA)
    try:
        msrun.init({"accumulate": 3})
    except UsageError as refusal:
        return refusal.message
    return None


def test_another_configuration_is_refused():
    sentence = "msrun.init was called before with another configuration"
    assert run_ranks(call_again, 1) == [sentence]


def be_alone():
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]


def enter():
    be_alone()
    # Left in a shell by somebody else.
    os.environ.update(MASTER_ADDR="192.0.2.1", MASTER_PORT="1")
    seen = []
    for _ in range(2):
        with msrun.init() as rt:
            seen.append((rt.world_size, rt.is_main, dist.is_initialized()))
        seen.append(dist.is_initialized())
        rt.close()
    return seen


def test_the_end_of_a_block_is_the_end_of_the_group():
    assert run_ranks(enter, 1) == [[(1, True, True), False] * 2]


def meet():
    rank = dist.get_rank()
    be_alone()
    os.environ |= {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"}
    os.environ |= {"OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    try:
        msrun.init()
    except UsageError as refusal:
        return refusal.message, dist.is_initialized()
    return None


def test_ranks_that_cannot_meet_are_told_what_they_need():
    sentence = "Open MPI started 2 ranks, and MASTER_ADDR and MASTER_PORT are not set"
    assert run_ranks(meet, 2) == [(sentence, False)] * 2
