"""A second launcher of a node, beside the first or after it, from a session with other places."""

import signal

import pytest
from ports import free_port
from support import kill, shell, until

pytestmark = pytest.mark.process

# Each worker leaves its pid, and says if an earlier one of its rank still lives.
ALONE = """
    [ -e pid-$RANK ] && kill -0 "$(cat pid-$RANK)" && echo "two of rank $RANK"
    echo $$ > pid-$RANK
    echo "up $MSRUN_GENERATION"
    until [ -e go ]; do sleep 0.02; done
"""


@pytest.fixture
def launch(msrun, tmp_path):
    """Start a launcher of one node of a job of two, with places of its own."""
    (tmp_path / "secret").write_bytes(bytes(range(32)))
    (tmp_path / "secret").chmod(0o600)
    port = free_port()

    def start(node_rank, session, *words):
        place = tmp_path / f"session-{session}"
        place.mkdir(mode=0o700, exist_ok=True)
        own = ["--nnodes", 2, "--node-rank", node_rank, "--master-addr", "127.0.0.1"]
        own += ["--master-port", port, "--job-id", "two-lives", "--lease", "3s", "--grace", "1s"]
        own += ["--secret-file", tmp_path / "secret", "--tail", "none", *words, *shell(ALONE)]
        job = msrun(*own, env={"XDG_RUNTIME_DIR": str(place)})
        job.runtime = place
        return job

    return start


def text(job, rank):
    path = job.logs / f"worker_{rank}.log"
    return path.read_text() if path.exists() else ""


def go(first, *others):
    (first.folder / "go").touch()
    return [job.wait(60) for job in (first, *others)]


def test_a_second_launcher_is_refused_while_the_first_lives(launch):
    a, b = launch(0, "a"), launch(1, "b")
    until(lambda: "up 0" in text(b, 1), "for both nodes")
    second = launch(1, "c")

    assert second.wait(60) == 2
    assert "takes part in job two-lives already: another launcher of it runs there" in second.err
    assert not second.logs.joinpath("worker_1.log").exists()
    assert go(a, b) == [0, 0]
    assert text(a, 0) == "up 0\n"
    assert text(b, 1) == "up 0\n"


def test_a_scheduler_that_is_slow_to_answer_is_waited_for(launch):
    """What listens there may be another program or a busy scheduler, and both are said."""
    a = launch(0, "a")
    scheduler = a.find("msrun scheduler")
    a.until_begun()
    scheduler.suspend()
    b = launch(1, "b")
    b.until_said("does not answer as a scheduler does: it is overloaded or stopped, or another")
    scheduler.resume()
    until(lambda: "up 0" in text(b, 1), "for both nodes", seconds=60)

    assert go(a, b) == [0, 0]


def test_one_that_is_started_again_after_a_kill_takes_its_place(launch):
    a, b = launch(0, "a", "--max-restarts", 1), launch(1, "b", "--max-restarts", 1)
    until(lambda: "up 0" in text(b, 1), "for both nodes")
    b.process.kill()
    again = launch(1, "c", "--max-restarts", 1)
    until(lambda: "up 1" in text(again, 1), "for the second life", seconds=60)

    assert go(a, again) == [0, 0]
    assert "two of" not in text(again, 1)


def test_a_frozen_first_is_fenced_before_the_second_begins(launch):
    """A launcher that stands still cannot be asked; its reaper ends its workers in time."""
    a, b = launch(0, "a", "--max-restarts", 1), launch(1, "b", "--max-restarts", 1)
    until(lambda: "up 0" in text(b, 1), "for both nodes")
    workers = [each for each in b.members() if each.name() == "sh"]
    assert workers
    b.send(signal.SIGSTOP)
    again = launch(1, "c", "--max-restarts", 1)
    until(lambda: "up 1" in text(again, 1), "for the second life", seconds=60)

    assert not any(worker.is_running() for worker in workers)
    assert go(a, again) == [0, 0]
    assert "two of" not in text(again, 1)
    kill(*[each for each in b.members() if each.pid == b.pid])
    b.process.kill()
    b.wait()
