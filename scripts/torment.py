"""Ends random processes of jobs at random moments, and checks what is left and what is said.

    python scripts/torment.py --rounds 500 --seed 1 --hosts 3

A round starts a job on this machine, or on hosts made of namespaces (`tests/lab`), and sends one or
two signals, with a gap, to a random role: launcher, reaper, forkserver, scheduler, store, worker, a
worker's child, or a whole host.  Then it checks the promises:

- every launcher ends in time, with an exit code that its verdict repeats and that is honest: 0 only
  if every rank wrote that it was done, and never that of a bug;
- nothing is left: no process, socket, shared memory, cgroup or private directory.  What a killed
  launcher and a killed reaper leave together is gone after `msrun ls --clean`.

Prints a line a round and a report of each finding; exits with 1 if there is one.  `--only N` makes
the decisions of one round again; which process there is at its moment is the machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("lab", "process", "cluster"))]

import hosts  # type: ignore[import-not-found]  # noqa: E402 - of tests/lab
import psutil  # noqa: E402
from nodes import Node  # type: ignore[import-not-found]  # noqa: E402 - of tests/cluster
from support import (  # type: ignore[import-not-found]  # noqa: E402 - of tests/process
    Job,
    alive,
    environment,
    shell,
)

from msrun.errors import ExitCode  # noqa: E402

PATIENCE = 60.0
# Seconds in which what a killed launcher started must be gone.
GONE = 10.0
# Seconds in which each role has a process, on a busy machine.
COMES = 10.0
# Whoever looks finds the process that entered a host, too.
ENTERS = "namespaces.py"
NOBODY = "nobody was there"
_FINDING_CHARS = 400
ROLES = {
    "msrun reaper": "reaper",
    "msrun forksrv": "forkserver",
    "msrun scheduler": "scheduler",
    "msrun store": "store",
    "sleep": "grandchild",
    "sh": "worker",
}
SIGNALS = (
    *(signal.SIGKILL,) * 4,
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGABRT, signal.SIGSEGV, signal.SIGSTOP),
)
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where it is
# Each worker has a child, one in a session of its own, and one that has lost its parent.  And it
# has a segment of shared memory, named as torch names those that a killed process leaves.
FAMILY = """
    echo $XDG_RUNTIME_DIR > /dev/shm/torch_$$_1_0
    sleep 600 &
    setsid sleep 601 &
    (setsid setsid sleep 602 &)
    echo up
    # Without a client there is no store.
    bash -c "exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT; exec sleep 603" &
    sleep {seconds} & wait $!
    rm /dev/shm/torch_$$_1_0
    echo done $MSRUN_GENERATION
"""


@dataclass(frozen=True)
class Blow:
    """One signal.

    Args:
        at: Seconds after a process of the role is there, or after the blow before.
        role: Whom it hits; another one where that role does not come.
        signum: The signal.
        choice: Which of several processes of that role, from 0 to 1.
    """

    at: float
    role: str
    signum: signal.Signals
    choice: float


@dataclass(frozen=True)
class Round:
    """What one round does, all of it decided by its seed."""

    number: int
    hosts: int
    workers: int
    restarts: int
    seconds: float
    blows: tuple[Blow, ...]

    @classmethod
    def of(cls, seed: str, number: int, most_hosts: int) -> Round:
        """Return the round of that number among those of `seed`."""
        rng = random.Random(f"{seed}/{number}")  # noqa: S311 - it is to be repeated
        count = rng.choice([1, 1, 1, most_hosts])
        roles = ["launcher", *dict.fromkeys(ROLES.values()), *(["host"] if count > 1 else [])]
        seconds = round(rng.uniform(0.5, 2.0), 2)
        first = rng.uniform(0, 0.3 + seconds)
        blows = [Blow(first, rng.choice(roles), rng.choice(SIGNALS), rng.random())]
        if rng.choice([True, False]):
            gap = rng.choice([0.0, 0.01, 0.1, 0.5]) * rng.random()
            blows.append(Blow(gap, rng.choice(roles), rng.choice(SIGNALS), rng.random()))
        return cls(
            number=number,
            hosts=count,
            workers=rng.choice([1, 2, 3]),
            restarts=rng.choice([0, 0, 1]),
            seconds=seconds,
            blows=tuple(blows),
        )


@dataclass
class Outcome:
    """What became of a round.

    Args:
        round: The round.
        done: What was sent to whom.
        findings: Broken promises.
        codes: Exit codes of the launchers.
        reports: Everything that the launchers wrote.
    """

    round: Round
    done: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return it in one line."""
        here, codes = self.round, ",".join(map(str, self.codes))
        state = "FOUND" if self.findings else "ok"
        size = f"{here.hosts}x{here.workers}"
        return f"{here.number:4} {state:5} {size} codes {codes:12} {'; '.join(self.done)}"


