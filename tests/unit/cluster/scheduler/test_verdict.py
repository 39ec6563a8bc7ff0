import pytest

from msrun.cluster.bounds import RankSet
from msrun.cluster.verdict import (
    ExitGroup,
    RankExit,
    Verdict,
    group_exits,
    internal,
    interrupted,
    render,
    render_seconds,
    root_cause,
)


def end(rank=0, **changes):
    given = {
        "node_rank": 0,
        "host": "node-1",
        "local_rank": rank,
        "pid": 100 + rank,
        "code": 1,
        "ran_for": 2.5,
        "log_file": f"logs/worker_{rank}.log",
    }
    return RankExit(rank=rank, **{**given, **changes})


def killed(rank=0, signum=9, **changes):
    return end(rank, code=None, signum=signum, **changes)


@pytest.mark.parametrize(
    ("exit_", "words", "code"),
    [
        (end(code=0), "exited with code 0", 0),
        (end(code=3), "exited with code 3", 3),
        (killed(), "was killed by SIGKILL", 137),
        (killed(oom=True), "was killed by SIGKILL (out of memory)", 137),
        (killed(signum=11, core=True), "was killed by SIGSEGV (core dumped)", 139),
        (killed(signum=40), "was killed by signal 40", 168),
        (end(code=None), "exited with code None", 70),
    ],
)
def test_how_a_rank_ended_and_what_a_shell_would_show(exit_, words, code):
    assert (exit_.how(), exit_.exit_code) == (words, code)


def test_only_code_0_is_a_success():
    ends = [end(code=0), end(code=1), end(code=None), killed()]

    assert [e.succeeded for e in ends] == [True, False, False, False]


def test_sentence_names_rank_node_pid_and_time():
    assert end(3, code=7, local_rank=1).sentence() == (
        "rank 3 (node node-1, local_rank 1, pid 103) exited with code 7 after 2.50s"
    )


OF_PEER = "msrun.errors.PeerRankError: the loss function raised ValueError on rank 1: x"


@pytest.mark.parametrize(
    ("exits", "rank"),
    [
        ([(end(0), 1.0), (end(1), 2.0)], 0),
        ([(end(0), 2.0), (end(1), 1.0)], 1),
        ([(end(0, code=0), 1.0), (end(1), 2.0)], 1),
        ([(end(1), 1.0), (end(0), 1.0)], 1),
        ([(end(0), 1.0), (killed(1), 1.05)], 1),
        ([(end(0), 1.0), (killed(1), 1.2)], 0),
        ([(end(0), 1.0), (killed(1, signum=15), 1.05)], 0),
        ([(end(0), 1.0), (killed(1, swept=True), 1.05)], 0),
        ([(end(0, error=OF_PEER), 1.0), (end(1, error="ValueError: x"), 2.0)], 1),
        ([(end(0, error=OF_PEER), 1.0), (killed(1, signum=15), 1.1)], 0),
    ],
    ids=[
        "first in time",
        "first in time is reported last",
        "success is no cause",
        "same time: first report",
        "SIGKILL has a head start",
        "SIGKILL too late",
        "SIGTERM has no head start",
        "our own SIGKILL has no head start",
        "who names another rank is not the cause",
        "unless nobody else says why",
    ],
)
def test_root_cause(exits, rank):
    assert root_cause(exits).rank == rank


@pytest.mark.parametrize("signum", [4, 7, 8, 9, 11])
def test_signals_that_no_lost_peer_causes_have_a_head_start(signum):
    assert root_cause([(end(0), 1.0), (killed(1, signum=signum), 1.05)]).rank == 1


def test_groups_are_ordered_by_size_then_words():
    exits = [end(5), killed(4), killed(2), end(1, code=0), end(0, code=2)]

    assert group_exits(exits) == [
        ExitGroup("was killed by SIGKILL", RankSet(2, [(2, 2), (4, 4)])),
        ExitGroup("exited with code 0", RankSet(1, [(1, 1)])),
        ExitGroup("exited with code 1", RankSet(1, [(5, 5)])),
        ExitGroup("exited with code 2", RankSet(1, [(0, 0)])),
    ]


def test_a_failure_is_rendered_with_everything_that_is_known():
    root = end(2, code=1, error="ValueError: bad shape", tail=["step 1", "step 2"])
    verdict = Verdict(
        job_id="train",
        code=1,
        reason=root.sentence(),
        generation=1,
        restarts=1,
        hint="correct the cause",
        root=root,
        collateral=[
            ExitGroup("was killed by SIGTERM", RankSet.of([0, 1, 5])),
            ExitGroup("exited with code 1", RankSet.of([3, 4])),
            ExitGroup("was killed by SIGABRT", RankSet.of([6])),
            ExitGroup("exited with code 2", RankSet.of([7])),
        ],
        finished=RankSet.of([8, 9]),
        stuck=["4711 D python"],
    )

    collateral = [
        "ranks 0-1,5 were killed by SIGTERM",
        "ranks 3-4 exited with code 1",
        "rank 6 was killed by SIGABRT",
        "rank 7 exited with code 2",
    ]
    assert render(verdict).splitlines() == [
        "error: rank 2 (node node-1, local_rank 2, pid 102) exited with code 1 after 2.50s",
        "  ValueError: bad shape",
        "  last 2 lines of its log:",
        "  | step 1",
        "  | step 2",
        "  log: logs/worker_2.log",
        "  ranks 8-9 had finished with code 0",
        "  could not be killed: 4711 D python",
        "  hint: correct the cause",
        "collateral: " + "; ".join(collateral),
    ]


def test_a_failure_without_exception_and_output_is_rendered_with_its_log():
    verdict = Verdict(
        job_id="train", code=1, reason="rank 0 failed", generation=0, restarts=0, root=end()
    )

    assert render(verdict) == "error: rank 0 failed\n  log: logs/worker_0.log"


def test_an_interrupted_job():
    verdict = interrupted("train", 2, generation=1, restarts=1)

    assert verdict == Verdict(
        job_id="train", code=130, reason="stopped by SIGINT", generation=1, restarts=1
    )
    assert render(verdict) == "error: stopped by SIGINT"


@pytest.mark.parametrize(("generation", "code", "expected"), [(2, 121, (121, 2)), (-1, 0, (70, 0))])
def test_a_job_that_one_of_our_processes_failed(generation, code, expected):
    verdict = internal("train", "the scheduler ended", generation=generation, code=code)

    assert (verdict.code, verdict.restarts) == expected


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0.00s"), (9.5, "9.50s"), (10.0, "10s"), (3600.4, "3600s")]
)
def test_seconds(seconds, text):
    assert render_seconds(seconds) == text
