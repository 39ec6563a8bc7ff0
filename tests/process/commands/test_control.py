"""Real jobs that are looked into, signalled, drained and stopped from outside."""

import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys

import psutil
import pytest
from support import environment, kill, script, shell, until

from msrun.cluster.wire import codec, control_messages
from msrun.cluster.wire.control_messages import GetRanks, GetStatus, Question, SignalJob
from msrun.cluster.wire.messages import Drained, Envelope
from msrun.processes import control_file
from msrun.processes.control_client import ControlClient
from msrun.transport.loop import new_context
from msrun.transport.sockets import ControlSocket, endpoint

pytestmark = pytest.mark.process

IDLE = "echo up; exec sleep 600"
PLACES = """
    import os, time
    def inside():
        print("up"); time.sleep(600)  # in one line, which is where they are seen
    def waiting():
        inside()
    def elsewhere():
        print("up"); time.sleep(600)
    waiting() if os.environ["RANK"] != "1" else elsewhere()
"""


@pytest.fixture
def verb(runtime, tmp_path):
    """Run a verb beside the jobs of a test; return its code, stdout and stderr."""

    def call(*words):
        done = subprocess.run(
            [sys.executable, "-m", "msrun", *map(str, words)],
            cwd=tmp_path,
            env=environment(runtime),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        print(
            f"== msrun {' '.join(map(str, words))}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done.returncode, done.stdout, done.stderr

    return call


@pytest.fixture
def card(runtime, monkeypatch):
    """Return what lies on this machine for those who control its one job."""

    def read():
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        (found,) = (card for card in control_file.jobs() if card.job_id.startswith("test-"))
        return found

    return read


def test_a_job_tells_where_it_stands(msrun, verb):
    job = msrun("--workers-per-node", 2, "--max-restarts", 3, *shell(IDLE))
    job.until_said("msrun: running 2/2")

    code, out, _ = verb("status", job.name, "--json")

    found = json.loads(out)
    pids = {p.pid for p in job.find("msrun forksrv").children() if "store" not in p.name()}
    assert code == 0
    assert (found["job_id"], found["phase"], found["generation"]) == (job.name, "running", 0)
    assert (found["world_size"], found["failures"], found["max_restarts"]) == (2, 0, 3)
    assert [(row["role"], row["ranks"], row["scheduler"]) for row in found["nodes"]] == [
        ("serving", [0, 2], True)
    ]
    assert [(row["rank"], row["state"]) for row in found["ranks"]] == [
        (0, "running"),
        (1, "running"),
    ]
    assert {row["pid"] for row in found["ranks"]} <= pids
    assert verb("stop", job.name)[0] == 0
    assert job.wait() == 143


def test_what_ended_earlier_generations_is_told(msrun, verb):
    program = '[ "$MSRUN_GENERATION" = 0 ] && exit 5; echo up; exec sleep 600'
    job = msrun("--max-restarts", 1, *shell(program))
    job.until_logged("up")

    found = json.loads(verb("status", "--json")[1])

    assert (found["generation"], found["failures"]) == (1, 1)
    (cause,) = found["causes"]
    assert cause.startswith("generation 0: rank 0 (node ")
    assert "exited with code 5" in cause
    kill(job.find("msrun scheduler"))
    job.until_said("it is started again")
    assert json.loads(verb("status", "--json")[1])["causes"] == [cause]
    verb("stop")
    assert job.wait() == 143


def test_jobs_of_a_user_are_listed(msrun, verb):
    jobs = [msrun(*shell(IDLE)) for _ in range(2)]
    for job in jobs:
        job.until_logged("up")

    found = json.loads(verb("ls", "--json")[1])["jobs"]

    assert {row["job_id"] for row in found} >= {job.name for job in jobs}
    assert {row["pid"] for row in found} >= {job.pid for job in jobs}
    code, _, err = verb("stop")
    assert code == 2
    assert "jobs run on this machine" in err
    for job in jobs:
        verb("stop", job.name)
        assert job.wait() == 143


def test_a_stop_lets_workers_end_their_own_way(msrun, verb):
    program = "trap 'echo saved; exit 0' TERM; echo up; sleep 600 & wait"
    job = msrun("--grace", "10m", *shell(program))
    job.until_logged("up")

    assert verb("stop")[0] == 0

    assert job.wait() == 143
    assert job.log() == "up\nsaved\n"
    assert job.block() == "error: stopped by `msrun stop`\n"
    assert job.verdict()["code"] == 143


DEAF = "trap '' TERM; echo up; while :; do sleep 0.01; done"


@pytest.mark.parametrize("is_stopping", [False, True], ids=["at once", "after a patient stop"])
def test_a_stop_now_waits_for_nobody(msrun, verb, is_stopping):
    job = msrun("--grace", "10m", *shell(DEAF))
    job.until_logged("up")
    if is_stopping:
        verb("stop")

    assert verb("stop", "--now")[0] == 0

    assert job.wait() == 143


def test_a_signal_goes_to_the_ranks_that_are_named(msrun, verb):
    program = "trap 'echo got it; exit 0' USR1; echo up; sleep 600 & wait"
    job = msrun("--workers-per-node", 3, *shell(program))
    job.until_logged("up", 0, 1, 2)
    job.until_said("msrun: running 3/3")

    code, _, err = verb("signal", "USR1", "--rank", "1-2")
    assert (code, err) == (0, "msrun: SIGUSR1 goes to 2 rank(s) on 1 node(s)\n")
    job.until_logged("got it", 1, 2)
    assert job.log(0) == "up\n"

    verb("signal", "USR1")
    assert job.wait() == 0


def test_the_only_node_cannot_be_drained(msrun, verb):
    job = msrun(*shell(IDLE))
    job.until_logged("up")

    code, _, err = verb("drain", job.name, "0")

    assert code == 2
    assert "has the scheduler of the job, which cannot do without it" in err
    assert "(choose " in verb("drain", "nobody")[2]
    verb("stop")
    assert job.wait() == 143


def test_logs_are_shown_and_followed(msrun, verb, runtime, tmp_path):
    program = 'echo "rank $RANK"; until [ -e go ]; do sleep 0.01; done; echo last'
    job = msrun("--workers-per-node", 2, *shell(program))
    job.until_logged("rank", 0, 1)

    assert verb("logs", "--rank", "1")[1] == "rank 1\n"
    with subprocess.Popen(
        [sys.executable, "-m", "msrun", "logs", "--follow"],
        env=environment(runtime),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as follower:
        assert follower.stdout.readline() == "rank 0\n"
        (job.folder / "go").touch()
        assert job.wait() == 0
        out, err = follower.communicate(timeout=30)

    assert (follower.returncode, out in ("", "last\n")) == (0, True)
    assert err.startswith("msrun: the job does not answer any more")


class Watcher:
    """`msrun status --watch`, as a person at a terminal has it."""

    def __init__(self, folder, runtime, *words):
        self._ours, theirs = pty.openpty()
        self._text = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "msrun", "status", "--watch", *words],
            cwd=folder,
            env=environment(runtime) | {"TERM": "xterm"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)

    def text(self):
        while select.select([self._ours], [], [], 0)[0]:
            try:
                self._text += os.read(self._ours, 65536)
            except OSError:  # the other end is closed
                break
        return self._text.decode(errors="replace")

    def until_shown(self, pattern):
        """Wait until the last screen shows `pattern`."""
        until(lambda: re.search(pattern, self.screen()), f"for {pattern!r}")

    def screen(self):
        return STYLE.sub("", self.text().split(CLEAR)[-1])

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        print(f"======== status --watch\n{self._text.decode(errors='replace')}")


CLEAR = "\x1b[2J"
STYLE = re.compile(r"\x1b\[[\d;]*[mH]")


def test_who_watches_a_job_sees_its_phases_and_how_it_ends(msrun, verb, runtime, tmp_path):
    program = """
        trap 'until [ -e saved ]; do sleep 0.01; done; exit 0' TERM
        [ -e once ] || { touch once; exit 5; }
        echo up; while :; do sleep 0.01; done
    """
    job = msrun("--max-restarts", 1, "--grace", "10m", *shell(program))
    job.until_logged("up")
    watcher = Watcher(tmp_path, runtime, job.name)
    try:
        watcher.until_shown(r"phase +running\s+generation +1\s")
        watcher.until_shown(r"what ended earlier generations\s+generation 0: rank 0 \(node ")
        verb("stop", job.name)
        watcher.until_shown(r"phase +stopping\s+generation +1\s")
        (tmp_path / "saved").touch()
        assert job.wait() == 143
        assert watcher.process.wait(30) == 0
        # Whichever it heard last: the verdict from the scheduler, or nothing any more.
        ends = (
            "has ended with exit code 143: stopped by `msrun stop`",
            r"exit code +143\s+result +stopped",
        )
        assert any(re.search(end, watcher.screen()) for end in ends)
    finally:
        watcher.close()


def test_equal_stacks_are_shown_together(msrun, verb, tmp_path):
    job = msrun("--workers-per-node", 3, script(tmp_path, PLACES, "places.py"))
    job.until_logged("up", 0, 1, 2)
    job.until_said("msrun: running 3/3")

    found = json.loads(verb("stacks", "--json")[1])["groups"]

    places = [(g["ranks"], [frame["function"] for frame in g["frames"]]) for g in found]
    assert places == [
        ({"count": 2, "runs": [[0, 0], [2, 2]]}, ["inside", "waiting", "<module>"]),
        ({"count": 1, "runs": [[1, 1]]}, ["elsewhere", "<module>"]),
    ]
    assert "(0,2) in inside at places.py:4\n" in verb("stacks")[1]
    assert [job.log(rank) for rank in range(3)] == ["up\n"] * 3
    verb("stop")
    assert job.wait() == 143


def test_what_shows_no_stack_is_told_why(msrun, verb):
    job = msrun("--workers-per-node", 2, *shell("echo $$; exec sleep 600"))
    job.until_logged("\n", 0, 1)
    job.until_said("msrun: running 2/2")
    stopped = psutil.Process(int(job.log(1)))
    stopped.suspend()
    until(lambda: stopped.status() == psutil.STATUS_STOPPED, "for the worker to stop")

    found = json.loads(verb("stacks", "--json")[1])["groups"]

    assert {g["ranks"]["runs"][0][0]: g["problem"] for g in found} == {
        0: "it has not begun, or is no Python program",
        1: "it is stopped, by SIGSTOP or a debugger",
    }
    verb("stop")
    assert job.wait() == 143


# Who is let in.


def test_the_keys_lie_where_only_the_user_reads_them(msrun, card):
    job = msrun(*shell(IDLE))
    job.until_logged("up")
    path = job.run_dir / "control.json"

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(job.run_dir.stat().st_mode) == 0o700
    assert card().keys is not None
    job.send(signal.SIGTERM)
    assert job.wait() == 143
    assert not path.exists()


@pytest.mark.parametrize("secure", [True, False], ids=["with keys", "--insecure"])
def test_only_questions_of_this_job_are_answered(msrun, card, secure):
    job = msrun(*([] if secure else ["--insecure"]), *shell(IDLE))
    job.until_logged("up")
    found = card()
    context = new_context()
    try:
        socket = ControlSocket(context, endpoint(found.host, found.port), found.keys)
        other = control_messages.encode(Question(question="other", request=GetStatus()))
        answer = control_messages.decode_answer(socket.ask(other, 20)).answer
        garbage = socket.ask(b"\xc1garbage", 0.3)
    finally:
        context.destroy(linger=0)

    assert answer.reason == f"the scheduler here runs job {job.name}, not other"
    assert garbage is None
    job.send(signal.SIGTERM)
    assert job.wait() == 143


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GetRanks(first=(1 << 64) - 1), "first"),
        (SignalJob(signum=200), "signum"),
        (SignalJob(signum=10, ranks=[(5, 5)] * 21_800), "ranks"),
    ],
    ids=["no rank", "no signal", "too many ranges"],
)
def test_what_nobody_can_mean_is_denied_and_the_job_goes_on(msrun, card, request_, field):
    job = msrun(*shell(IDLE))
    job.until_said("msrun: running 1/1")
    found = card()
    context = new_context()
    try:
        socket = ControlSocket(context, endpoint(found.host, found.port), found.keys)
        asked = control_messages.encode(Question(question="", request=request_))
        denied = control_messages.decode_answer(socket.ask(asked, 20)).answer
        question = control_messages.encode(Question(question="", request=GetStatus()))
        status = control_messages.decode_answer(socket.ask(question, 20)).answer
    finally:
        context.destroy(linger=0)

    assert denied.reason.endswith(f"at `$.request.{field}`")
    assert (status.phase, status.scheduler_restarts) == ("running", 0)
    job.send(signal.SIGTERM)
    assert job.wait() == 143