def play(here: Round, folder: Path) -> Outcome:
    """Carry a round out in `folder`."""
    outcome = Outcome(here)
    folder.mkdir()
    with started(here, folder) as jobs:
        frozen: list[psutil.Process] = []
        killed: set[str] = set()
        await_role(here.blows[0].role, jobs)
        for blow in here.blows:
            pause_until(time.monotonic() + blow.at)
            strike(blow, jobs, outcome, frozen, killed)
        if frozen:
            pause_until(time.monotonic() + 0.3)
        for process in frozen:
            with contextlib.suppress(psutil.Error):
                process.resume()
        check(jobs, outcome, killed)
        outcome.reports = [job.report() for job in jobs] if outcome.findings else []
        for job in jobs:  # no round may disturb the next
            for member in job.members():
                with contextlib.suppress(psutil.Error):
                    member.kill()
            job.process.kill()
            job.process.wait()
    return outcome


@contextlib.contextmanager
def started(here: Round, folder: Path) -> Iterator[list[Job]]:
    """Start the launchers of a round."""
    words = ["--workers-per-node", here.workers, "--max-restarts", here.restarts, "--grace", "0.5s"]
    words += shell(FAMILY.format(seconds=here.seconds))
    if here.hosts == 1:
        runtime = folder / "run"
        runtime.mkdir(mode=0o700)
        yield [Job(folder, words, runtime=runtime)]
        return
    names = "abcdefgh"[: here.hosts]
    job_id = f"torment-{os.getpid()}-{here.number}"
    size = ["--nnodes", here.hosts, "--master-addr", "a", "--job-id", job_id, "--lease", "3s"]
    size += ["--join-timeout", "10s"]  # for nodes whose peers are gone before they have met
    with hosts.Lab(folder, *names) as lab:
        yield [Node(host, [*size, *words]) for host in lab.hosts]


def await_role(role: str, jobs: Sequence[Job]) -> None:
    """Wait until there is a process of that role, or no job any more."""

    def may_come() -> bool:
        return role not in by_role(jobs) and any(job.process.poll() is None for job in jobs)

    if role != "host":
        pause_while(may_come, COMES)


def strike(
    blow: Blow,
    jobs: Sequence[Job],
    outcome: Outcome,
    frozen: list[psutil.Process],
    killed: set[str],
) -> None:
    """Send one signal to whom there is."""
    if blow.role == "host":
        node = jobs[int(blow.choice * len(jobs))]
        if isinstance(node, Node) and node.host.pid:
            node.kill_host()
            outcome.done.append(f"host {node.host.name} killed")
            killed.add(f"launcher {node.name} {id(node)}")
        return
    found = {role: victims for role, victims in by_role(jobs).items() if victims}
    victims = found.get(blow.role) or [each for all_ in found.values() for each in all_]
    if not victims:
        outcome.done.append(NOBODY)
        return
    role, job, victim = victims[min(int(blow.choice * len(victims)), len(victims) - 1)]
    since = time.monotonic() - jobs[0].started_at
    with contextlib.suppress(psutil.Error):
        victim.send_signal(blow.signum)
        outcome.done.append(f"{role} {blow.signum.name} at {since:.2f}s")
        if blow.signum is signal.SIGSTOP:
            frozen.append(victim)
        elif blow.signum in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT) or role == "launcher":
            killed.add(f"{role} {job.name} {id(job)}")


