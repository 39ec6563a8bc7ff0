"""The edge of the operator: kopf watches, the decisions are `msjob`'s and `msrunjob`'s.

Each event about a job or what it owns asks for a look at that job.  A look reads everything anew,
decides, writes the status under the version that was read, and acts.  Looks at one job never
overlap; one that fails, such as for want of an API server, is taken again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import Any, cast

import kopf
import kubernetes
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import DynamicApiError

from launchers.operator import msjob, msjob_objects, msrunjob, msrunjob_objects
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

_LOG = logging.getLogger(__name__)
_CONFLICT, _NOT_FOUND = 409, 404
_RETRY_SECONDS = (0.2, 10.0)
_RESYNC_SECONDS = 60.0
_KEY_BYTES = 32
_SOURCE = "msrun-operator"

Key = tuple[str, str, str]
"""API version, namespace and name of a job."""


class JobReconciler:
    """Takes looks at jobs and does what was decided; runs in threads of its own.

    Args:
        client: The cluster.
        clock: Returns the seconds since 1970.
    """

    def __init__(self, client: DynamicClient, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock

    def look(self, key: Key) -> float | None:
        """Bring one job a step further; returns the seconds after which to look again.

        Raises:
            DynamicApiError: The cluster refused something; the next look may fare better.
        """
        api_version, namespace, name = key
        kind = "MSJob" if api_version == msjob.API_VERSION else "MsrunJob"
        job = self._find(api_version, kind, namespace, name)
        if job is None:
            return None
        decided = self._decide(kind, job)
        if decided.status != (job.get("status") or {}):
            self._write_status(api_version, kind, job, decided.status)
        for action in decided.actions:
            self._act(action, job)
        return decided.again_in

    def _decide(self, kind: str, job: Object) -> Decision:
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        if kind == "MSJob":
            pods = self._list("Pod", namespace, f"{msjob_objects.JOB}={name}")
            return msjob.decide(job, pods, self._clock())
        pods = self._list("Pod", namespace, f"{msrunjob_objects.JOB}={name}")
        batch_job = self._find("batch/v1", "Job", namespace, name)
        return msrunjob.decide(job, batch_job, pods, self._clock())

    def _resource(self, api_version: str, kind: str) -> Any:
        return self._client.resources.get(api_version=api_version, kind=kind)

    def _find(self, api_version: str, kind: str, namespace: str, name: str) -> Object | None:
        try:
            found = self._resource(api_version, kind).get(namespace=namespace, name=name)
        except DynamicApiError as error:
            if error.status == _NOT_FOUND:
                return None
            raise
        return cast("Object", found.to_dict())

    def _list(self, kind: str, namespace: str, selector: str) -> list[Object]:
        found = self._resource("v1", kind).get(namespace=namespace, label_selector=selector)
        # Items of a list do not repeat their kind.
        return [{"apiVersion": "v1", "kind": kind, **each} for each in found.to_dict()["items"]]

    def _write_status(self, api_version: str, kind: str, job: Object, status: Object) -> None:
        body = {**job, "status": status}
        namespace = job["metadata"]["namespace"]
        self._resource(api_version, kind).status.replace(body=body, namespace=namespace)

    def _act(self, action: Action, job: Object) -> None:
        namespace = job["metadata"]["namespace"]
        match action:
            case Create(obj):
                with _allowing(_CONFLICT):
                    resource = self._resource(obj["apiVersion"], obj["kind"])
                    resource.create(body=_with_key(obj), namespace=namespace)
            case Patch(obj):
                resource = self._resource(obj["apiVersion"], obj["kind"])
                kind = "application/merge-patch+json"
                resource.patch(body=obj, namespace=namespace, content_type=kind)
            case Delete():
                with _allowing(_CONFLICT, _NOT_FOUND):
                    options = {"preconditions": {"uid": action.uid}} if action.uid else {}
                    self._resource(action.api_version, action.kind).delete(
                        name=action.name,
                        namespace=action.namespace,
                        body={**options, "propagationPolicy": "Background"},
                    )
            case RecordEvent():
                self._record(action, job)

    def _record(self, action: RecordEvent, job: Object) -> None:
        metadata, namespace = job["metadata"], job["metadata"]["namespace"]
        now = timestamp(self._clock())
        about = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": metadata["name"]}
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{metadata['name']}.", "namespace": namespace},
            "involvedObject": {**about, "namespace": namespace, "uid": metadata["uid"]},
            "type": "Warning" if action.is_warning else "Normal",
            "reason": action.reason,
            "message": action.message,
            "source": {"component": _SOURCE},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        self._resource("v1", "Event").create(body=event, namespace=namespace)


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


class LookQueue:
    """One task a job that takes looks as they are asked for, one after the other.

    Args:
        reconciler: What a look is.
    """

    def __init__(self, reconciler: JobReconciler) -> None:
        self._reconciler = reconciler
        self._asked: dict[Key, asyncio.Event] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    def ask(self, key: Key) -> None:
        """Have a look at a job soon."""
        if key not in self._asked:
            self._asked[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._serve(key))
        self._asked[key].set()

    def forget(self, key: Key) -> None:
        """Look at a job no more: it is gone."""
        self._asked.pop(key, None)
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    async def _serve(self, key: Key) -> None:
        asked, wait, again_in = self._asked[key], _RETRY_SECONDS[0], None
        while True:
            timeout = _RESYNC_SECONDS if again_in is None else min(again_in, _RESYNC_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asked.wait(), timeout)
            asked.clear()
            try:
                again_in = await asyncio.to_thread(self._reconciler.look, key)
                wait = _RETRY_SECONDS[0]
            except DynamicApiError as error:
                # A conflict means that somebody was faster: the next look sees what they did.
                level = logging.DEBUG if error.status == _CONFLICT else logging.WARNING
                _LOG.log(level, "job=%s/%s again_in=%s refused: %s", *key[1:], wait, error)
                again_in, wait = wait, min(2 * wait, _RETRY_SECONDS[1])
            except Exception as error:  # noqa: BLE001 - one job's trouble is not that of the others
                _LOG.warning("job=%s/%s again_in=%s %r", *key[1:], wait, error)
                again_in, wait = wait, min(2 * wait, _RETRY_SECONDS[1])


def registry_of(queue: LookQueue) -> kopf.OperatorRegistry:
    """Return kopf's table of what to watch."""
    registry = kopf.OperatorRegistry()

    async def on_job(body: kopf.Body, type: str | None, **_: object) -> None:  # noqa: A002 - kopf's
        metadata = body["metadata"]
        key = (body["apiVersion"], metadata["namespace"], metadata["name"])
        if type == "DELETED":
            queue.forget(key)
        else:
            queue.ask(key)

    def on_owned(api_version: str, label: str) -> Callable[..., Any]:
        async def ask(body: kopf.Body, **_: object) -> None:
            metadata = body["metadata"]
            queue.ask((api_version, metadata["namespace"], metadata["labels"][label]))

        return ask

    for plural, api_version in (("msjobs", msjob.API_VERSION), ("msrunjobs", msrunjob.API_VERSION)):
        group, _, version = api_version.partition("/")
        kopf.on.event(group, version, plural, registry=registry)(on_job)
    for label, api_version in (
        (msjob_objects.JOB, msjob.API_VERSION),
        (msrunjob_objects.JOB, msrunjob.API_VERSION),
    ):
        owned = on_owned(api_version, label)
        kopf.on.event("", "v1", "pods", labels={label: kopf.PRESENT}, registry=registry)(owned)
        if api_version == msrunjob.API_VERSION:
            present = {label: kopf.PRESENT}
            kopf.on.event("batch", "v1", "jobs", labels=present, registry=registry)(owned)
    kopf.on.login(registry=registry)(_log_in)
    return registry


