"""A made-up system, and `msrun` as a function that is called with words."""

import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address

import pytest
from msgspec.structs import replace

from msrun import backend
from msrun.backend import LaunchPlan, WorkerPlan
from msrun.cli.main import main
from msrun.errors import UsageError
from msrun.fleet import FleetLauncher, FleetPlan
from msrun.job import JobSpec, ProgramKind
from msrun.processes.control_client import ControlClient
from msrun.processes.control_file import Card
from msrun.topology import CpuTopology, Device, DeviceKind, Machine

CPUS = CpuTopology(numa={0: (0, 1), 1: (2, 3)}, siblings={cpu: (cpu,) for cpu in range(4)})
MACHINE = Machine(
    host="node0",
    cpus=CPUS,
    devices=(),
    memory_available=8 << 30,
    processes_available=4096,
    files_available=1024,
    cgroup=None,
    address="10.0.0.1",
)
NAMES = {
    "localhost": ("127.0.0.1", "::1"),
    "localhost.localdomain": ("127.0.0.1",),
    "ip6-localhost": ("::1",),
    "node0": ("10.0.0.1",),
    "node1": ("10.0.0.9",),
    "node6": ("fd00::9",),
    "all-nodes": ("10.0.0.1", "10.0.0.9"),
    "stranger": ("127.0.1.1",),
}


def devices(kind, count):
    return tuple(Device(kind=kind, index=i, physical=i) for i in range(count))


def _version(address):
    return ip_address(address).version


def _log_name(job, rank):
    return job.worker_log_name.format(
        rank=rank, local_rank=rank, host="node0", hostname="node0", ip="127.0.0.1"
    )


def _of_table(job):
    return {"RANK_TABLE_FILE": job.rank_table} if job.rank_table else {}


@dataclass
class FakeLauncher:
    """Plans in the plainest way and only remembers what it was to submit."""

    code: int = 0
    notes: tuple[str, ...] = ()
    error: BaseException | None = None
    jobs: list[JobSpec] = field(default_factory=list)

    def plan(self, job, machine):
        first = (job.node_rank or 0) * job.workers_per_node
        workers = tuple(
            WorkerPlan(
                rank=rank,
                local_rank=rank - first,
                node_rank=job.node_rank or 0,
                device=rank if rank < len(machine.devices) else None,
                cpus=(rank,) if job.bind_core.mode.value == "auto" else (),
                numa_nodes=(),
                log_file=f"{job.log_dir}/{_log_name(job, rank)}.log",
                env={**job.env, "RANK": str(rank), "NOTE": "two words"} | _of_table(job),
            )
            for rank in range(first, first + job.workers_per_node)
        )
        program = job.program
        start = [] if program.kind is ProgramKind.COMMAND else ["python"]
        start += ["-m"] if program.kind is ProgramKind.MODULE else []
        return LaunchPlan(
            job=job,
            machine=machine,
            workers=workers,
            argv=(*start, program.target, *program.args),
            containment="subreaper",
            notes=self.notes,
            has_ranks=job.is_alone or job.node_rank is not None,
        )

    def submit(self, plan):
        self.jobs.append(plan.job)
        if self.error:
            raise self.error
        return self.code


class FakeClient(ControlClient):
    """Answers with what the test has laid out, in that order, and remembers what it was asked."""

    def __init__(self, card, replies):
        self.card = card
        self.asked = []
        self.closed = False
        self._replies = replies

    def ask(self, request, kind):
        self.asked.append(request)
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        assert isinstance(reply, kind)
        return reply

    def close(self):
        self.closed = True


@dataclass
class FakeFleet:
    """Plans as the real backend does and only remembers what it was to submit."""

    real: FleetLauncher
    plans: list[FleetPlan]

    def plan(self, fleet):
        return self.real.plan(fleet)

    def submit(self, plan, secret):
        assert len(secret) == 32
        self.plans.append(plan)
        return 7


