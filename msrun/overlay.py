"""One document over another: how a user's YAML is merged over an object that we render.

A mapping merges key by key and null removes a key.  A list of mappings that all have a `mountPath`,
or else a `name`, merges by it.  Anything else replaces what was there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from msrun.errors import UsageError
from msrun.units import quoted

# What an entry of a list is known by; the first one that all entries have.
_IDENTITIES = ("mountPath", "name")


def merge(base: Any, patch: Any) -> Any:
    """Return `base` with `patch` over it; neither is changed.

    Raises:
        UsageError: A list of the patch has two entries of one name.
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = merge(base[key], value) if key in base else _without_null(value)
        return merged
    for key in _IDENTITIES:
        if _has_each(base, key) and _has_each(patch, key):
            return list(_merge_lists(base, patch, key))
    return _without_null(patch)


def _merge_lists(
    base: list[dict[str, Any]], patch: list[dict[str, Any]], key: str
) -> Iterator[dict[str, Any]]:
    changes = {entry[key]: entry for entry in patch}
    if len(changes) < len(patch):
        names = sorted(entry[key] for entry in patch)
        twice = next(name for name, other in itertools.pairwise(names) if name == other)
        raise UsageError(f"the patch has {key} {quoted(twice)} twice in one list")
    for entry in base:
        change = changes.pop(entry[key], None)
        yield entry if change is None else merge(entry, change)
    yield from (_without_null(entry) for entry in changes.values())


def _has_each(value: object, key: str) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(entry, dict) and isinstance(entry.get(key), str) for entry in value)
    )


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_null(each) for each in value]
    return value
