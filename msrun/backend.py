"""The protocol of a backend, which renders a plan and then submits it; and the table of backends.

Backends live in `launchers/`, one file or package each, and are loaded by dotted name when
they are asked for; other distributions add theirs under the entry-point group
`msrun.launchers`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import msgspec

from msrun.errors import UsageError
from msrun.fleet import FleetLauncher
from msrun.job import JobSpec
from msrun.topology import Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.metadata import EntryPoint, EntryPoints

ENTRY_POINT_GROUP = "msrun.launchers"

BUILT_IN = {
    "dynamic": "launchers.dynamic:DynamicLauncher",
}
# These start the agents themselves; each function takes the options of its backend.
FLEETS = {
    "ssh": "launchers.ssh:open_launcher",
    "mpirun": "launchers.mpirun:open_launcher",
    "slurm": "launchers.slurm:open_launcher",
    "kubernetes": "launchers.kubernetes:open_launcher",
}


# These carry out verbs about their jobs from anywhere.
ELSEWHERE = {
    "kubernetes": "launchers.kubernetes.verbs:run_verb",
}


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, as it would be started.

    Args:
        rank: Global rank.
        local_rank: Rank on its node.
        node_rank: Its node.
        device: Index of its device, None on CPU.
        cpus: CPUs it is bound to; empty when it is not bound.
        numa_nodes: NUMA nodes its memory is bound to; empty when it is not bound.
        log_file: Path of its log.
        out_file: Path of the file of its stdout alone; empty where the log has it.
        err_file: Path of the file of its stderr alone; empty where the log has it.
        env: Variables it gets on top of the launcher's environment.
    """

    rank: int
    local_rank: int
    node_rank: int
    device: int | None
    cpus: tuple[int, ...]
    numa_nodes: tuple[int, ...]
    log_file: str
    env: dict[str, str]
    out_file: str = ""
    err_file: str = ""

    @property
    def logs(self) -> tuple[str, ...]:
        """Everything that its output goes to."""
        return tuple(filter(None, (self.log_file, self.out_file, self.err_file)))

    def in_directory(self, folder: str) -> WorkerPlan:
        """Return this plan with its files in `folder`."""
        fields = ("log_file", "out_file", "err_file")
        paths = {name: path for name in fields if (path := getattr(self, name))}
        moved = {name: str(Path(folder, Path(path).name)) for name, path in paths.items()}
        return msgspec.structs.replace(self, **moved)

    @property
    def error_log(self) -> str:
        """Where its last words stand."""
        return self.err_file or self.log_file


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `submit` would do, as data.

    Args:
        job: What was asked for.
        machine: What this node offers.
        workers: This node's ranks, by local rank; without `has_ranks`, only the fields that do
            not depend on the rank are valid.
        argv: The command of every worker.
        containment: How the process tree is held together.
        notes: What the user should know, one sentence each.
        has_ranks: The ranks of `workers` follow from the job; otherwise the scheduler assigns
            them when all nodes have registered.
    """

    job: JobSpec
    machine: Machine
    workers: tuple[WorkerPlan, ...]
    argv: tuple[str, ...]
    containment: str
    notes: tuple[str, ...] = ()
    has_ranks: bool = True


@runtime_checkable
class Launcher(Protocol):
    """One way to bring agents or ranks to life."""

    def plan(self, job: JobSpec, machine: Machine) -> LaunchPlan:
        """Return what `submit` would do; reads and changes nothing.

        Raises:
            UsageError: The job cannot run here; the message says why.
        """

    def submit(self, plan: LaunchPlan) -> int:
        """Carry `plan` out and return the job's exit code."""


def open_fleet(name: str, options: Mapping[str, str]) -> FleetLauncher:
    """Return the backend `name` that starts agents on other nodes.

    Args:
        name: One of `FLEETS`.
        options: What its user asks of it, by the names of the options.

    Raises:
        UsageError: The backend has no such option, or a program or file that it needs is missing.
    """
    function: Callable[[Mapping[str, str]], FleetLauncher] = _attribute(FLEETS[name])
    return function(options)


def call_elsewhere(name: str, verb: str, words: Sequence[str], options: Mapping[str, str]) -> int:
    """Carry out a verb about a job of the backend `name`, one of `ELSEWHERE`; return its code.

    Args:
        name: The backend.
        verb: Such as `status`.
        words: What follows it.
        options: Where the job is, by the names of the options.

    Raises:
        UsageError: No job is meant, or it cannot be reached.
    """
    function: Callable[[str, Sequence[str], Mapping[str, str]], int] = _attribute(ELSEWHERE[name])
    return function(verb, words, options)


def names() -> list[str]:
    """Return the names of all backends that are installed."""
    return sorted({*BUILT_IN, *FLEETS, *(e.name for e in _entry_points())})


def load(name: str) -> Launcher:
    """Return the backend `name`.

    Raises:
        UsageError: There is no such backend, or a folder of the user's hides ours.
    """
    if name in BUILT_IN:
        return cast("Launcher", _attribute(BUILT_IN[name])())
    for entry_point in _entry_points():
        if entry_point.name == name:
            return _load_foreign(entry_point)
    raise UsageError(f"--launcher {name!r} is not installed (choose {', '.join(names())})")


def _attribute(dotted: str) -> Any:
    module_name, _, attribute = dotted.partition(":")
    package = module_name.partition(".")[0]
    _check_ours(package, importlib.import_module(package).__file__)
    return getattr(importlib.import_module(module_name), attribute)


def _load_foreign(entry_point: EntryPoint) -> Launcher:
    try:
        return cast("Launcher", entry_point.load()())
    except Exception as error:
        raise UsageError(
            f"--launcher {entry_point.name} ({entry_point.value}) cannot be loaded",
            hint=f"{type(error).__name__}: {error}",
        ) from error


def _entry_points() -> EntryPoints:
    import importlib.metadata  # A start with a built-in backend needs none of its 15 ms.

    return importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)


def _check_ours(package: str, file: str | None) -> None:
    """Refuse a package that is not in the directory of `msrun`, such as one of the user's."""
    expected = Path(__file__).parent.parent / package
    actual = Path(file or "").parent
    if actual != expected:
        raise UsageError(
            f'"{package}" resolves to {actual}, which hides msrun\'s own at {expected}',
            hint=f"remove {actual.parent} from PYTHONPATH",
        )
