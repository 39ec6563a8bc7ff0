"""`--master-port P` beside torchrun: the workers' MASTER_PORT, where a store answers."""

from __future__ import annotations

import socket

import pytest
from ports import free_port
from support import script

pytestmark = [pytest.mark.torch, pytest.mark.process]

MEETS = """
    import os, sys
    import torch, torch.distributed as dist
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=size)
    total = torch.ones(1)
    dist.all_reduce(total)
    with open(f"said-{rank}", "w") as file:
        file.write(f"{total.item():g} {os.environ['MASTER_PORT']}")
    dist.destroy_process_group()
"""
FIXED, HERE = "tcp://localhost:PORT", "env://"
# The line before the script, what it gives init_process_group, and whether MASTER_PORT is PORT.
LINES = {
    ("--nproc-per-node=2 --master-port=PORT", FIXED): True,
    ("--nproc-per-node=2 --master-addr=127.0.0.1 --master_port PORT", HERE): True,
    ("--nnodes=1 --nproc-per-node=2 --rdzv-endpoint=localhost:PORT", FIXED): True,
    ("--rdzv-backend=c10d --rdzv-endpoint=localhost:PORT --nproc-per-node=2", HERE): False,
    ("--standalone --nproc-per-node=2", HERE): False,
}


def with_port(text, port):
    return text.replace("PORT", str(port))


@pytest.mark.parametrize(
    ("line", "method"),
    [pytest.param(*pair, marks=[pytest.mark.slow] * ("--rdzv" in pair[0])) for pair in LINES],
)
@pytest.mark.few(2)
def test_workers_meet_at_the_port_that_was_given(launch, tmp_path, line, method):
    program = script(tmp_path, MEETS)
    for command in ("msrun", "torchrun"):
        port = free_port()
        words = [*with_port(line, port).split(), program, with_port(method, port)]
        side = launch(command, words)

        assert side.wait() == 0
        said = [text.split() for text in side.written()]
        assert [total for total, _ in said] == ["2", "2"]
        assert {found == str(port) for _, found in said} == {LINES[line, method]}


def test_two_nodes_of_one_machine_meet_at_the_port(launch, tmp_path):
    program = script(tmp_path, MEETS)
    for command in ("msrun", "torchrun"):
        port = free_port()
        line = f"--nnodes=2 --master-addr=127.0.0.1 --master-port={port}"
        rest = [program, with_port(FIXED, port)]
        nodes = [
            launch(command, [*line.split(), f"--node-rank={rank}", *rest], folder=command)
            for rank in (0, 1)
        ]

        assert [node.wait() for node in nodes] == [0, 0]
        assert [text.split()[0] for text in nodes[0].written()] == ["2", "2"]


@pytest.mark.parametrize("nodes", ["", "--nnodes=2 --node-rank=0 --master-addr=localhost"])
def test_a_port_in_use_is_one_sentence(launch, tmp_path, nodes):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        side = launch("msrun", [*nodes.split(), f"--master-port={port}", script(tmp_path, MEETS)])

        assert side.wait() == 2
    errors = [line for line in side.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert f"port {port}" in errors[0]
    assert "Traceback" not in side.err