Victim = tuple[str, Job, psutil.Process]


def by_role(jobs: Sequence[Job]) -> dict[str, list[Victim]]:
    """Return the living processes of the jobs by their role."""
    found: dict[str, list[Victim]] = {}
    for job in jobs:
        for member in job.members():
            with contextlib.suppress(psutil.Error):
                words = " ".join(member.cmdline())
                if ENTERS in words:
                    continue
                name = member.name()
                role = ROLES.get(name) or ("launcher" if "-m msrun" in words else "starting")
                found.setdefault(role, []).append((role, job, member))
    return found


def check(jobs: Sequence[Job], outcome: Outcome, killed: set[str]) -> None:
    """Note which promises were broken."""
    deadline = time.monotonic() + PATIENCE
    for job in jobs:
        try:
            code = job.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            outcome.codes.append(-1)
            outcome.findings.append(f"a launcher did not end within {PATIENCE:g} s")
            continue
        outcome.codes.append(128 - code if code < 0 else code)
        check_verdict(job, outcome.codes[-1], outcome, killed)
    # A lease may end on a busy machine, which costs a job of several hosts a node.
    was_left_alone = set(outcome.done) == {NOBODY} and outcome.round.hosts == 1
    if was_left_alone and outcome.codes != [0]:
        outcome.findings.append(f"exit code {outcome.codes} although nothing was done to it")
    if 0 in outcome.codes:
        check_success(jobs, outcome)
    check_leftovers(jobs, outcome, killed)


def check_verdict(job: Job, code: int, outcome: Outcome, killed: set[str]) -> None:
    """Note where a launcher's console, exit code and verdict do not agree."""
    own = "\n".join(line for line in job.err.splitlines() if not line.startswith("[rank"))
    # Python itself shows one if it is interrupted before our first lines are done.
    is_early = own.endswith("KeyboardInterrupt") and "msrun/cli" not in own
    if ("Traceback" in own and not is_early) or "bug in msrun" in own:
        outcome.findings.append("a traceback or a bug on the console")
    was_killed = any(mark.startswith("launcher") and mark.endswith(str(id(job))) for mark in killed)
    try:
        verdict = job.verdict()
    except (OSError, ValueError):
        verdict = None
    if verdict is None:
        # Before it has begun, a launcher has no verdict; neither has one that was killed.
        if not was_killed and "running" in job.err:
            outcome.findings.append(f"no verdict of a launcher that ended with {code}")
        return
    if verdict["code"] != code and not was_killed:
        outcome.findings.append(f"exit code {code}, but the verdict says {verdict['code']}")
    if verdict["code"] and not verdict["reason"] and not verdict["root"]:
        outcome.findings.append("a verdict without a reason")
    is_loop = "the scheduler was" in str(verdict["reason"])
    if verdict["code"] == ExitCode.INTERNAL and not is_loop:
        outcome.findings.append(f"exit code 70: {verdict['reason']}")


def check_success(jobs: Sequence[Job], outcome: Outcome) -> None:
    """Note each rank that has not written that it was done."""
    logs = [path for job in jobs for path in sorted(job.logs.glob("worker_*.log"))]
    for path in logs:
        last = path.read_text(errors="replace").rpartition("[msrun] generation")[2]
        if "done " not in last:
            outcome.findings.append(f"exit code 0, but {path.name} does not say so")


def check_leftovers(jobs: Sequence[Job], outcome: Outcome, killed: set[str]) -> None:
    """Note what is left, but for what nobody was there to remove; clean that up."""
    for job in jobs:
        if isinstance(job, Node) and not job.is_expected_clean:
            continue
        pause_while(partial(is_there, job), GONE)
        if left := job.leftovers():
            mine = {mark.split()[0] for mark in killed if mark.endswith(str(id(job)))}
            nobody = "launcher" in mine and (
                {"reaper", "starting"} & mine or not has_reaper_begun(job)
            )
            if not nobody:
                outcome.findings.append(f"left: {left}")
            clean(job)
            if left := job.leftovers():
                outcome.findings.append(f"left after `msrun ls --clean`: {left}")
        if segments := shared_memory(job):
            outcome.findings.append(f"left in {SHARED_MEMORY}: {segments}")
        names = {path.name for path in (job.runtime / "msrun").glob("*")} - {".guard"}
        if names:
            outcome.findings.append(f"left in the run directory: {sorted(names)}")


