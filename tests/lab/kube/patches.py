"""The four kinds of patches, of which the last keeps book of who owns which field."""

from __future__ import annotations

import copy
import json

from kube.failures import ApiError

# What tells the items of a list apart, most telling first.
_KEYS = ("name", "mountPath", "containerPort", "port", "topologyKey", "type", "uid", "ip")
_ATOMIC = {"command", "args", "rules", "subjects", "finalizers", "tolerations", "values"}


def merge(target: object, patch: object) -> object:
    """Return `target` with a JSON merge patch, RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    target = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        else:
            target[key] = merge(target.get(key), value)
    return target


def strategic_merge(target: object, patch: object) -> object:
    """Return `target` with a patch that names the items of lists by their keys."""
    if not isinstance(patch, dict):
        return _merge_lists(target, patch) if isinstance(patch, list) else patch
    if patch.get("$patch") == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    target = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if key.startswith("$setElementOrder/") or key == "$retainKeys":
            continue
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.partition("/")[2]
            target[name] = [item for item in target.get(name, ()) if item not in value]
        elif value is None:
            target.pop(key, None)
        elif key in _ATOMIC and key != "finalizers":
            target[key] = copy.deepcopy(value)
        else:
            target[key] = strategic_merge(target.get(key), value)
    return target


def _merge_lists(target: object, patch: list) -> list:
    target = list(target) if isinstance(target, list) else []
    key = _key_of([*target, *patch])
    if key is None:
        if patch and all(isinstance(item, str) for item in patch):
            return [*target, *(item for item in patch if item not in target)]
        return copy.deepcopy(patch)
    for item in patch:
        places = [i for i, old in enumerate(target) if old.get(key) == item.get(key)]
        if item.get("$patch") == "delete":
            target = [old for i, old in enumerate(target) if i not in places]
        elif places:
            target[places[0]] = strategic_merge(target[places[0]], item)
        else:
            target.append(copy.deepcopy(item))
    return target


def _key_of(items: list) -> str | None:
    if not items or not all(isinstance(item, dict) for item in items):
        return None
    return next((key for key in _KEYS if all(key in item for item in items)), None)


def json_patch(target: object, operations: list) -> object:
    """Return `target` after the operations of a JSON patch, RFC 6902."""
    document = {"": copy.deepcopy(target)}
    for operation in operations:
        kind, path = operation["op"], _steps(operation["path"])
        if kind in ("copy", "move"):
            value = copy.deepcopy(_at(document, _steps(operation["from"])))
            if kind == "move":
                _remove(document, _steps(operation["from"]))
            _put(document, path, value, insert=True)
        elif kind == "remove":
            _remove(document, path)
        elif kind == "test":
            if _at(document, path) != operation["value"]:
                raise ApiError(422, "Invalid", f"testing path {operation['path']} value failed")
        else:
            _put(document, path, copy.deepcopy(operation["value"]), insert=kind == "add")
    return document[""]


def _steps(pointer: str) -> list[str]:
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")]


def _at(document: object, steps: list[str]) -> object:
    for step in steps:
        try:
            document = document[int(step) if isinstance(document, list) else step]
        except (LookupError, TypeError, ValueError):
            text = f"json patch: {'/'.join(steps)} is missing"
            raise ApiError(422, "Invalid", text) from None
    return document


def _put(document: object, steps: list[str], value: object, *, insert: bool) -> None:
    parent = _at(document, steps[:-1])
    if not isinstance(parent, list):
        parent[steps[-1]] = value
    elif steps[-1] == "-":
        parent.append(value)
    elif insert:
        parent.insert(int(steps[-1]), value)
    else:
        parent[int(steps[-1])] = value


def _remove(document: object, steps: list[str]) -> None:
    _at(document, steps)
    parent = _at(document, steps[:-1])
    del parent[int(steps[-1]) if isinstance(parent, list) else steps[-1]]


# Server-side apply.  A field is the path to a leaf; an item of a list with keys is a step
# `k:{...}`.


def apply(current: dict | None, wanted: dict, manager: str, *, force: bool) -> dict:
    """Return what `manager` gets when it applies `wanted`: its fields, and nobody else's.

    Fields that it applied before and no longer names go, unless others own them too.

    Raises:
        ApiError: Others own a field that is to change, and `force` was not asked for.
    """
    current = copy.deepcopy(current or {})
    entries = current.get("metadata", {}).pop("managedFields", [])
    owned = {e["manager"]: set(_read_fields(e["fieldsV1"])) for e in entries}
    wanted = copy.deepcopy(wanted)
    wanted.get("metadata", {}).pop("managedFields", None)
    new = {path: value for path, value in _leaves(wanted) if path[0] not in _IDENTITY}
    now = dict(_leaves(current))
    for other, fields in owned.items():
        clash = sorted(p for p in fields & new.keys() if other != manager and now.get(p) != new[p])
        if clash and not force:
            said = ", ".join("".join(map(_spell, path)) for path in clash)
            raise ApiError(409, "Conflict", f'Apply failed with conflicts with "{other}": {said}')
        fields.difference_update(clash)
    kept = set().union(*(fields for other, fields in owned.items() if other != manager))
    for path in owned.get(manager, set()) - new.keys() - kept:
        _drop(current, path)
    result = _overlay(current, wanted)
    owned[manager] = set(new)
    result.setdefault("metadata", {})["managedFields"] = [
        {
            "manager": name,
            "operation": "Apply",
            "apiVersion": wanted["apiVersion"],
            "fieldsType": "FieldsV1",
            "fieldsV1": _write_fields(fields),
        }
        for name, fields in sorted(owned.items())
        if fields
    ]
    return result


_IDENTITY = {"apiVersion", "kind"}


def _overlay(target: object, patch: object) -> object:
    if isinstance(patch, dict):
        target = dict(target) if isinstance(target, dict) else {}
        return target | {key: _overlay(target.get(key), value) for key, value in patch.items()}
    if isinstance(patch, list) and isinstance(target, list) and _key_of([*target, *patch]):
        return _merge_lists(target, patch)
    return copy.deepcopy(patch)


def _leaves(value: object, path: tuple = ()):
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list) and (key := _key_of(value)):
        for item in value:
            yield from _leaves(item, (*path, "k:" + json.dumps({key: item[key]})))
    else:
        yield path, value


def _drop(value: object, path: tuple) -> None:
    """Remove a leaf, and what is empty without it."""
    first, *rest = path
    if isinstance(value, list):
        ((key, name),) = json.loads(first[2:]).items()
        inner = next((item for item in value if item.get(key) == name), None)
        if inner is not None and rest:
            _drop(inner, tuple(rest))
            if not set(inner) - {key}:
                value.remove(inner)
    elif isinstance(value, dict) and first in value:
        if rest:
            _drop(value[first], tuple(rest))
        if not rest or value[first] in ({}, []):
            del value[first]


def _spell(step: str) -> str:
    return f"[{step[2:]}]" if step.startswith("k:") else f".{step}"


def _write_fields(fields: set) -> dict:
    written: dict = {}
    for path in sorted(fields):
        inner = written
        for step in path:
            inner = inner.setdefault(step if step.startswith("k:") else f"f:{step}", {})
    return written


def _read_fields(written: dict, path: tuple = ()):
    if not written:
        yield path
    for step, inner in written.items():
        yield from _read_fields(inner, (*path, step if step.startswith("k:") else step[2:]))
