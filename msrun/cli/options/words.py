"""The words of one verb, read by click; a refusal by click becomes one UsageError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from msrun.cli.options.parsers import guess
from msrun.errors import UsageError


def read_words(
    name: str,
    summary: str,
    params: Sequence[click.Parameter],
    args: Sequence[str],
    *,
    epilog: str = "",
    keeps_unknown: bool = False,
) -> dict[str, Any]:
    """Return the values of `params` that `args` give.

    Args:
        name: The words before `args`, for the help.
        summary: First sentences of the help.
        params: What is known.
        args: Words after the verb.
        epilog: Last sentences of the help.
        keeps_unknown: Unknown options are words of the verb's argument.

    Raises:
        UsageError: A word is unknown, missing or out of range.
        click.exceptions.Exit: Help was asked for, and printed.
    """
    command = click.Command(
        name,
        params=list(params),
        help=summary,
        epilog=epilog,
        context_settings={**SETTINGS, "ignore_unknown_options": keeps_unknown},
    )
    return read_params(command, name, args)


def read_params(command: click.Command, name: str, args: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of `command` that `args` give; raises as `read_words` does."""
    try:
        return command.make_context(name, list(args)).params
    except click.NoSuchOption as error:
        choices = guess(error.possibilities or ())
        typed = (word.partition("=")[0] for word in args)
        name = error.option_name
        name = next((word for word in typed if with_hyphens(word) == name), name)
        raise UsageError(f"there is no option {name}{choices}") from None
    except click.UsageError as error:
        message = error.format_message().rstrip(".")
        raise UsageError(message[:1].lower() + message[1:]) from None


def with_hyphens(spelling: str) -> str:
    """Return an option as it stands in tables; people may type `_` for each `-`."""
    return spelling.replace("_", "-")


# How click reads and prints every verb.
SETTINGS: dict[str, Any] = {
    "help_option_names": ["--help", "-h"],
    "max_content_width": 100,
    "token_normalize_func": with_hyphens,
}