def is_there(job: Job) -> bool:
    """Whether a process of `job` lives, also one in an exec, which shows no environment then."""
    return bool(alive(job.runtime)) or any(map(is_locked, job.runtime.glob("msrun/*/lock")))


def is_locked(path: Path) -> bool:
    """Whether a process has the lock of a job's directory."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def shared_memory(job: Job) -> list[str]:
    """Return the segments of shared memory that a job has left, and remove them.

    A host has its own, and they were none when it began; others use that of this machine.
    """
    directory = SHARED_MEMORY
    if isinstance(job, Node):
        directory = Path(f"/proc/{job.host.pid}/root{SHARED_MEMORY}")
    found = []
    for path in directory.glob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and str(job.runtime) in path.read_text(errors="replace"):
                found.append(path.name)
                path.unlink()
    return found


def has_reaper_begun(job: Job) -> bool:
    """Whether a launcher lived long enough to have started the process that cleans up."""
    return "running" in job.err


def clean(job: Job) -> None:
    """Remove what is left of a job, as its user would."""
    wrapper = job.host.enter(job.folder) if isinstance(job, Node) else ()
    subprocess.run(
        [*wrapper, sys.executable, "-m", "msrun", "ls", "--clean"],
        env=environment(job.runtime),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=PATIENCE,
        check=True,
    )


def pause_until(at: float) -> None:
    """Wait for a time of the monotonic clock."""
    time.sleep(max(0.0, at - time.monotonic()))


def pause_while(condition: Callable[[], object], seconds: float) -> None:
    """Wait as long as something is the case, but no longer than that."""
    deadline = time.monotonic() + seconds
    while condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def torment(
    rounds: Sequence[int], *, seed: str, most_hosts: int, parallel: int, seconds: float
) -> list[Outcome]:
    """Carry rounds out, printing each; none begins after `seconds`."""
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="torment-") as name:

        def one(number: int) -> Outcome | None:
            if time.monotonic() > deadline:
                return None
            return play(Round.of(seed, number, most_hosts), Path(name, str(number)))

        with ThreadPoolExecutor(parallel) as pool:
            for outcome in pool.map(one, rounds):
                if outcome is None:
                    continue
                outcomes.append(outcome)
                print(outcome.line(), flush=True)
                for finding in outcome.findings:
                    print(f"     {finding[:_FINDING_CHARS]}", flush=True)
                print(*outcome.reports, sep="\n", end="\n" * bool(outcome.reports), flush=True)
    return outcomes


def main() -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30, help="how many")
    parser.add_argument("--seed", default=None, help="of all decisions; random by default")
    parser.add_argument(
        "--hosts", type=int, default=1, help="of a quarter of the rounds; needs root"
    )
    parser.add_argument("--parallel", type=int, default=1, help="rounds at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none later")
    parser.add_argument("--only", type=int, help="this round alone")
    given = parser.parse_args()
    if given.hosts > 1 and (lacks := hosts.missing()):
        parser.error(f"--hosts {given.hosts}: no lab of hosts: {lacks}")
    seed = given.seed or str(random.SystemRandom().randrange(10**6))
    numbers = range(given.rounds) if given.only is None else [given.only]
    print(f"seed {seed}", flush=True)
    outcomes = torment(
        numbers,
        seed=seed,
        most_hosts=given.hosts,
        parallel=given.parallel,
        seconds=given.seconds,
    )
    codes = Counter(code for outcome in outcomes for code in outcome.codes)
    found = [outcome for outcome in outcomes if outcome.findings]
    print(f"{len(outcomes)} rounds, {len(found)} with findings; exit codes {dict(codes)}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
