"""The edge of the operator: kopf watches, the decisions are `msjob`'s and `msrunjob`'s.

Each event about a job or what it owns asks for a look at that job.  Looks at one job never
overlap; one that fails, such as for want of an API server, is taken again.  With leader election,
everything waits for the Lease, and stops when that cannot be renewed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kopf
import kubernetes
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import DynamicApiError
from urllib3.exceptions import HTTPError

from launchers.operator import msjob, msjob_objects, msrunjob, msrunjob_objects
from launchers.operator.election import LeaseKeeper
from launchers.operator.gang import GangScheduler
from launchers.operator.lease import Candidate
from launchers.operator.metrics import OperatorMetrics
from launchers.operator.probes import ProbeServer, Route, parse_address
from launchers.operator.reconcile import CONFLICT, JobReconciler, Key
from msrun.errors import UnreachableError, UsageError
from msrun.units import quoted, shown

_LOG = logging.getLogger(__name__)
_RETRY_SECONDS = (0.2, 10.0)
_RESYNC_SECONDS = 60.0
_SERVER_SECONDS = 5.0
_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


class LookQueue:
    """One task a job that takes looks as they are asked for, one after the other.

    Args:
        reconciler: What a look is.
        metrics: Counts them.
        clock: Returns seconds that never jump.
    """

    def __init__(
        self, reconciler: JobReconciler, metrics: OperatorMetrics, clock: Callable[[], float]
    ) -> None:
        self._reconciler = reconciler
        self._metrics = metrics
        self._clock = clock
        self._asked: dict[Key, asyncio.Event] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    def ask(self, key: Key) -> None:
        """Have a look at a job soon."""
        if key not in self._asked:
            self._asked[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._serve(key))
        self._asked[key].set()

    async def _serve(self, key: Key) -> None:
        asked, wait, again_in = self._asked[key], _RETRY_SECONDS[0], None
        while True:
            timeout = _RESYNC_SECONDS if again_in is None else min(again_in, _RESYNC_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asked.wait(), timeout)
            asked.clear()
            began, result = self._clock(), "ok"
            try:
                again_in = await asyncio.to_thread(self._reconciler.look, key)
                wait = _RETRY_SECONDS[0]
            except LookupError:
                if asked.is_set():  # there may be a new one of that name
                    continue
                self._asked.pop(key, None)
                self._tasks.pop(key, None)
                return
            except Exception as error:  # noqa: BLE001 - one job's trouble is not that of the others
                result = self._note(key, error, wait)
                again_in, wait = wait, min(2 * wait, _RETRY_SECONDS[1])
            kind = "MSJob" if key[0] == msjob.API_VERSION else "MsrunJob"
            self._metrics.note_look(kind, result, self._clock() - began)

    def _note(self, key: Key, error: Exception, wait: float) -> str:
        """Log why a look ended early, and return how metrics call that."""
        where = "/".join(key[1:])
        if isinstance(error, DynamicApiError) and error.status == CONFLICT:
            # Somebody was faster: the next look sees what they did.
            _LOG.debug("job=%s again_in=%s conflict", where, wait)
            return "conflict"
        reason = str(error) if isinstance(error, DynamicApiError) else repr(error)
        _LOG.warning("job=%s again_in=%s refused: %s", where, wait, reason)
        return "error"


def registry_of(queue: LookQueue) -> kopf.OperatorRegistry:
    """Return kopf's table of what to watch."""
    registry = kopf.OperatorRegistry()

    async def on_job(body: kopf.Body, **_: object) -> None:
        metadata = body["metadata"]
        key = (body["apiVersion"], metadata["namespace"], metadata["name"])
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorOptions:
    """What an operator is asked for.

    Attributes:
        namespace: The only one to watch; None is all.
        metrics_address: Where metrics are, such as `:8080`; `0` is nowhere.
        probe_address: Where /healthz and /readyz are.
        elects: Whether to work only while holding the Lease.
        lease_seconds: How long the Lease holds without being renewed.
        lease_namespace: Where the Lease is; None is the pod's own.
        gang_scheduler: Who places the pods of every MSJob together; empty is nobody.
    """

    namespace: str | None
    metrics_address: str = "0"
    probe_address: str = "0"
    elects: bool = False
    lease_seconds: float = 15.0
    lease_namespace: str | None = None
    gang_scheduler: str = ""


