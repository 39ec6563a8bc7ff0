"""Standard output and standard error of workers: on the console, in files, as under torchrun."""

from __future__ import annotations

import os
import re

import pytest
from ports import free_port
from support import script, shell

pytestmark = pytest.mark.process

BOTH = """
    import os, subprocess, sys

    rank = os.environ["RANK"]
    for i in range(20):
        print("out", rank, i)
        print("err", rank, i, file=sys.stderr)
    os.write(2, f"raw err {rank}\\n".encode())
    print("then out", rank)
    subprocess.run(["sh", "-c", "echo child out $RANK; echo child err $RANK >&2"])
    print("then err", rank, file=sys.stderr)
    print("last out", rank)
    os.write(2, f"last err {rank}\\n".encode())
"""


def lines(stream, rank):
    """Return what `BOTH` writes to a stream, in order."""
    counted = [f"{stream} {rank} {i}" for i in range(20)]
    raw = {"err": [f"raw err {rank}"], "out": [f"then out {rank}"]}[stream]
    then = [f"then err {rank}"] if stream == "err" else []
    return [*counted, *raw, f"child {stream} {rank}", *then, f"last {stream} {rank}"]


def by_rank(text, prefix=r"\[rank (\d)\] "):
    """Return the lines of each rank on a console, in order."""
    found = {}
    for line in text.splitlines():
        if match := re.match(prefix, line):
            found.setdefault(int(match[1]), []).append(line[match.end() :])
    return found


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_each_stream_of_each_rank_stays_what_it_is(msrun, tmp_path, method):
    program = script(tmp_path, BOTH)
    job = msrun("--workers-per-node", 3, "--start-method", method, program)

    assert job.wait() == 0
    assert by_rank(job.out) == {rank: lines("out", rank) for rank in range(3)}
    assert by_rank(job.err) == {rank: lines("err", rank) for rank in range(3)}


OPENED = """
    import subprocess, sys
    look = "import os; print(*sorted(map(int, os.listdir('/proc/self/fd'))))"
    subprocess.run([sys.executable, "-c", look], close_fds=False)
"""


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_programs_that_a_worker_starts_inherit_the_standard_streams_alone(msrun, tmp_path, method):
    job = msrun("--start-method", method, script(tmp_path, OPENED))

    assert job.wait() == 0
    assert job.log(0) == "0 1 2 3\n"  # the last is that of the look


def test_torchrun_keeps_the_streams_of_the_same_program_apart(msrun, tmp_path, torchrun):
    """Their lines are equal, but for the rank in front; only torchrun's own words are left out."""
    program = script(tmp_path, BOTH)
    job = msrun(program)
    theirs = torchrun("--nproc-per-node=1", program)

    assert (job.wait(), theirs.returncode) == (0, 0)
    assert by_rank(job.out)[0] == theirs.stdout.splitlines()
    assert set(by_rank(job.err)[0]) <= set(theirs.stderr.splitlines())


def test_the_log_has_both_streams_in_the_order_in_which_they_were_written(msrun):
    program = "for i in 1 2 3; do echo out $i; echo err $i >&2; done"
    job = msrun(*shell(program))

    assert job.wait() == 0
    expected = [f"{stream} {i}" for i in (1, 2, 3) for stream in ("out", "err")]
    assert job.log().splitlines() == expected
    shown = [*by_rank(job.out)[0], *by_rank(job.err)[0]]
    assert sorted(shown) == sorted(expected)


def test_both_streams_to_one_place_are_in_the_order_in_which_they_were_written(msrun, tmp_path):
    with (tmp_path / "both").open("ab") as both:
        job = msrun("--workers-per-node", 2, script(tmp_path, BOTH), stdout=both, stderr=both)
        assert job.wait() == 0

    for rank, shown in by_rank((tmp_path / "both").read_text()).items():
        assert shown == job.log(rank).splitlines()


TWO_EACH = "echo out $RANK; echo out $RANK; echo err $RANK >&2; echo err $RANK >&2"


@pytest.mark.parametrize(
    ("words", "own", "out", "err"),
    [
        ("-r 3", {0: "oe", 1: "oe"}, [], []),
        ("-r 1", {0: "o", 1: "o"}, [], [0, 1]),
        ("--redirects 0:2,1:1", {0: "e", 1: "o"}, [0], [1]),
        ("--redirects 3 --tee 0:3,1:1", {0: "oe", 1: "oe"}, [0, 1], [0]),
        ("--redirects 3 --tail 1", {0: "oe", 1: "oe"}, [1], [1]),
        ("--tee 3", {}, [0, 1], [0, 1]),
        ("--tee 1", {0: "o", 1: "o"}, [0, 1], []),
        ("-t 0:1,1:2", {0: "o", 1: "e"}, [0], [1]),
        ("-t 0:3", {}, [0], [0]),
        ("-t 0", {}, [0, 1], [0, 1]),
    ],
)
@pytest.mark.few(4)
def test_streams_and_ranks_are_chosen(msrun, words, own, out, err):
    """Each stream is in one file only, and on the console where it was chosen."""
    job = msrun("--workers-per-node", 2, *words.split(), *shell(TWO_EACH))

    assert job.wait() == 0
    assert by_rank(job.out) == {rank: [f"out {rank}"] * 2 for rank in out}
    assert by_rank(job.err) == {rank: [f"err {rank}"] * 2 for rank in err}
    for rank in (0, 1):
        files = {name: job.logs / f"worker_{rank}.{name}" for name in ("out", "err")}
        kept = job.log(rank).splitlines()
        for name, path in files.items():
            is_own = name[0] in own.get(rank, "")
            assert path.exists() == is_own
            assert (path.read_text() if is_own else "").split() == [name, str(rank)] * 2 * is_own
            kept = [line for line in kept if is_own or not line.startswith(name)]
        assert kept == []


