"""The code with which a launcher ends, and the words that explain it."""

import os
import socket
import sys
from pathlib import Path

import memory
import pytest
from support import script, shell, together

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("program", "code", "how"),
    [
        ("exit 3", 3, "exited with code 3"),
        ("exit 119", 119, "exited with code 119"),
        ("kill -KILL $$", 137, "was killed by SIGKILL"),
        ("kill -SEGV $$", 139, "was killed by SIGSEGV"),
        ("kill -ABRT $$", 134, "was killed by SIGABRT"),
    ],
)
@pytest.mark.few(3)
def test_a_failure_has_the_ranks_own_code_and_is_the_last_word(msrun, program, code, how):
    job = msrun(*shell(f"ulimit -c 0; {program}"))

    assert job.wait() == code
    assert job.block() == (
        f"error: rank 0 (node HOST, local_rank 0, pid N) {how} after Ns\n  log: LOGS/worker_0.log\n"
    )


def test_success_is_zero_and_one_line(msrun):
    job = msrun("--workers-per-node", 2, *together("echo done"))

    assert job.wait() == 0
    assert job.mask(job.err) == (
        "msrun: JOB: 2 workers on HOST, contained by CONTAINMENT; logs: LOGS\n"
        "msrun: running 2/2 after Ns\n"
        "msrun: 2/2 workers finished after Ns\n"
    )
    assert (job.log(0), job.log(1)) == ("done\n", "done\n")
    assert sorted(job.out.splitlines()) == ["[rank 0] done", "[rank 1] done"]


# Rank 1 fails when rank 3 is gone and the others are ready for the SIGTERM that follows.
ONE_OF_FOUR = """
    [ "$RANK" = 0 ] && trap 'exit 9' TERM
    echo $$ > "draft-$RANK"
    mv "draft-$RANK" "up-$RANK"
    [ "$RANK" = 3 ] && exit 0
    if [ "$RANK" = 1 ]; then
        until [ -e up-0 ] && [ -e up-2 ] && [ -e up-3 ]; do sleep 0.01; done
        while [ -e "/proc/$(cat up-3)" ]; do sleep 0.01; done
        for i in 1 2 3; do echo "line $i"; done
        printf 'last \\033[31mwords\\n' >&2
        exit 7
    fi
    while :; do sleep 0.01; done
"""


def test_the_first_failure_is_the_cause_and_later_ones_are_collateral(msrun):
    job = msrun("--workers-per-node", 4, *shell(ONE_OF_FOUR))

    assert job.wait() == 7
    assert job.block() == (
        "error: rank 1 (node HOST, local_rank 1, pid N) exited with code 7 after Ns\n"
        "  last 4 lines of its log:\n"
        "  | line 1\n  | line 2\n  | line 3\n"
        "  | last \\x1b[31mwords\n"
        "  log: LOGS/worker_1.log\n"
        "  rank 3 had finished with code 0\n"
        "collateral: rank 0 exited with code 9; rank 2 was killed by SIGTERM\n"
    )
    check_verdict(job)


def check_verdict(job):
    """The file says the same to a program."""
    verdict = job.verdict()
    root = verdict["root"]

    assert root.pop("pid") > 1
    assert 0 <= root.pop("age") < root.pop("ran_for") + 1
    assert job.mask(verdict.pop("reason")) == (
        "rank 1 (node HOST, local_rank 1, pid N) exited with code 7 after Ns"
    )
    assert verdict == {
        "job_id": job.name,
        "code": 7,
        "generation": 0,
        "restarts": 0,
        "hint": "",
        "root": {
            "rank": 1,
            "node_rank": 0,
            "host": os.uname().nodename,
            "local_rank": 1,
            "code": 7,
            "signum": None,
            "core": False,
            "oom": False,
            "stopped": False,
            "swept": False,
            "stalled": 0.0,
            "error": "",
            "tail": ["line 1", "line 2", "line 3", "last \\x1b[31mwords"],
            "log_file": str(job.logs / "worker_1.log"),
            "is_server": False,
        },
        "collateral": [
            {"how": "exited with code 9", "ranks": {"count": 1, "runs": [[0, 0]]}},
            {"how": "was killed by SIGTERM", "ranks": {"count": 1, "runs": [[2, 2]]}},
        ],
        "finished": {"count": 1, "runs": [[3, 3]]},
        "stuck": [],
        "insecure": False,
    }


