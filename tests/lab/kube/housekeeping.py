"""What a cluster does by itself besides Jobs: owners, namespaces, nodes, and names of pods."""

from __future__ import annotations

import contextlib
import time

from kube.admission import requested
from kube.failures import ApiError
from kube.jobs import has_finished
from kube.selectors import dig, has_match_labels
from kube.store import ObjectStore, timestamp


def collect_garbage(store: ObjectStore) -> None:
    """Delete what has lost all its owners, and end deletions that waited for dependents."""
    objects = store.everything()
    alive = {obj["metadata"]["uid"] for _, obj in objects}
    dependents: dict[str, list] = {}
    for resource, obj in objects:
        owners = [r["uid"] for r in obj["metadata"].get("ownerReferences", ())]
        for uid in owners:
            dependents.setdefault(uid, []).append((resource, obj))
        if owners and not alive & set(owners) and not obj["metadata"].get("deletionTimestamp"):
            _delete(store, resource, obj)
    for resource, obj in objects:
        _end_deletion(store, resource, obj, dependents.get(obj["metadata"]["uid"], []))
        if resource.plural == "namespaces" and obj["metadata"].get("deletionTimestamp"):
            _empty(store, resource, obj, objects)


def _end_deletion(store: ObjectStore, resource, obj: dict, below: list) -> None:
    finalizers = obj["metadata"].get("finalizers", ())
    if "foregroundDeletion" in finalizers:
        for kind, dependent in below:
            if not dependent["metadata"].get("deletionTimestamp"):
                _delete(store, kind, dependent)
        if not below:
            _without_finalizer(store, resource, obj, "foregroundDeletion")
    if "orphan" in finalizers:
        for kind, dependent in below:
            _disown(store, kind, dependent, obj["metadata"]["uid"])
        _without_finalizer(store, resource, obj, "orphan")


def _empty(store: ObjectStore, resource, namespace: dict, objects: list) -> None:
    name = namespace["metadata"]["name"]
    inside = [(r, o) for r, o in objects if o["metadata"].get("namespace") == name]
    for kind, content in inside:
        if not content["metadata"].get("deletionTimestamp"):
            _delete(store, kind, content)
    if not inside:
        store.finish(resource, namespace)


def _delete(store: ObjectStore, resource, obj: dict) -> None:
    with contextlib.suppress(ApiError):
        store.delete(resource, obj["metadata"].get("namespace"), obj["metadata"]["name"])


def _edit(store: ObjectStore, resource, obj: dict, edit) -> None:
    with contextlib.suppress(ApiError):
        store.change(resource, obj["metadata"].get("namespace"), obj["metadata"]["name"], edit)


def _without_finalizer(store: ObjectStore, resource, obj: dict, word: str) -> None:
    def edit(new: dict) -> None:
        new["metadata"]["finalizers"] = [f for f in new["metadata"]["finalizers"] if f != word]

    _edit(store, resource, obj, edit)


def _disown(store: ObjectStore, resource, obj: dict, uid: str) -> None:
    def edit(new: dict) -> None:
        references = new["metadata"]["ownerReferences"]
        new["metadata"]["ownerReferences"] = [r for r in references if r["uid"] != uid]

    _edit(store, resource, obj, edit)


def schedule(store: ObjectStore, emit) -> None:
    """Give each waiting pod a node that has room, or say why none has."""
    nodes = [node for node in store.list("nodes") if is_ready(node)]
    pods = store.list("pods")
    for pod in pods:
        is_gated = pod["spec"].get("schedulingGates")
        if pod["spec"].get("nodeName") or pod["metadata"].get("deletionTimestamp") or is_gated:
            continue
        lacks: dict[str, int] = {}
        chosen = []
        for node in nodes:
            lack = _lack(node, pod, store.list("pods"))
            if lack:
                lacks[lack] = lacks.get(lack, 0) + 1
            else:
                chosen.append(node)
        if chosen:
            held = [p["spec"].get("nodeName") for p in store.list("pods") if not has_finished(p)]
            node = min(
                chosen, key=lambda n: (held.count(n["metadata"]["name"]), n["metadata"]["name"])
            )
            bind(store, pod, node["metadata"]["name"])
            emit(pod, "Normal", "Scheduled", f"Successfully assigned to {node['metadata']['name']}")
            continue
        reasons = ", ".join(f"{count} {lack}" for lack, count in sorted(lacks.items()))
        total = len(store.list("nodes"))
        text = f"0/{total} nodes are available: {reasons or 'none is ready'}."
        before = dig(pod, 'status.conditions[?(@.type=="PodScheduled")].message')
        if before != text:
            _set_unscheduled(store, pod, text)
            emit(pod, "Warning", "FailedScheduling", text)


def _lack(node: dict, pod: dict, pods: list[dict]) -> str | None:
    name = node["metadata"]["name"]
    labels = node["metadata"].get("labels", {})
    if node["spec"].get("unschedulable"):
        return "node(s) were unschedulable"
    if not (pod["spec"].get("nodeSelector") or {}).items() <= labels.items():
        return "node(s) didn't match Pod's node affinity/selector"
    tolerated = pod["spec"].get("tolerations", ())
    for taint in node["spec"].get("taints", ()):
        if not any(t.get("key") in (None, taint["key"]) for t in tolerated):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    has = {key: int(value) for key, value in node["status"]["allocatable"].items()}
    for other in pods:
        if other["spec"].get("nodeName") == name and not has_finished(other):
            for key, amount in {"pods": 1, **requested(other)}.items():
                has[key] = has.get(key, 0) - amount
    for key, amount in {"pods": 1, **requested(pod)}.items():
        if key not in ("cpu", "memory") and has.get(key, 0) < amount:
            return f"Insufficient {key}" if key != "pods" else "Too many pods"
    return None


