"""Pattern of a worker's log file, checked so that no two workers share one."""

from __future__ import annotations

from string import Formatter

from msrun.errors import UsageError
from msrun.units import quoted

PLACEHOLDERS = ("rank", "local_rank", "host", "hostname", "ip")
_LENGTH_MAX = 200


def parse_log_name(value: str) -> str:
    """Return the pattern of `--worker-log-name`, without `.log` and with a rank in it.

    As MindSpore does, `_{rank}` is appended to a pattern that holds neither rank.
    """
    pattern = value.removesuffix(".log")
    if "/" in pattern or not pattern.isprintable() or not 0 < len(pattern) <= _LENGTH_MAX:
        raise UsageError(
            f"{quoted(value)} is no file name (choose a name without '/'; --log-dir has the path)"
        )
    names = _placeholders(value, pattern)
    return pattern if names & {"rank", "local_rank"} else pattern + "_{rank}"


def with_rank(pattern: str) -> str:
    """Return `pattern` with the rank in it, for nodes that share a directory."""
    is_unique = any(name == "rank" for _, name, _, _ in Formatter().parse(pattern))
    return pattern if is_unique else pattern + "_{rank}"


def _placeholders(value: str, pattern: str) -> set[str]:
    """Return the placeholders of `pattern`, all of them known and bare."""
    choices = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    try:
        fields = list(Formatter().parse(pattern))
    except ValueError:
        raise UsageError(
            f"{quoted(value)} has an unmatched brace (choose from {choices})"
        ) from None
    names = {name for _, name, _, _ in fields if name is not None}
    for _, name, form, conversion in fields:
        if name is not None and (name not in PLACEHOLDERS or form or conversion):
            text = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise UsageError(
                f"{quoted(value)} has the unknown placeholder {{{text}}} (choose from {choices})"
            )
    return names