def test_an_exception_that_came_first_is_the_cause_although_its_rank_ended_last(msrun, tmp_path):
    program = """
        import atexit, os, pathlib, signal, time

        def wait_for(name):
            while not pathlib.Path(name).exists():
                time.sleep(0.01)

        def end_slowly():
            pathlib.Path("raised").touch()
            wait_for("peer-is-gone")

        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("peer-is-gone").touch())
            atexit.register(end_slowly)
            raise ValueError("boom")
        wait_for("raised")
        raise ConnectionError("my peer is gone")
    """
    job = msrun("--workers-per-node", 2, "--start-method", "exec", script(tmp_path, program))

    assert job.wait() == 1
    assert "rank 1 (node HOST, local_rank 1, pid N) exited with code 1" in job.block()
    assert "\n  ValueError: boom\n" in job.block()
    assert job.block().endswith("collateral: rank 0 exited with code 1\n")


def test_an_exception_that_was_raised_from_another_is_named_with_that(msrun, tmp_path):
    program = """
        try:
            {}["missing"]
        except KeyError as error:
            raise RuntimeError("\\n    the stage failed:\\n    args: ()") from error
    """
    job = msrun("--start-method", "exec", script(tmp_path, program))

    assert job.wait() == 1
    assert "\n  RuntimeError: the stage failed, caused by KeyError: 'missing'\n" in job.block()


def test_a_program_that_is_missing_inside_the_worker_is_127_and_not_tried_again(msrun):
    job = msrun("--max-restarts", 3, *shell("exec no-such-program"))

    assert job.wait() == 127
    assert "it cannot be started, so it is not restarted" in job.err
    assert job.verdict()["restarts"] == 0


def test_a_program_that_cannot_be_executed_is_126_and_not_tried_again(msrun, tmp_path):
    """What runs when `msrun` looks and not any more when the worker starts."""
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF is not all it takes")
    program.chmod(0o755)
    job = msrun("--max-restarts", 3, "--no-python", program)

    assert job.wait() == 126
    assert job.verdict()["restarts"] == 0
    assert "Exec format error" in job.block()


def refused(job):
    """Return what the launcher said, having started nothing."""
    assert job.wait() == 2
    assert not job.logs.exists()
    assert not job.run_dir.exists()
    return job.mask(job.err)


def test_a_log_directory_that_is_a_file_is_refused(msrun, tmp_path):
    (tmp_path / "taken").touch()
    job = msrun("--log-dir", "taken", *shell("true"))

    assert refused(job) == "error: --log-dir taken is a file, not a directory\n"


@pytest.mark.parametrize("directory", ["/proc/x", "/sys/x", "/proc/self/fd/9/x"])
def test_a_log_directory_where_none_can_be_made_is_refused(msrun, directory):
    said = refused(msrun("--log-dir", directory, *shell("true")))

    assert said.startswith(f"error: --log-dir {directory}")
    assert "bug" not in said


def test_a_port_in_use_is_refused_and_its_holder_named(msrun):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        job = msrun("--master-port", port, *shell("true"))
        said = refused(job)

    name = Path("/proc/self/comm").read_text().strip()
    assert f"--master-port {port}: port {port} is in use by pid N ({name})" in said


def test_a_missing_script_is_refused(msrun):
    said = refused(msrun("missing.py"))

    assert said == "error: script 'missing.py' does not exist\n  hint: looked in FOLDER\n"


def test_a_command_that_may_not_be_executed_is_refused(msrun, tmp_path):
    (tmp_path / "program").write_text("#!/bin/sh\n")
    said = refused(msrun("--no-python", "./program"))

    assert said == "error: command './program' may not be executed by this user\n"


def test_a_rank_that_the_kernel_killed_for_memory_is_137_and_says_so(msrun):
    eat = "eaten = []\nwhile True: eaten.append(b'x' * (8 << 20))"
    with memory.limited() as group:
        job = msrun("--no-python", sys.executable, "-c", eat, wrapper=memory.entering(group))
        assert job.wait() == 137

    assert "was killed by SIGKILL (out of memory) after Ns" in job.block()
    assert job.verdict()["root"]["oom"] is True


def test_a_log_that_cannot_be_replaced_is_named(msrun, tmp_path):
    logs = tmp_path / "mine"
    (logs / "worker_0.log").mkdir(parents=True)
    job = msrun("--log-dir", logs, *shell("true"))

    assert job.wait() == 2
    assert job.err == (
        f"error: {logs}/worker_0.log of an earlier job cannot be replaced: Is a directory\n"
        "  hint: choose another --log-dir\n"
    )
