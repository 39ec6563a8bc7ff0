"""Words of a verb that is no job: read by click, refused in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from msrun.errors import UsageError


def read_words(
    name: str, summary: str, params: Sequence[click.Parameter], args: Sequence[str]
) -> dict[str, Any]:
    """Return the values of `params` that `args` give.

    Args:
        name: The words before `args`, for the help.
        summary: First sentences of the help.
        params: What is known.
        args: Words after the verb.

    Raises:
        UsageError: A word is unknown, missing or out of range.
        click.exceptions.Exit: Help was asked for, and printed.
    """
    settings = {"help_option_names": ["--help", "-h"], "max_content_width": 100}
    command = click.Command(name, params=list(params), help=summary, context_settings=settings)
    try:
        return command.make_context(name, list(args)).params
    except click.NoSuchOption as error:
        raise UsageError(f"there is no option {error.option_name}") from None
    except click.UsageError as error:
        message = error.format_message().rstrip(".")
        raise UsageError(message[:1].lower() + message[1:]) from None
