"""Random processes of jobs end at random moments: `scripts/torment.py`, and that it notices."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import hosts
import pytest
import torment
from support import environment

from msrun.supervise.process import is_alive

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "torment.py"
ROUNDS, SECONDS = 16, 70


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_nothing_is_left_and_the_end_is_told_as_it_was(runtime):
    """By hand it runs for hours; here as many of 16 rounds as begin in 70 seconds."""
    most = 1 if hosts.missing() else 3
    words = ["--rounds", ROUNDS, "--seed", random.randrange(10**6), "--hosts", most]
    words += ["--parallel", 2, "--seconds", SECONDS]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, words)],
        env=environment(runtime),
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)

    assert (done.returncode, done.stderr) == (0, "")
    assert " ok " in done.stdout


class Launcher:
    """What the checks see of a launcher that ended."""

    def __init__(self, folder, *, err="", verdict=None, log="done 0\n", left=()):
        self.name, self.err, self.logs, self.runtime = "test", err, folder, folder
        self._verdict, self._left = verdict, list(left)
        (folder / "worker_0.log").write_text(log)

    def verdict(self):
        return json.loads(self._verdict) if self._verdict else json.loads("")

    def leftovers(self):
        return self._left


def told(code, reason="why"):
    return json.dumps({"code": code, "reason": reason, "root": None})


@pytest.mark.parametrize(
    ("job", "code", "finding"),
    [
        ({"verdict": told(0, "")}, 0, None),
        ({"verdict": told(120)}, 120, None),
        ({"verdict": told(120)}, 0, "exit code 0, but the verdict says 120"),
        ({"verdict": told(120, "")}, 120, "a verdict without a reason"),
        ({"verdict": told(70)}, 70, "exit code 70: why"),
        ({"err": "msrun: running 1/1"}, 143, "no verdict of a launcher that ended with 143"),
        ({"err": "Traceback (most", "verdict": told(1)}, 1, "a traceback or a bug on the console"),
        ({"err": "[rank 0] Traceback (most", "verdict": told(1)}, 1, None),
        ({"verdict": told(0, ""), "log": "up\n"}, 0, "exit code 0, but worker_0.log does not"),
    ],
)
def test_it_finds_dishonest_ends(tmp_path, job, code, finding):
    outcome = torment.Outcome(torment.Round.of("1", 0, 1))
    launcher = Launcher(tmp_path, **job)

    torment.check_verdict(launcher, code, outcome, set())
    if code == 0:
        torment.check_success([launcher], outcome)

    found = outcome.findings
    assert [text[: len(finding)] for text in found] == [finding] if finding else found == []


def test_it_finds_what_is_left(msrun, runtime, tmp_path):
    """Of a launcher and a reaper that were not both killed; and then `ls --clean` removes it."""
    job = msrun("--no-python", "sleep", "600")
    job.until_said("running 1/1")
    reaper = job.find("msrun reaper")
    job.process.send_signal(signal.SIGSTOP)  # so that neither sees the other end
    reaper.kill()
    job.process.kill()
    job.wait()
    outcome = torment.Outcome(torment.Round.of("1", 0, 1))
    torment.GONE = 0.5

    torment.check_leftovers([job], outcome, set())

    (finding,) = outcome.findings
    assert finding.startswith("left: ")
    assert str(runtime / "msrun" / job.name) in finding
    assert not is_alive(reaper.pid)
    assert not (tmp_path / "run" / "msrun" / job.name).exists()


def test_a_seed_decides_a_round():
    rounds = [torment.Round.of("7", number, 3) for number in range(200)]

    assert rounds == [torment.Round.of("7", number, 3) for number in range(200)]
    assert {each.hosts for each in rounds} == {1, 3}
    assert {len(each.blows) for each in rounds} == {1, 2}
    roles = {blow.role for each in rounds for blow in each.blows}
    assert roles == {"launcher", "host", *torment.ROLES.values()}
