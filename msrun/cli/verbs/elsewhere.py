"""Verbs about a job that a launcher runs elsewhere: they are carried out where the job is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from msrun import backend
from msrun.errors import UsageError
from msrun.units import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from msrun.cli.system import System

_LAUNCHER = "--launcher"
OPTIONS = (
    click.Option([_LAUNCHER], metavar="kubernetes", help="Where the job runs, if not here."),
    click.Option(["--namespace"], metavar="NAME", help="For kubernetes, the namespace."),
    click.Option(["--context"], metavar="NAME", help="For kubernetes, the context."),
)
_NAMES = tuple(option.opts[0] for option in OPTIONS)


def find_verb(name: str, words: Sequence[str]) -> Callable[[Sequence[str], System], int] | None:
    """Return the verb `name` for a job that runs elsewhere, None if `words` are about one here."""
    is_about = any(word.partition("=")[0] in _NAMES for word in words)
    if not is_about or {"--help", "-h"} & set(words):
        return None
    return partial(_call, name)


def _call(name: str, words: Sequence[str], system: System) -> int:
    """Have the launcher carry out a verb, whose own options it gets as they are."""
    rest, given = _split(words)
    launcher = given.pop(_LAUNCHER, "")
    if launcher not in backend.ELSEWHERE:
        choices = ", ".join(backend.ELSEWHERE)
        if launcher:
            raise UsageError(f"{_LAUNCHER} {shown(launcher)} has no verbs (choose {choices})")
        raise UsageError(f"{next(iter(given))} needs {_LAUNCHER} {choices}")
    options = {option.removeprefix("--"): value for option, value in given.items()}
    return system.call_elsewhere(launcher, name, rest, options)


def _split(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the words that are the verb's, and the options about where the job is."""
    rest, given = list[str](), dict[str, str]()
    remaining = iter(words)
    for word in remaining:
        name, separator, value = word.partition("=")
        if name not in _NAMES:
            rest.append(word)
            continue
        value = value if separator else next(remaining, "")
        if not value:
            raise UsageError(f"{name} needs a value")
        given[name] = value
    return rest, given
