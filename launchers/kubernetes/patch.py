"""The user's YAML, merged over the objects that we render, as `msrun.overlay` says.

A document with a `kind` is for the object of that kind, one without is for the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from msrun.errors import UsageError
from msrun.overlay import merge
from msrun.units import quoted

Manifest = dict[str, Any]
# What connects the objects with each other, so that no patch may change it.
_FIXED = ("apiVersion", "kind", "metadata.name", "metadata.namespace")
_JOBS = ("Job", "JobSet")


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