class OperatorProgram:
    """One operator from its start to its end.

    Args:
        options: What it is asked for.
        wall: Returns the seconds since 1970.
        clock: Returns seconds that never jump.

    Raises:
        UsageError: An option has a value that it does not take.
    """

    def __init__(
        self, options: OperatorOptions, *, wall: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self._options = options
        self._wall = wall
        self._clock = clock
        self._metrics = OperatorMetrics()
        self._ended = asyncio.Event()
        self._gang = _gang_scheduler(options.gang_scheduler)
        given = {
            "--metrics-bind-address": (options.metrics_address, {"/metrics": self._metrics.render}),
            "--health-probe-bind-address": (
                options.probe_address,
                {"/healthz": lambda: "ok\n", "/readyz": lambda: "ok\n"},
            ),
        }
        self._ports: dict[tuple[str, int], dict[str, Route]] = {}
        for option, (text, routes) in given.items():
            if address := parse_address(text, option):
                self._ports.setdefault(address, {}).update(routes)

    async def run(self) -> bool:
        """Work until told to end by SIGTERM or SIGINT, or until the Lease is lost.

        Returns:
            Whether the Lease was lost.

        Raises:
            UnreachableError: There is no cluster.
        """
        self._await_signals()
        asyncio.get_running_loop().set_exception_handler(_log_loop_error)
        probes = ProbeServer()
        try:
            for address, routes in self._ports.items():
                await probes.listen(address, routes)
            # Its notes on the kinds of the cluster are of no use to others.
            with tempfile.TemporaryDirectory(prefix="msrun-operator-") as folder:
                client = await asyncio.to_thread(_connect, Path(folder, "kinds.json"))
                is_lost = await self._work(client)
                if is_lost:
                    await self._await_server(client)
                return is_lost and not self._ended.is_set()
        finally:
            probes.close()

    async def _work(self, client: DynamicClient) -> bool:
        if not self._options.elects:
            self._metrics.lead(is_leader=True)
            await self._watch(client, self._ended)
            return False
        namespace = self._options.lease_namespace or _own_namespace()
        candidate = Candidate(_identity(), namespace, self._options.lease_seconds)
        keeper = LeaseKeeper(client, candidate, wall=self._wall, clock=self._clock)
        if not await keeper.acquire(self._ended):
            return False
        self._metrics.lead(is_leader=True)
        lost = asyncio.Event()
        keeping = asyncio.create_task(keeper.keep(lost))
        try:
            await self._watch(client, lost)
        finally:
            keeping.cancel()
            self._metrics.lead(is_leader=False)
        if not lost.is_set():  # a signal ended it
            await keeper.release()
        return lost.is_set()

    async def _await_server(self, client: DynamicClient) -> None:
        """Return when the API server answers, or when told to end.

        A Lease is lost, too, while there is no server, and what begins anew would find none.
        """
        self._await_signals()  # kopf has taken them and given none back
        pool: Any = client.client.rest_client.pool_manager
        where = f"{client.configuration.host}/version"  # of which any answer will do
        seconds = _SERVER_SECONDS
        while not self._ended.is_set():
            try:
                await asyncio.to_thread(pool.request, "GET", where, retries=False, timeout=seconds)
            except (HTTPError, OSError):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), seconds / 10)
            else:
                return

    async def _watch(self, client: DynamicClient, stop: asyncio.Event) -> None:
        """Watch until `stop` is set, or a signal comes."""
        reconciler = JobReconciler(client, self._wall, self._metrics, self._gang)
        queue = LookQueue(reconciler, self._metrics, self._clock)
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        # Looks are what takes time, and they may end at any point.
        settings.queueing.idle_timeout = 0.5
        settings.queueing.exit_timeout = 0.2
        settings.networking.error_backoffs = [0.1, 0.5, 1, 2, 5]
        namespace = self._options.namespace
        # kopf would ask for the name of its user, and that of an image may have none.
        identity: Any = _identity()
        await kopf.operator(
            identity=identity,
            registry=registry_of(queue),
            settings=settings,
            standalone=True,
            clusterwide=namespace is None,
            namespaces=[namespace] if namespace else (),
            stop_flag=stop,
        )

    def _await_signals(self) -> None:
        loop = asyncio.get_running_loop()  # kopf takes them over when it watches
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._ended.set)


async def serve(
    options: OperatorOptions, *, wall: Callable[[], float], clock: Callable[[], float]
) -> bool:
    """Run an operator until it is told to end, or until another one may work in its place.

    Returns:
        Whether it is to begin anew, as one that waits for the Lease; kopf watches only once in the
        life of a process.

    Raises:
        UsageError: An option has a value that it does not take.
        UnreachableError: There is no cluster.
    """
    return await OperatorProgram(options, wall=wall, clock=clock).run()


def _log_loop_error(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what a task ended with that nobody awaits, such as kopf's when it stops, on one line."""
    _LOG.warning("task: %s %r", context.get("message"), context.get("exception"))


def _gang_scheduler(text: str) -> GangScheduler | None:
    """Return who places gangs; Kueue needs a queue, so jobs ask for it by a label."""
    choices = (GangScheduler.VOLCANO, GangScheduler.PLUGINS)
    if text and text not in choices:
        raise UsageError(
            f"--gang-scheduler-name {quoted(text)} is unknown (choose {' or '.join(choices)})"
        )
    return GangScheduler(text) if text else None


def _connect(notes: Path) -> DynamicClient:
    config: Any = kubernetes.config
    try:
        try:
            config.load_incluster_config()
        except config.ConfigException:
            config.load_kube_config()
    except (config.ConfigException, OSError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"there is no cluster: {shown(reason)}") from None
    try:
        return DynamicClient(kubernetes.client.ApiClient(), cache_file=str(notes))
    except (HTTPError, DynamicApiError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UnreachableError(f"the API server does not answer: {shown(reason)}") from None


def _identity() -> str:
    """Return a name that no other operator has, also not the next one in this pod."""
    return f"{socket.gethostname()}_{os.urandom(4).hex()}"


def _own_namespace() -> str:
    try:
        return Path(_NAMESPACE_FILE).read_text().strip()
    except OSError:
        return "default"
