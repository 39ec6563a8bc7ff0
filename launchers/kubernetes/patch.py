"""The user's YAML, merged over the objects that we render.

A mapping merges key by key and null removes a key.  A list of mappings that all have a `mountPath`,
or else a `name`, merges by it.  Anything else replaces what we rendered.  A document with a `kind`
is for the object of that kind, one without is for the job.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from msrun.errors import UsageError
from msrun.units import quoted

Manifest = dict[str, Any]
# What connects the objects with each other, so that no patch may change it.
_FIXED = ("apiVersion", "kind", "metadata.name", "metadata.namespace")
_JOBS = ("Job", "JobSet")
# What an entry of a list is known by; the first one that all entries have.
_IDENTITIES = ("mountPath", "name")


def read_patches(text: str, name: str) -> list[Manifest]:
    """Return the documents of a file that messages call `name`.

    Raises:
        UsageError: It is no YAML, or a document is no mapping.
    """
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{name} is no YAML: {reason}") from None
    for document in documents:
        if not isinstance(document, dict):
            raise UsageError(f"{name} holds {quoted(str(document))}, which is no mapping")
    return documents


def apply_patches(
    manifests: Sequence[Manifest], patches: Sequence[Manifest], name: str
) -> list[Manifest]:
    """Return the objects with every patch merged over the one that it is for.

    Raises:
        UsageError: A patch is for an object that there is not, or changes what identifies it.
    """
    merged = list(manifests)
    for patch in patches:
        kind = patch.get("kind")
        kinds = [manifest["kind"] for manifest in merged]
        wanted = _JOBS if kind is None else (kind,)
        number = next((n for n, each in enumerate(kinds) if each in wanted), None)
        if number is None:
            choices = ", ".join(kinds)
            raise UsageError(f"{name} has a {quoted(str(kind))} (choose {choices})")
        for path in _FIXED:
            given, own = _at(patch, path), _at(merged[number], path)
            if given is not None and given != own:
                raise UsageError(
                    f"{name} sets {path} of the {kinds[number]} to {quoted(str(given))}, and other "
                    f"objects rely on {quoted(str(own))}",
                    hint="choose the name with --job-id and the namespace with --namespace",
                )
        merged[number] = merge(merged[number], patch)
    return merged


def _at(document: Mapping[str, Any], path: str) -> object:
    value: Any = document
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def merge(base: Any, patch: Any) -> Any:
    """Return `base` with `patch` over it; neither is changed."""
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


def _merge_lists(base: list[Manifest], patch: list[Manifest], key: str) -> Iterator[Manifest]:
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
