"""Matches names of modules and parameters; a pattern that matches nothing is an error."""

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
        patterns: Patterns of `fnmatch`; `*` also matches dots.
        names: Names of modules or parameters.
        key: Path of the patterns in the configuration, for messages.

    Raises:
        ConfigError: A pattern matches no name.
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
    """Return the names that are most similar to `pattern`."""
    real = [name for name in names if name]
    close = difflib.get_close_matches(pattern, real, n=_SHOWN_MAX, cutoff=0.5) or real[:_SHOWN_MAX]
    return f"choose such as {', '.join(close)}" if close else "there are no names"
