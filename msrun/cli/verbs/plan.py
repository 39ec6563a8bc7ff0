"""`msrun plan`: print what `run` would do; nothing is started, created or changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msrun.cli.options.catalog import PARALLEL
from msrun.cli.options.command_line import read_command_line
from msrun.cli.options.parsers import span
from msrun.cli.options.table import ALL, ENV_OF, JSON, OUTPUT_DIR, PLAN_TABLE
from msrun.cli.output import answer
from msrun.errors import UsageError

if TYPE_CHECKING:
    from msrun.cli.job.prepare import JobRequest, Prepared
    from msrun.cli.system import System

SUMMARY = (
    "Show what `msrun run` would do with the same words; nothing is started.  "
    "Without SCRIPT, show the mesh of --parallel for any --worker-num."
)
RANKS_MAX = 1 << 20


def plan(args: Sequence[str], system: System) -> int:
    """Print the plan of the job that `args` describe."""
    line = read_command_line("msrun plan", SUMMARY, PLAN_TABLE, args)
    from msrun.cli.job.prepare import read_request  # Help needs none of it.

    request = read_request(line, PLAN_TABLE, system)
    if request.is_fleet:
        from msrun.cli.job.fleet import plan_fleet

        plan_fleet(request, system)
        return 0
    if given := request.settings.get(OUTPUT_DIR):
        raise UsageError(f"{given.cite()} needs a backend that starts other nodes")
    is_mesh = not request.has_program and request.settings.get(PARALLEL)
    _plan_mesh(request, system) if is_mesh else _plan_job(request, system)
    return 0


def _plan_job(request: JobRequest, system: System) -> None:
    from msrun.cli.job.prepare import prepare
    from msrun.cli.render import plan_text
    from msrun.cli.render.section import show

    prepared = prepare(request, system)
    env_of = _env_of(request, prepared)
    if request.settings.value(JSON):
        answer(json.dumps(plan_text.document(prepared), indent=2))
        return
    is_all = request.settings.value(ALL)
    sections = plan_text.sections(prepared, is_all=is_all, env_of=env_of)
    show(sections, is_terminal=system.is_terminal())


def _plan_mesh(request: JobRequest, system: System) -> None:
    """Print the mesh of `--parallel` for a job without a program."""
    from msrun.cli.job.draft import merge_env
    from msrun.cli.job.formation import count_ranks
    from msrun.cli.job.parallel import fit_parallel
    from msrun.cli.render import plan_text
    from msrun.cli.render.section import show

    settings = request.settings
    if given := settings.get(ENV_OF):
        raise UsageError(f"{given.cite()} needs a SCRIPT")
    ranks = count_ranks(settings, system.read_machine(merge_env(settings).value), system)
    if ranks > RANKS_MAX:
        raise UsageError(f"a mesh of {ranks} ranks is more than plan shows (at most {RANKS_MAX})")
    parallel = fit_parallel(settings.get(PARALLEL), ranks)
    if settings.value(JSON):
        answer(json.dumps(plan_text.mesh_document(parallel, request.notes), indent=2))
        return
    sections = plan_text.mesh_sections(parallel, request.notes, is_all=settings.value(ALL))
    show(sections, is_terminal=system.is_terminal())


def _env_of(request: JobRequest, prepared: Prepared) -> int | None:
    """Return the rank whose environment is wanted."""
    given = request.settings.get(ENV_OF)
    if given is None:
        return None
    if not prepared.plan.has_ranks:
        raise UsageError(
            f"{given.cite()}: the ranks of this node are not known before the job forms",
            hint="give it a --node-rank among a fixed number of nodes",
        )
    ranks = [worker.rank for worker in prepared.plan.workers]
    if given.value not in ranks:
        raise UsageError(
            f"{given.cite()} is no rank of this node (choose {span(len(ranks), ranks[0])})"
        )
    return given.value