@pytest.mark.parametrize(
    "words",
    [
        *(pytest.param(words, marks=pytest.mark.slow) for words in ("-r 3", "-r 0:1 -t 0:1")),
        *("-t 1", "-r 3 -t 0:2,1:2"),
    ],
)
def test_torchrun_shows_the_same_streams(msrun, torchrun, words, tmp_path):
    prefix = r"\[default(\d)\]:"
    job = msrun("--workers-per-node", 2, *words.split(), *shell(TWO_EACH))
    theirs = torchrun(
        *("--nproc-per-node=2", "--log-dir", tmp_path / "theirs", *words.split()), *shell(TWO_EACH)
    )

    assert (job.wait(), theirs.returncode) == (0, 0)
    assert by_rank(job.out) == by_rank(theirs.stdout, prefix)
    for rank, shown in by_rank(theirs.stderr, prefix).items():
        assert by_rank(job.err)[rank] == shown


def test_a_restart_goes_on_in_the_files_of_the_streams(msrun):
    program = TWO_EACH + '; [ "$MSRUN_GENERATION" = 1 ]'
    job = msrun("--max-restarts", 1, "-r", 3, "-t", 3, *shell(program))

    assert job.wait() == 0
    for name, shown in (("out", job.out), ("err", job.err)):
        text = (job.logs / f"worker_0.{name}").read_text()
        marked = [f"{name} 0"] * 2 + ["[msrun] generation 1 starts here"] + [f"{name} 0"] * 2
        assert text.splitlines() == marked
        assert by_rank(shown)[0].count(f"{name} 0") == 4


def test_a_restart_keeps_the_streams_apart(msrun, tmp_path):
    program = """
        import os, sys
        for i in range(5):
            print("out", i)
            print("err", i, file=sys.stderr)
        sys.exit(os.environ["MSRUN_GENERATION"] == "0")
    """
    job = msrun("--max-restarts", 1, script(tmp_path, program))

    assert job.wait() == 0
    heading = "[msrun] generation 1 starts here"
    outs, errs = ([f"{stream} {i}" for i in range(5)] for stream in ("out", "err"))
    assert by_rank(job.out)[0] == [*outs, heading, *outs]
    assert by_rank(job.err)[0] == [*errs, *errs]


def test_the_verdict_quotes_the_stderr_where_it_has_a_file_of_its_own(msrun):
    job = msrun("-r", 3, *shell("echo fine; echo broken >&2; exit 3"))

    assert job.wait() == 3
    assert "  | broken\n  log: LOGS/worker_0.err\n" in job.block()


def test_files_of_an_earlier_job_are_replaced(msrun, tmp_path):
    for text in ("first", "second"):
        words = ("--job-id", "train", "--log-dir", tmp_path / "logs", "-r", 1)
        assert msrun(*words, *shell(f"echo {text}")).wait() == 0

    assert (tmp_path / "logs" / "worker_0.out").read_text() == "second\n"


def test_a_closed_reader_of_one_stream_leaves_the_other_alone(msrun, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    job = msrun(script(tmp_path, BOTH), stdout=writing)
    os.close(writing)

    assert job.wait() == 0
    assert by_rank(job.err)[0] == lines("err", 0)


def test_a_local_rank_that_does_not_exist_is_refused(msrun):
    job = msrun("--workers-per-node", 2, "-r", "0:1,2:3", *shell("true"))

    assert job.wait() == 2
    assert job.err == ("error: -r 0:1,2:3 names rank 2, which does not exist (choose 0 to 1)\n")


def test_the_consoles_of_several_nodes_show_the_workers_of_each(msrun, tmp_path):
    program = script(tmp_path, BOTH)
    words = ["--nnodes", 2, "--master-addr", "localhost", "--master-port", free_port()]
    words += ["--workers-per-node", 2, "--insecure", program]
    nodes = [msrun("--job-id", "two", "--node-rank", rank, *words) for rank in (0, 1)]

    assert [node.wait() for node in nodes] == [0, 0]
    for node, ranks in zip(nodes, ((0, 1), (2, 3)), strict=True):
        assert by_rank(node.out) == {rank: lines("out", rank) for rank in ranks}
        assert by_rank(node.err) == {rank: lines("err", rank) for rank in ranks}
