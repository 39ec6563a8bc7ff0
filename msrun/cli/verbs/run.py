"""`msrun run`: start the job and wait for its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msrun.cli.options.command_line import read_command_line
from msrun.cli.options.table import TABLE
from msrun.cli.output import say_notes

if TYPE_CHECKING:
    from msrun.cli.system import System

SUMMARY = "Start SCRIPT on every worker and wait for the job to end."


def run(args: Sequence[str], system: System) -> int:
    """Start the job that `args` describe and return its exit code."""
    line = read_command_line("msrun [run]", SUMMARY, TABLE, args)
    from msrun.cli.job.prepare import prepare, read_request  # Help needs none of it.

    request = read_request(line, TABLE, system)
    if request.is_fleet:
        from msrun.cli.job.fleet import run_fleet

        return run_fleet(request, system)
    prepared = prepare(request, system)
    say_notes(prepared.notes)
    return prepared.launcher.submit(prepared.plan)
