"""`msrun.init` in ranks that Open MPI started, with a backend and a timeout that were asked for."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import msrun

pytestmark = pytest.mark.torch

TURNS = 5


@pytest.fixture
def meeting(monkeypatch):
    """Serve a store for ranks to meet at, on a free port that they read."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("FREE_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return store


def become_a_rank_of_open_mpi():
    """Leave the group of the harness, and take the variables of another starter."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": os.environ["FREE_PORT"],
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
    }


def joined(options):
    """Return who this rank is, a sum over all, the backend, and the limits that it was given."""
    become_a_rank_of_open_mpi()
    limits = []

    def make(store, rank, size, timeout):
        limits.append(timeout)
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    dist.Backend.register_backend("own", make, devices=["cpu"])
    with msrun.init(**options) as rt:
        total = torch.ones(1)
        dist.all_reduce(total)
        place = (rt.rank, rt.world_size, rt.local_rank, rt.local_world_size, rt.node_rank)
        return place, total.item(), dist.get_backend(), limits[:1]


@pytest.mark.usefixtures("meeting")
def test_ranks_of_open_mpi_join():
    found = run_ranks(joined, 2, {})

    assert found == [((rank, 2, rank, 2, None), 2.0, "gloo", []) for rank in (0, 1)]


@pytest.mark.usefixtures("meeting")
def test_backend_and_timeout_are_those_asked_for():
    found = run_ranks(joined, 2, {"backend": "own", "timeout": 7.5})

    limit = timedelta(seconds=7.5)
    assert found == [((rank, 2, rank, 2, None), 2.0, "own", [limit]) for rank in (0, 1)]


def in_a_hurry(folder):
    """Return whether a peer was through `init` while this rank was still on its way."""
    become_a_rank_of_open_mpi()
    overtaken = []

    def make(store, rank, size, timeout):
        group = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        if rank == 0:
            overtaken.append(appears(folder / "through"))
        return group

    dist.Backend.register_backend("own", make, devices=["cpu"])
    with msrun.init(backend="own") as rt:
        (folder / "through").touch()
    return rt.rank, overtaken


def appears(path):
    """Return whether a file appears while somebody who has nothing to wait for would make it."""
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline and not path.exists():
        os.sched_yield()
    return path.exists()


@pytest.mark.usefixtures("meeting")
def test_nobody_leaves_while_a_peer_still_joins(tmp_path):
    assert run_ranks(in_a_hurry, 2, tmp_path) == [(0, [False]), (1, [])]


def turns(folder):
    """Have one rank after the other leave a file that the other finds behind the barrier."""
    rt = msrun.init()
    found = []
    for turn in range(TURNS):
        path = folder / str(turn)
        if rt.rank == turn % 2:
            path.touch()
        rt.barrier()
        found.append(path.exists())
    return found


def test_nobody_passes_a_barrier_before_all_are_there(tmp_path):
    assert run_ranks(turns, 2, tmp_path) == 2 * [TURNS * [True]]


def on_node(number):
    os.environ["GROUP_RANK"] = number
    return msrun.init().node_rank


@pytest.mark.parametrize(("number", "node_rank"), [("3", 3), ("0", 0)])
def test_node_rank_is_that_of_the_starter(number, node_rank):
    assert run_ranks(on_node, 1, number) == [node_rank]