def _log_in(settings: kopf.OperatorSettings, **_: object) -> kopf.ConnectionInfo | None:
    """Return what kopf connects with: a pod's service account, else the user's kubeconfig."""
    account = kopf.login_with_service_account(settings=settings)
    return account or kopf.login_with_kubeconfig(settings=settings)


async def serve(clock: Callable[[], float], *, namespace: str | None, liveness: str | None) -> None:
    """Watch until told to end by SIGTERM or SIGINT.

    Args:
        clock: Returns the seconds since 1970.
        namespace: The only one to watch; None is all.
        liveness: URL to answer health checks at, such as http://0.0.0.0:8080/healthz.
    """
    config: Any = kubernetes.config
    try:
        config.load_incluster_config()
    except config.ConfigException:
        config.load_kube_config()
    client = await asyncio.to_thread(DynamicClient, kubernetes.client.ApiClient())
    queue = LookQueue(JobReconciler(client, clock))
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    # Looks are what takes time, and they may end at any point.
    settings.queueing.idle_timeout = 0.5
    settings.queueing.exit_timeout = 0.2
    settings.networking.error_backoffs = [0.1, 0.5, 1, 2, 5]
    await kopf.operator(
        registry=registry_of(queue),
        settings=settings,
        standalone=True,
        clusterwide=namespace is None,
        namespaces=[namespace] if namespace else (),
        liveness_endpoint=liveness,
    )
