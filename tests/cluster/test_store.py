"""Workers of several nodes meet at the store of the node of rank 0."""

import json
import subprocess
import sys

import pytest
from support import script

pytestmark = pytest.mark.process

MEET = """
    import json, os, sys
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    patience = timedelta(seconds=60)
    own = dist.TCPStore(host, port, size, is_master=False, timeout=patience)
    dist.init_process_group("gloo", init_method=sys.argv[1].format(host, port), rank=rank,
        world_size=size, timeout=patience)
    if os.environ["MSRUN_GENERATION"] == "0":
        own.set("of generation 0", "")
        dist.barrier()
        if "restart" in sys.argv and rank == size - 1:
            sys.exit(3)
    groups = [dist.new_group([n, size - 1]) for n in range(size - 1)]
    dist.monitored_barrier(timeout=patience)
    own.clone().set(f"large {rank}", bytes([rank]) * (8 << 20))
    neighbour = own.get(f"large {(rank + 1) % size}")
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    said = [total.item(), len(neighbour), neighbour[0], own.check(["of generation 0"])]
    print(json.dumps([*said, host, os.environ["MSRUN_RANK0_ADDR"]]), flush=True)
    dist.destroy_process_group()
"""


def said(nodes, size, each=1):
    """Return what each rank has said last, after all have ended well."""
    assert [node.wait(90) for node in nodes] == [0] * len(nodes)
    logs = [nodes[rank // each].log(rank) for rank in range(size)]
    return [json.loads(log.splitlines()[-1]) for log in logs]


def expected(size, address, *, first=True):
    total, large = float(sum(range(size))), 8 << 20
    here = "127.0.0.1", address
    return [[total, large, (rank + 1) % size, first, *here] for rank in range(size)]


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["env://", "tcp://{}:{}"])
def test_three_nodes_meet(lab, form, method):
    nodes = form(lab.hosts, "--workers-per-node", 2, script(lab.folder, MEET), method)

    assert said(nodes, 6, 2) == expected(6, lab.host("a").ipv4)


@pytest.mark.parametrize("method", ["tcp://localhost:{}", "env://"])
def test_the_port_that_was_given_is_that_of_the_store_on_every_node(new_lab, form, method):
    """The nodes have loopback interfaces of their own, and the scheduler the port of the first."""
    lab = new_lab("a", "b")
    port = 29_711
    program = script(lab.folder, MEET)
    nodes = form(lab.hosts, "--master-port", port, program, method.format(port))

    assert said(nodes, 2) == expected(2, lab.host("a").ipv4)
    for node in nodes:
        assert "MASTER_PORT=" not in node.err


HOLDS = """
    import socket, subprocess, sys
    with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
        print("holding", flush=True)
        sys.stdin.read()
"""


def test_a_node_where_another_program_has_the_port_meets_the_others(new_lab, form):
    lab = new_lab("a", "b")
    port = 29_711
    holder = [sys.executable, script(lab.folder, HOLDS, "holds.py"), str(port)]
    held = lab.host("b").popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert held.stdout.readline() == "holding\n"
    nodes = form(lab.hosts, "--master-port", port, script(lab.folder, MEET), "env://")

    assert said(nodes, 2) == expected(2, lab.host("a").ipv4)
    assert "the workers of this node have MASTER_PORT=" in nodes[1].err
    held.communicate()


def test_nodes_of_ipv6_meet(new_lab, form):
    lab = new_lab("a", "b", families=[6])
    nodes = form(lab.hosts, script(lab.folder, MEET), "env://")

    assert said(nodes, 2) == expected(2, lab.host("a").ipv6)


def test_a_store_that_begins_with_its_first_client_serves_other_nodes_too(new_lab, form):
    lab = new_lab("a", "b")
    program = script(lab.folder, MEET)
    nodes = form(lab.hosts, "--no-python", sys.executable, program, "env://")

    assert said(nodes, 2) == expected(2, lab.host("a").ipv4)


def test_a_restart_meets_at_a_new_store(new_lab, form):
    lab = new_lab("a", "b")
    program = script(lab.folder, MEET)
    nodes = form(lab.hosts, "--max-restarts", 1, program, "env://", "restart")

    assert said(nodes, 2) == expected(2, lab.host("a").ipv4, first=False)
    assert nodes[0].verdict()["restarts"] == 1
