"""The JobSet controller, as far as one replicated Job needs it: it makes Jobs and a Service.

A cluster has it where the definition of JobSet was created, as `DEFINITION` is.
"""

from __future__ import annotations

import contextlib
import copy

from kube.failures import ApiError
from kube.jobs import condition, owner_reference
from kube.store import ObjectStore, timestamp

NAME = "jobset.sigs.k8s.io/jobset-name"
REPLICATED = "jobset.sigs.k8s.io/replicatedjob-name"
INDEX = "jobset.sigs.k8s.io/job-index"
_LOOSE = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "jobsets.jobset.x-k8s.io"},
    "spec": {
        "group": "jobset.x-k8s.io",
        "scope": "Namespaced",
        "names": {
            "kind": "JobSet",
            "listKind": "JobSetList",
            "plural": "jobsets",
            "singular": "jobset",
        },
        "versions": [
            {
                "name": "v1alpha2",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "apiVersion": {"type": "string"},
                            "kind": {"type": "string"},
                            "metadata": {"type": "object"},
                            "spec": _LOOSE,
                            "status": _LOOSE,
                        },
                    }
                },
            }
        ],
    },
}


def sync_all(store: ObjectStore) -> None:
    """Take the next steps of every JobSet."""
    if ("jobset.x-k8s.io/v1alpha2", "jobsets") not in store.resources:
        return
    for jobset in store.list("jobsets"):
        if not jobset["metadata"].get("deletionTimestamp"):
            with contextlib.suppress(ApiError):
                _sync(store, jobset)


def _sync(store: ObjectStore, jobset: dict) -> None:
    metadata, spec = jobset["metadata"], jobset["spec"]
    namespace, name = metadata["namespace"], metadata["name"]
    jobs = [
        job
        for job in store.list("jobs", namespace)
        if job["metadata"].get("labels", {}).get(NAME) == name
    ]
    if condition(jobset, "Completed") or condition(jobset, "Failed"):
        for job in jobs:
            if not (condition(job, "Complete") or condition(job, "Failed")):
                store.delete("jobs", namespace, job["metadata"]["name"], propagation="Background")
        return
    _make_service(store, jobset)
    there = {job["metadata"]["name"]: job for job in jobs}
    wanted = [
        (each, index) for each in spec["replicatedJobs"] for index in range(each.get("replicas", 1))
    ]
    for each, index in wanted:
        job = there.get(f"{name}-{each['name']}-{index}")
        if job is None:
            store.create("jobs", namespace, _job(jobset, each, index))
        elif bool(job["spec"].get("suspend")) != bool(spec.get("suspend")):
            _suspend(store, job, truth=bool(spec.get("suspend")))
    failed = next((job for job in jobs if condition(job, "Failed")), None)
    if failed is not None and spec.get("failurePolicy", {}).get("maxRestarts", 0) == 0:
        text = f"jobset failed due to one or more job failures ({failed['metadata']['name']})"
        _end(store, jobset, "Failed", "FailedJobs", text)
    elif len(there) == len(wanted) and all(condition(job, "Complete") for job in jobs):
        _end(store, jobset, "Completed", "AllJobsCompleted", "jobset completed successfully")


def _make_service(store: ObjectStore, jobset: dict) -> None:
    network = jobset["spec"].get("network", {})
    metadata = jobset["metadata"]
    name = network.get("subdomain", metadata["name"])
    if store.find("services", metadata["namespace"], name) is None:
        spec = {"clusterIP": "None", "selector": {NAME: metadata["name"]}}
        spec["publishNotReadyAddresses"] = network.get("publishNotReadyAddresses", True)
        owners = [owner_reference(jobset)]
        service = {"metadata": {"name": name, "ownerReferences": owners}, "spec": spec}
        store.create("services", metadata["namespace"], service)


def _job(jobset: dict, each: dict, index: int) -> dict:
    name = jobset["metadata"]["name"]
    template = copy.deepcopy(each["template"])
    labels = {NAME: name, REPLICATED: each["name"], INDEX: str(index)}
    spec = {**template["spec"], "suspend": bool(jobset["spec"].get("suspend"))}
    pods = spec["template"].setdefault("metadata", {})
    pods["labels"] = {**pods.get("labels", {}), **labels}
    network = jobset["spec"].get("network", {})
    if network.get("enableDNSHostnames", True):
        spec["template"]["spec"]["subdomain"] = network.get("subdomain", name)
    metadata = {
        "name": f"{name}-{each['name']}-{index}",
        "labels": {**template.get("metadata", {}).get("labels", {}), **labels},
        "ownerReferences": [owner_reference(jobset)],
    }
    return {"metadata": metadata, "spec": spec}


def _suspend(store: ObjectStore, job: dict, *, truth: bool) -> None:
    def edit(new: dict) -> None:
        new["spec"]["suspend"] = truth
        new["metadata"].pop("resourceVersion")

    store.change("jobs", job["metadata"]["namespace"], job["metadata"]["name"], edit)


def _end(store: ObjectStore, jobset: dict, kind: str, reason: str, message: str) -> None:
    held = {"type": kind, "status": "True", "reason": reason, "message": message}
    where = jobset["metadata"]["namespace"], jobset["metadata"]["name"]
    conditions = [{**held, "lastTransitionTime": timestamp()}]
    store.set_status("jobsets", *where, {"conditions": conditions})
