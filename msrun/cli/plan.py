"""`msrun plan`: print what `run` would do; nothing is started, created or changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msrun.cli.command_line import read_command_line
from msrun.cli.output import answer
from msrun.cli.parsers import span
from msrun.cli.peer_options import ALL, ENV_OF, JSON, PLAN_TABLE
from msrun.errors import UsageError

if TYPE_CHECKING:
    from msrun.cli.prepare import Prepared
    from msrun.cli.world import World

SUMMARY = "Show what `msrun run` would do with the same words; nothing is started."


def plan(args: Sequence[str], world: World) -> int:
    """Print the plan of the job that `args` describe."""
    line = read_command_line("msrun plan", SUMMARY, PLAN_TABLE, args)
    from msrun.cli import plan_text  # Help needs none of it.
    from msrun.cli.prepare import prepare

    prepared = prepare(line, PLAN_TABLE, world)
    env_of = _env_of(prepared)
    if prepared.settings.value(JSON):
        answer(json.dumps(plan_text.document(prepared), indent=2))
        return 0
    sections = plan_text.sections(prepared, is_all=prepared.settings.value(ALL), env_of=env_of)
    plan_text.show(sections, is_terminal=world.is_terminal())
    return 0


def _env_of(prepared: Prepared) -> int | None:
    """Return the rank whose environment is wanted."""
    given = prepared.settings.get(ENV_OF)
    if given is None:
        return None
    count = len(prepared.plan.workers)
    if given.value >= count:
        msg = f"{given.cite()} is no rank of this node (choose {span(count)})"
        raise UsageError(msg)
    return given.value
