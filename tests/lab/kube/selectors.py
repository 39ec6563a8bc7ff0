"""Which objects a request means: label and field selectors."""

from __future__ import annotations

import re

_SET = re.compile(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)")
_EQUAL = re.compile(r"\s*(!=|==?)\s*")
_COMMA = re.compile(r",(?![^(]*\))")


def has_labels(obj: dict, selector: str | None) -> bool:
    labels = obj["metadata"].get("labels") or {}
    terms = filter(None, map(str.strip, _COMMA.split(selector or "")))
    return all(_holds(term, labels) for term in terms)


def _holds(term: str, labels: dict) -> bool:
    if found := _SET.fullmatch(term):
        is_in = labels.get(found[1]) in map(str.strip, found[3].split(","))
        return is_in == (found[2] == "in")
    if found := _EQUAL.search(term):
        is_equal = labels.get(term[: found.start()]) == term[found.end() :]
        return is_equal == (found[1] != "!=")
    if term.startswith("!"):
        return term[1:].strip() not in labels
    return term in labels


def has_match_labels(obj: dict, selector: dict) -> bool:
    """Whether an object is meant by a selector as Jobs and Services write it."""
    wanted = selector.get("matchLabels", selector if "matchExpressions" not in selector else {})
    labels = obj["metadata"].get("labels") or {}
    return bool(wanted) and wanted.items() <= labels.items()


def has_fields(obj: dict, selector: str | None) -> bool:
    for term in filter(None, (selector or "").split(",")):
        found = _EQUAL.search(term)
        value = dig(obj, term[: found.start()])
        is_equal = ("" if value is None else str(value)) == term[found.end() :]
        if is_equal != (found[1] != "!="):
            return False
    return True


def dig(obj: object, path: str) -> object:
    """Return what is at a path such as `.status.conditions[?(@.type=="Ready")].status`."""
    steps = re.findall(
        r"""\[\?\(@\.(\w+)\s*==\s*["'](.*?)["']\)\]|\[['"](.*?)['"]\]|([^.\[\]]+)""", path
    )
    for key, value, quoted, plain in steps:
        if key:
            obj = next((item for item in obj or () if str(item.get(key)) == value), None)
        elif isinstance(obj, dict):
            obj = obj.get(quoted or plain.replace("\\", ""))
        elif isinstance(obj, list) and plain.isdigit():
            obj = obj[int(plain)] if int(plain) < len(obj) else None
        else:
            return None
    return obj
