"""What `kubectl get` prints: the columns of a kind."""

from __future__ import annotations

import calendar
import time

from kube.resources import Resource
from kube.selectors import dig

_BUILT_IN = {
    "pods": (("Ready", None), ("Status", None), ("Restarts", None)),
    "jobs": (("Status", None), ("Completions", None)),
    "nodes": (("Status", None),),
}


def table(resource: Resource, objects: list[dict], metadata: dict | None = None) -> dict:
    """Return objects as the server-side Table of meta.k8s.io/v1."""
    columns = [{"name": "Name", "type": "string", "format": "name"}]
    columns += [{"name": name, "type": "string"} for name, _ in _BUILT_IN.get(resource.plural, ())]
    columns += [{"name": c["name"], "type": c["type"]} for c in resource.columns]
    if not any(column["name"] == "Age" for column in columns):
        columns.append({"name": "Age", "type": "date"})
    for column in columns:
        column |= {"format": column.get("format", ""), "description": "", "priority": 0}
    rows = [{"cells": _cells(resource, obj, len(columns)), "object": _meta(obj)} for obj in objects]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata or {},
        "columnDefinitions": columns,
        "rows": rows,
    }


def _meta(obj: dict) -> dict:
    kind = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
    return {**kind, "metadata": obj["metadata"]}


def _cells(resource: Resource, obj: dict, count: int) -> list:
    cells = [obj["metadata"]["name"], *_cells_of(resource.plural, obj)]
    for column in resource.columns:
        value = dig(obj, column["jsonPath"])
        is_date = column["type"] == "date" and value
        cells.append(_age(value) if is_date else value)
    return cells if len(cells) == count else [*cells, _age(obj["metadata"]["creationTimestamp"])]


def _cells_of(plural: str, obj: dict) -> list:
    status = obj.get("status", {})
    if plural == "pods":
        containers = status.get("containerStatuses", ())
        ready = sum(c.get("ready", False) for c in containers)
        waiting = (c["state"].get("waiting", {}).get("reason") for c in containers)
        word = next(filter(None, waiting), None) or status.get("reason") or status.get("phase")
        if obj["metadata"].get("deletionTimestamp"):
            word = "Terminating"
        restarts = sum(c.get("restartCount", 0) for c in containers)
        return [f"{ready}/{len(obj['spec']['containers'])}", word, restarts]
    if plural == "jobs":
        done = [c["type"] for c in status.get("conditions", ()) if c["status"] == "True"]
        wanted = obj["spec"].get("completions", 1)
        return [done[-1] if done else "Running", f"{status.get('succeeded', 0)}/{wanted}"]
    if plural == "nodes":
        is_ready = dig(status, '.conditions[?(@.type=="Ready")].status') == "True"
        return ["Ready" if is_ready else "NotReady"]
    return []


def _age(since: str) -> str:
    return f"{int(time.time() - calendar.timegm(time.strptime(since, '%Y-%m-%dT%H:%M:%SZ')))}s"
