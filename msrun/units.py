"""Durations, sizes and ports: text to number and back, and their limits.

A duration is a `float` of seconds in code and `90s` or `1h30m` in text; a size is an
`int` of bytes in code and `4GiB` in text.
"""

from __future__ import annotations

import math
import re

from msrun.errors import UsageError

PORT_MAX = 65_535

_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
# Patterns are compiled where text is read: every rank imports this module.
_PART = r"([0-9]{1,15}(?:\.[0-9]{1,9})?)(ms|[dhms])"
_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,9})?"
_ENDLESS = ("inf", "infinity")

_BYTES = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)"

_QUOTED_MAX = 60
_SHOWN_MAX = 200
_MINUTES_FROM = 120


def quoted(text: str) -> str:
    """Return `text` as an error message shows it: quoted, escaped, and not too long."""
    return repr(text if len(text) <= _QUOTED_MAX else text[: _QUOTED_MAX - 3] + "...")


def shown(text: str) -> str:
    """Return `text` bare where that is readable, else `quoted`."""
    is_bare = text and text.isprintable() and len(text) <= _SHOWN_MAX
    return text if is_bare else quoted(text)


def counted(number: int, noun: str) -> str:
    """Return `number` with its noun, such as `1 node` or `4 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def parse_duration(text: str) -> float:
    """Return the seconds that `text` says: `90s`, `10m`, `1h30m`, `0.5`, or `inf`.

    Parts go from large to small; a number without a unit is seconds.

    Raises:
        UsageError: The text is no duration.
    """
    if text.lower() in _ENDLESS:
        return math.inf
    if re.fullmatch(_NUMBER, text):
        return float(text)
    parts = re.findall(_PART, text)
    units = [_SECONDS[unit] for _, unit in parts]
    is_whole = "".join(number + unit for number, unit in parts) == text
    if not parts or not is_whole or units != sorted(set(units), reverse=True):
        raise UsageError(
            f"{quoted(text)} is no duration (choose such as 90s, 10m, 1h30m, 0.5 or inf)"
        )
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def render_duration(seconds: float) -> str:
    """Return `seconds`, not negative, as `parse_duration` reads it, to the millisecond.

    Example: 90 -> `90s`, 600 -> `10m`, 5400 -> `1h30m`.
    """
    if math.isinf(seconds):
        return "inf"
    whole = round(seconds)
    if abs(seconds - whole) >= _SECONDS["ms"] / 2:
        return f"{seconds:.3f}".rstrip("0") + "s"
    if whole < _MINUTES_FROM:
        return f"{whole}s"
    text = ""
    for unit in ("d", "h", "m", "s"):
        count, whole = divmod(whole, round(_SECONDS[unit]))
        text += f"{count}{unit}" if count else ""
    return text


def parse_size(text: str) -> int:
    """Return the bytes that `text` says: `4GiB`, `512MiB`, `64kB`, or a plain number.

    Raises:
        UsageError: The text is no size, or not a whole number of bytes.
    """
    match = re.fullmatch(_SIZE, text)
    factor = _BYTES.get(match[2]) if match else None
    if match is None or factor is None:
        raise UsageError(
            f"{quoted(text)} is no size (choose such as 4GiB, 512MiB, 64kB or a number of bytes)"
        )
    whole, _, fraction = match[1].partition(".")
    scaled, rest = divmod(int(whole + fraction) * factor, int(10 ** len(fraction)))
    if rest:
        raise UsageError(f"{quoted(text)} is not a whole number of bytes")
    return scaled


def render_size(size: int) -> str:
    """Return `size` in the largest unit of two that divides it, as `parse_size` reads it.

    Example: 4194304 -> `4MiB`.
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _BYTES[unit] == 0:
            return f"{size // _BYTES[unit]}{unit}"
    return str(size)
