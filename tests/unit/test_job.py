import math

import pytest

from msrun.errors import UsageError
from msrun.job import JobSpec, ProgramKind, WorkerProgram


def job(**changes):
    given = {
        "job_id": "train-1",
        "program": WorkerProgram(kind=ProgramKind.SCRIPT, target="train.py"),
        "workers_per_node": 2,
        "cwd": "/home/u",
        "log_dir": "/home/u/logs",
    }
    return JobSpec(**{**given, **changes})


def test_the_least_that_a_job_needs():
    assert job().nnodes_max == 1


@pytest.mark.parametrize(
    ("changes", "is_alone", "is_elastic"),
    [
        ({}, True, False),
        ({"world_size": 2}, True, False),
        ({"nnodes_min": 3, "nnodes_max": 3}, False, False),
        ({"nnodes_max": 3}, False, True),
        ({"nnodes_max": 6, "world_size": 6}, False, False),
    ],
)
def test_nodes_of_a_job(changes, is_alone, is_elastic):
    assert (job(**changes).is_alone, job(**changes).is_elastic) == (is_alone, is_elastic)


@pytest.mark.parametrize(
    ("tail", "tail_local", "at_terminal", "in_a_pipe"),
    [
        (None, None, [0], [0, 1, 2, 3]),
        ({1, 2}, None, [1, 2], [1, 2]),
        (set(), None, [], []),
        (None, {0, 1}, [0, 1, 2, 3], [0, 1, 2, 3]),
        (None, {1}, [1, 3], [1, 3]),
        ({1, 2}, {1}, [1], [1]),
    ],
)
def test_ranks_on_the_console_of_nodes_with_two_workers(tail, tail_local, at_terminal, in_a_pipe):
    asked = job(
        tail=None if tail is None else frozenset(tail),
        tail_local=None if tail_local is None else frozenset(tail_local),
    )

    for is_terminal, expected in ((True, at_terminal), (False, in_a_pipe)):
        shown = [r for r in range(4) if asked.is_shown(r, r % 2, is_terminal=is_terminal)]
        assert shown == expected


@pytest.mark.parametrize(("nodes", "in_a_pipe"), [(8, [0, 1, 15]), (9, [0])])
def test_a_pipe_shows_every_rank_of_up_to_16_workers(nodes, in_a_pipe):
    large = job(nnodes_max=nodes, nnodes_min=nodes, master_addr="node0", master_port=1)

    shown = [r for r in (0, 1, 15) if large.is_shown(r, r % 2, is_terminal=False)]
    assert shown == in_a_pipe


@pytest.mark.parametrize("job_id", ["a", "0-_.x", "a" * 64])
def test_job_ids(job_id):
    assert job(job_id=job_id).job_id == job_id


@pytest.mark.parametrize("timeout", [0.001, math.inf])
def test_join_timeouts(timeout):
    assert job(join_timeout=timeout).join_timeout == timeout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"job_id": ""}, "--job-id '' must be 1 to 64 letters, digits, '_', '.' or '-'"),
        ({"job_id": "-a"}, "--job-id '-a' must be 1 to 64 letters, digits, '_', '.' or '-'"),
        ({"job_id": "a/b"}, "--job-id 'a/b' must be 1 to 64 letters, digits, '_', '.' or '-'"),
        ({"workers_per_node": 0}, "--workers-per-node 0 must be at least 1"),
        ({"nnodes_min": 0}, "--nnodes 0:1 must be MIN:MAX with 1 <= MIN <= MAX"),
        ({"nnodes_min": 2}, "--nnodes 2:1 must be MIN:MAX with 1 <= MIN <= MAX"),
        ({"world_size": 1}, "--worker-num 1 is fewer than --workers-per-node 2"),
        ({"last_call": -1.0}, "--last-call -1s must be at least 0s"),
        ({"last_call": math.nan}, "--last-call nans must be at least 0s"),
        ({"master_port": 65536}, "--master-port 65536 is outside 0 to 65535"),
        ({"master_port": -1}, "--master-port -1 is outside 0 to 65535"),
        ({"join_timeout": 0.0}, "--join-timeout 0s must be above zero"),
        ({"join_timeout": math.nan}, "--join-timeout nans must be above zero"),
        ({"grace": -1.0}, "--grace -1s must be at least 0s"),
    ],
)
def test_what_no_later_stage_could_do(changes, message):
    with pytest.raises(UsageError) as caught:
        job(**changes)

    assert caught.value.message == message
