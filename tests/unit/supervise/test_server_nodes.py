"""What a parameter server knows of the nodes of its job."""

import pytest

from msrun import environ
from msrun.job import JobSpec, ProgramKind, WorkerProgram
from msrun.supervise.node_plan import servers_identity

PROGRAM = WorkerProgram(kind=ProgramKind.SCRIPT, target="train.py")
BESIDE = {"nnodes_min": 2, "nnodes_max": 2}
ALONE = {"nnodes_min": 1, "nnodes_max": 11, "world_size": 8}


@pytest.mark.parametrize(
    ("sizes", "nodes", "expected"),
    [
        ({}, 1, 1),
        (BESIDE, 2, 2),
        (ALONE, 11, 3),  # by hand, where each of 8 workers is a node, too
    ],
)
def test_a_server_knows_over_how_many_nodes_servers_are_divided(sizes, nodes, expected):
    job = JobSpec(
        job_id="job", program=PROGRAM, cwd="/", log_dir="/l", workers_per_node=1, servers=3, **sizes
    )
    worker = {"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": str(nodes)}

    env = environ.server_env(2, servers_identity(job, "/run/job"), worker, "error")

    assert environ.servers_place({**worker, **env}).nodes == expected
