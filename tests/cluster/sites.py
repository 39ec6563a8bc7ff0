"""Sites: a lab of one head and two nodes, on which one backend works.

The head is a host of its own, where `msrun` is typed; jobs run on the nodes `a` and `b`, which
have two slots each.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import mpi
import slurm
import ssh
from hosts import Host, Lab
from support import PATIENCE, Job, until

import msrun as package
from msrun.supervise.process import command_line

HOME = Path(package.__file__).parent.parent
NODES = ("a", "b")
# What a fleet's agents keep on a node while they run.
_PLACES = ("run/msrun/*", "tmp/msrun-*/*")
BACKENDS = (*mpi.ALL, "ssh", "slurm")


def missing(backend: str) -> str | None:
    """Return what this machine lacks for `backend`, None when it has all."""
    if backend == "slurm":
        return slurm.MISSING or None
    return ssh.MISSING or (None if backend == "ssh" else mpi.missing(backend) or None)


class Site:
    """The hosts, and how jobs are started there.

    Args:
        backend: Its name here.
        lab: Head and nodes.
        words: What selects the backend, and what it needs to know.
        env: Variables of the head's commands, to which ours are added.
    """

    def __init__(self, backend: str, lab: Lab, words: list[str], env: Mapping[str, str]) -> None:
        self.backend = backend
        self.lab = lab
        self.head, *self.nodes = lab.hosts
        self.python = lab.folder / "remote-python"
        self._words = [*words, "--remote-python", self.python, "--grace", "5s"]
        self.env = {"PYTHONPATH": str(HOME), **env}
        self._numbers = itertools.count()
        self.jobs: list[FleetJob] = []
        self._served = {host: self._pids(host) for host in lab.hosts}
        self.use_own_python()

    def use_own_python(self, first: str = "") -> None:
        """Have this Python, with our msrun, run on the nodes; `first` is a line of its shell."""
        run = f'PYTHONPATH={shlex.quote(str(HOME))} exec {shlex.quote(sys.executable)} "$@"'
        self.python.write_text(f"#!/bin/sh\n{first}\n{run}\n")
        self.python.chmod(0o755)

    def cancel(self, job: FleetJob) -> None:
        """Have Slurm end a job that nobody follows."""
        self.run("scancel", job.out.split()[0])

    def start(self, *words: object) -> FleetJob:
        """Type `msrun` on the head."""
        job = FleetJob(self.head, self.folder(), [*self._words, *words], self.env)
        self.jobs.append(job)
        return job

    def plan(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Type `msrun plan` on the head."""
        return self.run(sys.executable, "-m", "msrun", "plan", *self._words, *words)

    def run(
        self, *command: object, host: Host | None = None, seconds: float = PATIENCE
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, the head by default, to its end."""
        where = host or self.head
        return where.run(command, cwd=self.folder(), env=self.env, timeout=seconds)

    def folder(self) -> Path:
        """Make a directory for one job, with a hostfile."""
        folder = self.lab.folder / f"job-{next(self._numbers)}"
        folder.mkdir()
        (folder / "hosts").write_text("".join(f"{name} slots=2\n" for name in NODES))
        return folder

    def start_shell(self, text: str, *options: object) -> FleetJob:
        """Start a job whose workers run a shell program."""
        return self.start(*options, "--no-python", "sh", "-c", text)

    def agent(self, host: Host) -> int:
        """Return the pid of the agent on a node."""
        words = {process.pid: command_line(process.pid).split() for process in host.processes()}
        (pid,) = [pid for pid, line in words.items() if line[1:4] == ["-P", "-m", "msrun"]]
        return pid

    def await_nothing(self) -> None:
        """Wait until no host has a process or a file of a job."""
        try:
            until(lambda: not self.leftovers(), "for the end of all")
        except BaseException:
            print(*self.leftovers(), sep="\n")
            raise

    def leftovers(self) -> list[str]:
        """Describe what jobs have left on hosts that are on."""
        hosts = [host for host in self.lab.hosts if host.pid]
        processes = [
            f"{host.name}: {process}"
            for host in hosts
            for process in host.processes()
            if process.pid not in self._served[host]
        ]
        files = [
            str(path)
            for host in hosts
            for place in _PLACES
            for path in host.file("/").glob(place)
            if path.name != ".guard"
        ]
        return [*processes, *files]

    @staticmethod
    def _pids(host: Host) -> set[int]:
        return {process.pid for process in host.processes()}


class FleetJob(Job):
    """A job that was typed on a head.

    Args:
        head: Where.
        folder: Its own directory.
        arguments: Words after `msrun`.
        env: Variables on top of the tests' own.
    """

    def __init__(
        self, head: Host, folder: Path, arguments: list[object], env: Mapping[str, str]
    ) -> None:
        super().__init__(
            folder, arguments, runtime=Path("/run"), wrapper=head.enter(folder), env=env
        )

    @property
    def console(self) -> str:
        """What the job has said, wherever the backend writes that."""
        file = self.folder / "console"
        return self.out + self.err + (file.read_text(errors="replace") if file.exists() else "")

    def await_ready(self, count: int = 4) -> None:
        """Wait until so many workers have made a file of their rank."""
        until(lambda: len(list(self.folder.glob("ready.*"))) == count, f"for {count} workers")


@contextlib.contextmanager
def open_site(backend: str, folder: Path) -> Iterator[Site]:
    """Boot a head and two nodes, and start on them what `backend` needs."""
    with Lab(folder, "head", *NODES) as lab, contextlib.ExitStack() as stack:
        if backend == "slurm":
            env = stack.enter_context(slurm.cluster_on(folder / "slurm", *lab.hosts))
            words = ["--launcher", "slurm", "--nnodes", "2", "--workers-per-node", "2"]
            yield Site(backend, lab, [*words, "--output", "console"], env)
            return
        env = ssh.serve(folder / "ssh", *lab.hosts[1:])
        if backend == "ssh":
            words = ["--launcher", "ssh"]
        else:
            words = ["--launcher", "mpirun", "--mpirun", mpi.program(backend)]
        yield Site(backend, lab, [*words, "--hostfile", "hosts"], env)
