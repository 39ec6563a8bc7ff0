"""Parameter servers are processes of the job: they outlive its workers, and nothing outlives it."""

import json
import signal
import subprocess
import sys

import pytest
from served import TRAIN
from support import PATIENCE, environment, kill, script, until

pytestmark = [pytest.mark.process, pytest.mark.torch]


@pytest.fixture
def train(msrun, tmp_path):
    """Start a job of two workers with a table on two servers, and wait until it has begun."""
    (tmp_path / "servers.yaml").write_text("servers: {params: ['0.weight']}")

    def start(*words):
        program = script(tmp_path, TRAIN)
        sizes = ("--worker-num", 2, "--server-num", 2, "--parallel", "servers.yaml")
        job = msrun(*sizes, *words, program)
        job.until_logged("at go1", 0, 1)
        return job

    return start


def status(job):
    words = [sys.executable, "-m", "msrun", "status", job.name, "--json"]
    env = environment(job.runtime)
    return json.loads(subprocess.run(words, env=env, capture_output=True, check=True).stdout)


def servers(job):
    """Return (pid, restarts) of both servers, when both run."""
    rows = until(lambda: every_pid(status(job)["servers"]), "for both servers", pause=0.1)
    return [(row["pid"], row["restarts"]) for row in rows]


def every_pid(rows):
    return rows if len(rows) == 2 and all(row["pid"] for row in rows) else None


def test_a_killed_server_comes_back_alone_and_outlives_a_killed_worker(train, tmp_path):
    job = train("--max-restarts", 2)
    before = servers(job)
    kill(job.find("msrun server 1"))
    job.until_said("warning: server 1 (node ")
    (tmp_path / "go1").touch()
    job.until_logged("at go3", 0, 1)
    between = servers(job)
    worker = status(job)["ranks"][1]["pid"]
    kill(next(member for member in job.members() if member.pid == worker))

    assert job.wait() == 0
    assert "equal" in job.log(0)
    assert between[0] == before[0]
    assert between[1][0] != before[1][0]
    assert [restarts for _, restarts in between] == [0, 1]
    assert job.verdict()["restarts"] == 1
    assert "[msrun] server 1 starts again, restart 1\n" in (job.logs / "server_1.log").read_text()


def test_a_server_that_is_not_started_again_is_the_root_cause(train):
    job = train()
    kill(job.find("msrun server 1"))

    assert job.wait() == 137
    assert "error: server 1 (node HOST, pid N) was killed by SIGKILL after Ns" in job.block()
    root = job.verdict()["root"]
    assert (root["is_server"], root["rank"]) == (True, 1)
    assert root["log_file"] == str(job.logs / "server_1.log")


def test_a_killed_launcher_leaves_no_server(train):
    job = train()
    assert job.find("msrun server 0")
    job.send(signal.SIGKILL)

    assert job.wait() == 137
    until(lambda: not job.leftovers(), "for the reaper", seconds=PATIENCE)


def test_a_server_that_cannot_keep_snapshots_is_the_root_cause(msrun, tmp_path):
    config = "servers: {params: ['0.weight'], snapshot: {dir: /dev/null/no}}"
    (tmp_path / "servers.yaml").write_text(config)
    words = ("--worker-num", 1, "--server-num", 1, "--parallel", "servers.yaml")

    job = msrun(*words, script(tmp_path, TRAIN))

    assert job.wait() == 1
    assert "error: server 0 (node HOST, pid N) exited with code 1 after Ns" in job.block()
    assert "/dev/null/no" in job.verdict()["root"]["error"]
