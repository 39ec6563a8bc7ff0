"""Names by pattern, as the configuration gives them; a pattern that matches nothing is an error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from msrun.errors import ConfigError
from msrun.parallel.config import ROOT

_SHOWN_MAX = 8


def matching(patterns: Iterable[str], names: Sequence[str], key: str) -> set[str]:
    """Return the `names` that any of `patterns` matches.

    Args:
        patterns: As of `fnmatch`; `*` also crosses dots.
        names: Names of modules or parameters.
        key: Where the patterns stand in the configuration, for messages.

    Raises:
        ConfigError: A pattern matches none.
    """
    matched: set[str] = set()
    for pattern in patterns:
        hits = {name for name in names if fnmatchcase(name, pattern)}
        if not hits:
            raise ConfigError(
                f"{ROOT}.{key}: {pattern!r} matches nothing ({_choices(pattern, names)})"
            )
        matched |= hits
    return matched


def _choices(pattern: str, names: Sequence[str]) -> str:
    """Return the names that were most likely meant."""
    real = [name for name in names if name]
    close = difflib.get_close_matches(pattern, real, n=_SHOWN_MAX, cutoff=0.5) or real[:_SHOWN_MAX]
    return f"choose such as {', '.join(close)}" if close else "there are no names"