def test_who_controls_a_job_cannot_take_part_in_it(msrun, card):
    """A frame of an agent is worth nothing with the key of those who control."""
    job = msrun("--workers-per-node", 1, *shell(IDLE))
    job.until_said("msrun: running 1/1")
    found = card()
    client = ControlClient(found)
    (node,) = client.nodes()
    client.close()
    drained = Envelope(
        job_id=job.name,
        node_id=node.node_id,
        incarnation=1 << 60,
        generation=0,
        seq=1,
        body=Drained(),
    )
    context = new_context()
    try:
        socket = ControlSocket(context, endpoint(found.host, found.port), found.keys)
        assert socket.ask(codec.encode(drained), 0.3) is None
        question = control_messages.encode(Question(question="", request=GetStatus()))
        answer = control_messages.decode_answer(socket.ask(question, 20)).answer
    finally:
        context.destroy(linger=0)

    assert (answer.phase, answer.nodes) == ("running", 1)
    assert "received Drained" not in (job.logs / "scheduler.log").read_text()
    job.send(signal.SIGTERM)
    assert job.wait() == 143


def test_another_key_is_refused_with_the_code_for_that(msrun, verb, card, tmp_path):
    job = msrun(*shell(IDLE))
    job.until_logged("up")
    found = card()
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(32))
    secret.chmod(0o600)

    code, out, err = verb(
        "status", "--master-addr", found.host, "--master-port", found.port, "--secret-file", secret
    )

    assert (code, out) == (122, "")
    assert "refuses the key, or is no scheduler of msrun" in err
    job.send(signal.SIGTERM)
    assert job.wait() == 143


def test_a_named_secret_controls_the_job_from_anywhere(msrun, verb, card, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    job = msrun("--secret-file", secret, *shell(IDLE))
    job.until_logged("up")
    found = card()

    where = ["--master-addr", found.host, "--master-port", found.port, "--secret-file", secret]

    assert verb("stop", job.name, *where)[0] == 0
    assert job.wait() == 143