def bind(store: ObjectStore, pod: dict, node: str) -> None:
    def edit(new: dict) -> None:
        new["spec"]["nodeName"] = node

    where = pod["metadata"]["namespace"], pod["metadata"]["name"]
    with contextlib.suppress(ApiError):
        store.change("pods", *where, edit)
        store.set_status("pods", *where, {"conditions": [state("PodScheduled")]})


def _set_unscheduled(store: ObjectStore, pod: dict, text: str) -> None:
    held = {**state("PodScheduled", "False"), "reason": "Unschedulable", "message": text}
    with contextlib.suppress(ApiError):
        where = pod["metadata"]["namespace"], pod["metadata"]["name"]
        store.set_status("pods", *where, {"conditions": [held]})


def state(kind: str, truth: str = "True") -> dict:
    return {"type": kind, "status": truth, "lastTransitionTime": timestamp()}


def is_ready(node: dict) -> bool:
    return dig(node, 'status.conditions[?(@.type=="Ready")].status') == "True"


class NodeLifecycle:
    """Evicts pods from nodes that fell silent, and ends those whose node was removed.

    Args:
        patience: Seconds for which a silent node keeps its pods; 300 in a real cluster.
    """

    def __init__(self, store: ObjectStore, emit, patience: float = 0.5) -> None:
        self._store, self._emit, self._patience = store, emit, patience
        self._silent: dict[str, float] = {}

    def sync(self) -> None:
        nodes = {node["metadata"]["name"]: node for node in self._store.list("nodes")}
        for name, node in nodes.items():
            if is_ready(node):
                self._silent.pop(name, None)
            else:
                self._silent.setdefault(name, time.monotonic())
        for pod in self._store.list("pods"):
            name = pod["spec"].get("nodeName")
            if not name and pod["metadata"].get("deletionTimestamp") and not has_finished(pod):
                # One that was never on a node, and that a finalizer keeps.
                where = pod["metadata"]["namespace"], pod["metadata"]["name"]
                with contextlib.suppress(ApiError):
                    self._store.set_status("pods", *where, {"phase": "Failed"})
                continue
            if name and name not in nodes:
                self._end(pod)
                continue
            since = self._silent.get(name, time.monotonic())
            is_going = pod["metadata"].get("deletionTimestamp") or has_finished(pod)
            if time.monotonic() - since >= self._patience and not is_going:
                text = "Taint manager: deleting due to NoExecute taint"
                disrupt(self._store, pod, "DeletionByTaintManager", text)
                self._emit(pod, "Normal", "TaintManagerEviction", "Marking for deletion Pod")

    def _end(self, pod: dict) -> None:
        """Remove a pod of which no kubelet will ever tell."""
        where = pod["metadata"]["namespace"], pod["metadata"]["name"]
        with contextlib.suppress(ApiError):
            if not has_finished(pod):
                held = _with_disruption(pod, "DeletionByPodGC", "PodGC: node no longer exists")
                self._store.set_status("pods", *where, {"phase": "Failed", "conditions": held})
            self._store.delete("pods", *where, grace=0)


def _with_disruption(pod: dict, reason: str, message: str) -> list[dict]:
    held = [c for c in pod["status"].get("conditions", ()) if c["type"] != "DisruptionTarget"]
    return [*held, {**state("DisruptionTarget"), "reason": reason, "message": message}]


def disrupt(store: ObjectStore, pod: dict, reason: str, message: str) -> None:
    """Delete a pod for the cluster's sake, and write down why."""
    where = pod["metadata"]["namespace"], pod["metadata"]["name"]
    with contextlib.suppress(ApiError):
        found = store.find("pods", *where) or pod
        held = _with_disruption(found, reason, message)
        store.set_status("pods", *where, {"conditions": held})
        store.delete("pods", *where)


def names(store: ObjectStore) -> dict[str, dict[str, list[str]]]:
    """Return, for each namespace, what names lead to which addresses from its pods.

    A Service's name leads to the pods themselves, also where it has an address of its own.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    namespaces = {ns["metadata"]["name"] for ns in store.list("namespaces")}
    for service in store.list("services"):
        name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
        selector = service["spec"].get("selector") or {}
        publishes = service["spec"].get("publishNotReadyAddresses", False)
        for pod in store.list("pods", namespace):
            address = pod["status"].get("podIP")
            is_up = dig(pod, 'status.conditions[?(@.type=="Ready")].status') == "True"
            if not address or has_finished(pod) or not (is_up or publishes):
                continue
            if not has_match_labels(pod, selector):
                continue
            found.setdefault(namespace, []).append((name, address))
            host = pod["spec"].get("hostname")
            if host and pod["spec"].get("subdomain") == name:
                found[namespace].append((f"{host}.{name}", address))
    known: dict[str, dict[str, list[str]]] = {namespace: {} for namespace in namespaces}
    for namespace, pairs in found.items():
        for name, address in pairs:
            full = f"{name}.{namespace}"
            for spelled in (full, f"{full}.svc", f"{full}.svc.cluster.local"):
                for other in namespaces:
                    known[other].setdefault(spelled, []).append(address)
            known[namespace].setdefault(name, []).append(address)
    return known
