"""One look at a job: read everything anew, decide, write the status, act.

The status is written under the version that was read, so of two who decide at once one is refused
before it has done anything.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import zlib
from collections.abc import Callable
from typing import Any, cast

from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import DynamicApiError, ResourceNotFoundError

from launchers.operator import decision, msjob, msjob_objects, msrunjob, msrunjob_objects
from launchers.operator.decision import (
    Action,
    Create,
    Decision,
    Delete,
    Object,
    Patch,
    RecordEvent,
    timestamp,
)
from launchers.operator.gang import GangScheduler
from launchers.operator.metrics import OperatorMetrics

CONFLICT, NOT_FOUND = 409, 404
# What the cluster answers to an object that breaks its rules, which the same object always will.
_NEVER = (400, 422)
_SECONDS = 20.0
_KEY_BYTES = 32
_SOURCE = "msrun-operator"

Key = tuple[str, str, str]
"""API version, namespace and name of a job."""


class JobReconciler:
    """Takes looks at jobs and does what was decided; runs in threads of its own.

    Args:
        client: The cluster.
        clock: Returns the seconds since 1970.
        metrics: Counts what is done.
        gang_scheduler: Who places the pods of every MSJob together; None is nobody.
    """

    def __init__(
        self,
        client: DynamicClient,
        clock: Callable[[], float],
        metrics: OperatorMetrics,
        gang_scheduler: GangScheduler | None = None,
    ) -> None:
        self._client = client
        self._clock = clock
        self._metrics = metrics
        self._gang_scheduler = gang_scheduler

    def look(self, key: Key) -> float | None:
        """Bring one job a step further; returns the seconds after which to look again.

        Raises:
            LookupError: There is no such job.
            DynamicApiError: The cluster refused something; the next look may fare better.
        """
        api_version, namespace, name = key
        kind = "MSJob" if api_version == msjob.API_VERSION else "MsrunJob"
        job = self._find(api_version, kind, namespace, name)
        if job is None:
            self._metrics.note_job(key, kind, None)
            raise LookupError(name)
        decided = self._decide(kind, job)
        if decided.status != (job.get("status") or {}):
            self._write_status(api_version, kind, job, decided.status)
        self._metrics.note_job(key, kind, str(decided.status.get("phase") or "Pending"))
        for action in decided.actions:
            try:
                self._act(action, job)
            except DynamicApiError as error:
                if not isinstance(action, Create) or error.status not in _NEVER:
                    raise
                text = f"the cluster refuses {_name_of(action.obj)}: {_reason(error)}"
                self._give_up(key, kind, text)
                return 0
            self._metrics.note_action(type(action).__name__)
        return decided.again_in

    def _give_up(self, key: Key, kind: str, text: str) -> None:
        """End a job of which the cluster refuses an object by its own rules, now and ever."""
        api_version, namespace, name = key
        job = self._find(api_version, kind, namespace, name)
        if job is None:
            raise LookupError(name)
        decided = decision.refused(job.get("status") or {}, kind, text, self._clock())
        self._write_status(api_version, kind, job, decided.status)
        for action in decided.actions:
            self._act(action, job)

    def _decide(self, kind: str, job: Object) -> Decision:
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        if kind == "MSJob":
            pods = self._list("Pod", namespace, label_selector=f"{msjob_objects.JOB}={name}")
            # While pods are missing, an event about the job itself says why.
            lacks = not (job.get("status") or {}).get("podsCreated")
            events = self._warnings(namespace, pods, ask=lacks)
            gangs = self._gang_scheduler
            return msjob.decide(job, pods, self._clock(), events=events, gang_scheduler=gangs)
        pods = self._list("Pod", namespace, label_selector=f"{msrunjob_objects.JOB}={name}")
        batch_job = self._find("batch/v1", "Job", namespace, name)
        lacks = batch_job is not None and len(pods) < int(batch_job["spec"].get("parallelism") or 1)
        events = self._warnings(namespace, pods, ask=lacks)
        return msrunjob.decide(job, batch_job, pods, self._clock(), events)

    def _warnings(self, namespace: str, pods: list[Object], *, ask: bool = False) -> list[Object]:
        """Return the warnings of a namespace where they may say why pods do not run."""
        if not ask and not any(decision.phase(pod) == "Pending" for pod in pods):
            return []
        return self._list("Event", namespace, field_selector="type=Warning")

    def _resource(self, api_version: str, kind: str) -> Any:
        return self._client.resources.get(api_version=api_version, kind=kind)

    def _find(self, api_version: str, kind: str, namespace: str, name: str) -> Object | None:
        try:
            resource = self._resource(api_version, kind)
            found = resource.get(namespace=namespace, name=name, _request_timeout=_SECONDS)
        except DynamicApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        return cast("Object", found.to_dict())

    def _list(self, kind: str, namespace: str, **selectors: str) -> list[Object]:
        resource = self._resource("v1", kind)
        found = resource.get(namespace=namespace, _request_timeout=_SECONDS, **selectors)
        # Items of a list do not repeat their kind.
        return [{"apiVersion": "v1", "kind": kind, **each} for each in found.to_dict()["items"]]

    def _write_status(self, api_version: str, kind: str, job: Object, status: Object) -> None:
        body = {**job, "status": status}
        namespace = job["metadata"]["namespace"]
        self._resource(api_version, kind).status.replace(
            body=body, namespace=namespace, _request_timeout=_SECONDS
        )

    def _act(self, action: Action, job: Object) -> None:
        namespace = job["metadata"]["namespace"]
        match action:
            case Create(obj):
                self._create(obj, job)
            case Patch(obj):
                resource = self._resource(obj["apiVersion"], obj["kind"])
                kind = "application/merge-patch+json"
                resource.patch(
                    body=obj, namespace=namespace, content_type=kind, _request_timeout=_SECONDS
                )
            case Delete():
                with _allowing(CONFLICT, NOT_FOUND):
                    options = {"preconditions": {"uid": action.uid}} if action.uid else {}
                    self._resource(action.api_version, action.kind).delete(
                        name=action.name,
                        namespace=action.namespace,
                        body={**options, "propagationPolicy": "Background"},
                        _request_timeout=_SECONDS,
                    )
            case RecordEvent():
                self._record(action, job)

    def _create(self, obj: Object, job: Object) -> None:
        """Create an object; a refusal stands in an event, once for each reason."""
        namespace = job["metadata"]["namespace"]
        try:
            resource = self._resource(obj["apiVersion"], obj["kind"])
            resource.create(body=_with_key(obj), namespace=namespace, _request_timeout=_SECONDS)
        except ResourceNotFoundError:
            text = f"the cluster has no kind {obj['kind']} of {obj['apiVersion']}"
            self._record_refusal(obj, job, text)
            raise
        except DynamicApiError as error:
            if error.status == CONFLICT:
                self._check_ours(obj, job, error)
                return
            if error.status not in _NEVER:  # which ends the job, with an event of its own
                self._record_refusal(obj, job, _reason(error))
            raise

    def _check_ours(self, obj: Object, job: Object, error: DynamicApiError) -> None:
        """Raise `error` unless the object that is there is of this job.

        One of an earlier job of this name goes by itself, so only the next look makes ours.
        """
        if obj["kind"] == "Secret":  # its name is this job's alone, and nobody may read it
            return
        metadata = obj["metadata"]
        found = self._find(obj["apiVersion"], obj["kind"], metadata["namespace"], metadata["name"])
        if found is not None and decision.is_owned(found, job) and not decision.is_going(found):
            return
        if found is not None and not decision.is_left_behind(found, job):
            self._record_refusal(obj, job, "one of that name is there already, and is not ours")
        raise error

    def _record_refusal(self, obj: Object, job: Object, reason: str) -> None:
        metadata = job["metadata"]
        text = f"{_name_of(obj)}: {reason}"
        number = zlib.crc32(f"{metadata['uid']} {text}".encode())
        told = RecordEvent(is_warning=True, reason="FailedCreate", message=text)
        with _allowing(CONFLICT):
            self._record(told, job, name=f"{metadata['name']}.{number:08x}")

    def _record(self, action: RecordEvent, job: Object, *, name: str = "") -> None:
        metadata, namespace = job["metadata"], job["metadata"]["namespace"]
        now = timestamp(self._clock())
        named = {"name": name} if name else {"generateName": f"{metadata['name']}."}
        about = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": metadata["name"]}
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {**named, "namespace": namespace},
            "involvedObject": {**about, "namespace": namespace, "uid": metadata["uid"]},
            "type": "Warning" if action.is_warning else "Normal",
            "reason": action.reason,
            "message": action.message,
            "source": {"component": _SOURCE},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        self._resource("v1", "Event").create(
            body=event, namespace=namespace, _request_timeout=_SECONDS
        )


def _name_of(obj: Object) -> str:
    return f"{obj['kind']} {obj['metadata']['name']}"


def _reason(error: DynamicApiError) -> str:
    """Return the sentence with which the cluster refused."""
    try:
        return str(json.loads(error.body)["message"])
    except (KeyError, TypeError, ValueError):
        return str(error.reason)


@contextlib.contextmanager
def _allowing(*statuses: int) -> Any:
    """Go on where the cluster is as it should be already."""
    try:
        yield
    except DynamicApiError as error:
        if error.status not in statuses:
            raise


def _with_key(obj: Object) -> Object:
    """Return an object to create, a Secret that asks for it with a fresh key."""
    field = (obj["metadata"].get("annotations") or {}).get(msjob_objects.NEEDS_KEY)
    if obj["kind"] != "Secret" or field is None:
        return obj
    return {**obj, "stringData": {field: secrets.token_hex(_KEY_BYTES)}}