@dataclass
class FakeWorld:
    """Answers of a system in which nothing is real but files."""

    machine: Machine = MACHINE
    variables: dict[str, str] = field(default_factory=dict)
    launcher: FakeLauncher = field(default_factory=FakeLauncher)
    busy: dict[int, str] = field(default_factory=dict)
    addresses: dict[int, str] = field(default_factory=dict)
    plans: list[FleetPlan] = field(default_factory=list)
    names: dict[str, tuple[str, ...]] = field(default_factory=NAMES.copy)
    own: tuple[str, ...] = ("10.0.0.1", "fd00::1")
    terminal: bool = False
    neighbours: dict[str, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    torch_devices: dict[str, int] = field(
        default_factory=lambda: {"auto": 0, "cuda": 0, "npu": 0, "xpu": 0}
    )
    cards: list[Card] = field(default_factory=list)
    """Of the jobs here."""
    beginning: list[Card] = field(default_factory=list)
    """Of jobs that begin while a port is looked at."""
    left: list[str] = field(default_factory=list)
    replies: list[object] = field(default_factory=list)
    clients: list[FakeClient] = field(default_factory=list)
    paused: list[float] = field(default_factory=list)
    silent: tuple[str, ...] = ()
    elsewhere: list[tuple[object, ...]] = field(default_factory=list)

    def environment(self):
        return self.variables

    def read_machine(self, env):
        return (
            self.machine
            if "CUDA_VISIBLE_DEVICES" not in env
            else replace(self.machine, devices=self.machine.devices[:1])
        )

    def cpu_neighbours(self, share):
        return self.neighbours.get(share, {})

    def count_devices(self, kind):
        return self.torch_devices.get(kind)

    def load_launcher(self, name):
        if name != "dynamic":
            msg = f"--launcher {name!r} is not installed (choose dynamic)"
            raise UsageError(msg)
        return self.launcher

    def open_fleet(self, name, texts):
        return FakeFleet(backend.open_fleet(name, texts), self.plans)

    def call_elsewhere(self, *words):
        self.elsewhere.append(words)
        return 7

    def token(self):
        return "0a1b2c"

    def resolve(self, host):
        with suppress(ValueError):
            return (str(ip_address(host)),)
        return self.names.get(host, ())

    def is_own(self, address):
        return ip_address(address).is_loopback or address in self.own

    def address_to(self, address):
        own = (a for a in (address, *self.own) if self.is_own(a))
        return next((a for a in own if _version(a) == _version(address)), None)

    def own_addresses(self):
        return self.own

    def reaches(self, address, port):
        assert port
        return address not in self.silent

    def port_problem(self, host, port):
        del host
        self.cards, self.beginning = [*self.cards, *self.beginning], []
        return self.busy.get(port)

    def device_addresses(self, numbers):
        return {number: self.addresses[number] for number in numbers if number in self.addresses}

    def is_terminal(self):
        return self.terminal

    def jobs(self):
        return self.cards

    def clean(self):
        left, self.left = self.left, []
        return left

    def is_beside(self, job):
        return self.has_node(job)

    def has_node(self, job):
        return any((card.job_id, card.port) == (job.job_id, job.master_port) for card in self.cards)

    def connect(self, card, patience):
        assert patience > 0
        self.clients.append(FakeClient(card, self.replies))
        return self.clients[-1]

    def now(self):
        return 1000.0 + sum(self.paused)

    def pause(self, seconds):
        self.paused.append(seconds)


@dataclass(frozen=True)
class Outcome:
    """What one call of `msrun` came to."""

    code: int
    out: str
    err: str
    job: JobSpec | None


@pytest.fixture
def system():
    return FakeWorld()


@pytest.fixture
def gpus(system):
    """Give the machine so many GPUs."""

    def give(count, kind=DeviceKind.CUDA):
        system.machine = replace(system.machine, devices=devices(kind, count))

    return give


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with one of each kind of program."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "plan").write_text("print('not the verb')\n")
    program = tmp_path / "prog"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").touch()
    return tmp_path


@pytest.fixture
def msrun(here, system, capsys):
    """Call the command line with words, or with one text as a shell would split it."""

    def call(words, **variables):
        system.variables = variables
        argv = shlex.split(words) if isinstance(words, str) else words
        code = main(argv, system=system)
        out, err = capsys.readouterr()
        job = system.launcher.jobs.pop() if system.launcher.jobs else None
        return Outcome(code, out.replace(str(here), "HERE"), err.replace(str(here), "HERE"), job)

    return call
