"""From argv to a plan, which `run` submits and `plan` prints.

The order is the order of cost: words first, then files, then the machine.  Nothing is
started, created or changed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from msrun import backend, environ
from msrun.backend import FLEETS, Launcher, LaunchPlan
from msrun.cli.job.draft import JobDraft, draft_job, merge_env
from msrun.cli.job.pods import await_scheduler_name
from msrun.cli.job.program import find_program, with_interpreter
from msrun.cli.options import catalog as options
from msrun.cli.options.command_line import CommandLine, Table
from msrun.cli.options.fleet import FLEET_TABLE, RANK_TABLE_FILE
from msrun.cli.options.job_file import JobFile, read_job_file
from msrun.cli.options.parsers import SIGNALS, guess
from msrun.cli.options.peers import NOTED, SIGNALS_TO_HANDLE
from msrun.cli.options.settings import FileTexts, Settings
from msrun.cli.options.words import with_hyphens
from msrun.cli.system import System
from msrun.environ import Pod
from msrun.errors import UsageError
from msrun.units import shown

_GUESS_CUTOFF = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """The words, options and job file of one command, before anything is looked up.

    Args:
        settings: All options.
        words: Program on the command line; empty without one.
        file: The job file.
        notes: What the user should know, one sentence each.
    """

    settings: Settings
    words: tuple[str, ...]
    file: JobFile
    notes: tuple[str, ...]

    @property
    def has_program(self) -> bool:
        """Whether any program is named."""
        return bool(self.words or self.file.script or self.file.module)

    @property
    def is_fleet(self) -> bool:
        """Whether the job's backend starts its agents."""
        return self.settings.value(options.LAUNCHER) in FLEETS


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A job on the way to its backend.

    Args:
        draft: The job, with the source of each value.
        launcher: The backend.
        plan: What the backend would do.
        notes: What the user should know, one sentence each.
    """

    draft: JobDraft
    launcher: Launcher
    plan: LaunchPlan
    notes: tuple[str, ...]


def read_request(line: CommandLine, table: Table, system: System) -> JobRequest:
    """Return the options of `line`, the environment and the job file.

    Raises:
        UsageError: An option is malformed, or is refused.
    """
    _check_directory()
    environment = system.environment()
    settings, file = _settings(line, environment, table)
    _check_refused(settings, table)
    notes = (
        *_misspelt(environment, table),
        *_without_effect(settings),
    )
    return JobRequest(settings=settings, words=line.program, file=file, notes=notes)


def prepare(request: JobRequest, system: System) -> Prepared:
    """Return the job of `request`, checked as far as that is possible without starting it.

    Raises:
        UsageError: It cannot be done; the message says why.
    """
    settings = request.settings
    launcher = system.load_launcher(settings.value(options.LAUNCHER))
    _check_fleet(settings)
    if given := settings.get(RANK_TABLE_FILE):
        from msrun.cli.job.rank_table import (
            with_table,  # Few jobs have one, and all would load the reader.
        )

        settings = with_table(settings, given, system)
    chosen = find_program(request.words, request.file, settings)
    chosen = with_interpreter(chosen, system.environment())
    machine = system.read_machine(merge_env(settings).value)
    await_scheduler_name(settings, system)
    draft = draft_job(settings, chosen, machine, system)
    plan = launcher.plan(draft.job, machine)
    _check_env(settings, plan)
    notes = (*request.notes, *_mistaken(request, draft, system), *draft.notes, *plan.notes)
    return Prepared(draft=draft, launcher=launcher, plan=plan, notes=notes)


# Nobody gives these to a script of their own, and without them a job may be too small.
_SIZES = ("--nproc-per-node", "--nnodes", "--worker-num", "--local-worker-num")


def _mistaken(request: JobRequest, draft: JobDraft, system: System) -> Iterator[str]:
    """Yield what makes a job smaller than its user may think."""
    args = {with_hyphens(word.partition("=")[0]): word for word in draft.job.program.args}
    for name in _SIZES:
        option = next(option for option in request.settings.table if name in option.spellings)
        if name in args and not request.settings.get(option):
            yield f"the script gets {shown(args[name])}: options of msrun stand before it"
    nodes = environ.nodes_of_allocation(system.environment())
    if draft.job.is_alone and nodes > 1 and not request.settings.get(options.NNODES):
        yield (
            f"this job runs on 1 of the {nodes} nodes that Slurm has given "
            "(srun --ntasks-per-node=1 msrun ... starts one on each)"
        )


def _check_directory() -> None:
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError(f"the current directory cannot be used: {error.strerror}") from None


def _settings(
    line: CommandLine, environment: Mapping[str, str], table: Table
) -> tuple[Settings, JobFile]:
    """Return all options and the job file, which one of them names."""
    first = Settings(line, environment, FileTexts(), table=(options.CONFIG,))
    config = first.get(options.CONFIG)
    file = read_job_file(config, table) if config else JobFile()
    return Settings(line, environment, file.options, table=table), file


def _check_refused(settings: Settings, table: Table) -> None:
    for option in table:
        given = settings.get(option)
        if given and option.refusal:
            raise UsageError(f"{given.cite()} {option.refusal}")


def _check_fleet(settings: Settings) -> None:
    """Refuse options that only backends which start other nodes understand."""
    for option in FLEET_TABLE:
        given = settings.get(option)
        if given and option is not RANK_TABLE_FILE:
            raise UsageError(
                f"{given.cite()} needs a backend that starts other nodes",
                hint=f"choose --launcher {', '.join(backend.FLEETS)}",
            )


def _check_env(settings: Settings, plan: LaunchPlan) -> None:
    """Refuse variables that every worker gets from msrun with another value."""
    for given in settings.every(options.ENV):
        for name, value in given.value.items():
            others = {worker.env.get(name, value) for worker in plan.workers}
            if plan.job.env.get(name) == value and others - {value}:
                raise UsageError(
                    f"{given.cite()} cannot be given: msrun sets {name} in every worker"
                )


def _without_effect(settings: Settings) -> Iterator[str]:
    """Yield a sentence for each option that was accepted for a peer's sake only."""
    for option, sentence in NOTED.items():
        if given := settings.get(option):
            yield f"{given.cite()} {sentence}"
    signals = settings.get(SIGNALS_TO_HANDLE)
    if signals and (missing := [name for name in SIGNALS if name not in signals.value]):
        yield f"{signals.cite()}: the job ends on {', '.join(missing)} as well"


def _misspelt(environment: Mapping[str, str], table: Table) -> Iterator[str]:
    """Yield a sentence for each variable that looks like one of ours with a typing error."""
    known = [name for option in table for name in option.variables if name.startswith("MSRUN_")]
    strange = {name for name in environment if name.startswith("MSRUN_")}.difference(known, Pod)
    for name in sorted(strange):
        if close := difflib.get_close_matches(name, known, n=1, cutoff=_GUESS_CUTOFF):
            yield f"environment {shown(name)} is not used{guess(close)}"
