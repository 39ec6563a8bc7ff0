"""What all sections of the parallel configuration have: their base, and checks of one key."""

from __future__ import annotations

import msgspec

from msrun.errors import UsageError
from msrun.units import parse_size


class ConfigSection(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One mapping of the configuration file; an unknown key is an error."""


def size(section: ConfigSection, name: str) -> int:
    """Return the bytes that a key is, as a number or text; refuse what is none."""
    value = getattr(section, name)
    if isinstance(value, int):
        at_least(section, name, 0)
        return value
    try:
        return parse_size(value)
    except UsageError as error:
        raise ValueError(f"{name}: {error.message}") from None


def given(section: ConfigSection) -> list[str]:
    """Return the keys of `section` whose values differ from the defaults, in order."""
    return list(msgspec.to_builtins(section))


def at_least(section: ConfigSection, name: str, least: int) -> None:
    """Refuse a number below `least`."""
    value = getattr(section, name)
    if value < least:
        raise ValueError(f"{name}: {value} must be at least {least}")
