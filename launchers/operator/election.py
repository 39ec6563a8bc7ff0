"""The edge of leader election: reads and writes the Lease as `lease.Candidate` decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from kubernetes.dynamic.exceptions import DynamicApiError
from urllib3.exceptions import HTTPError

from launchers.operator.lease import API_VERSION, NAME

if TYPE_CHECKING:
    from kubernetes.dynamic import DynamicClient

    from launchers.operator.lease import Candidate, Object

_LOG = logging.getLogger(__name__)
_CONFLICT, _NOT_FOUND = 409, 404


class LeaseKeeper:
    """Has the Lease, or waits for it.

    Args:
        client: The cluster.
        candidate: Who decides.
        wall: Returns the seconds since 1970.
        clock: Returns seconds that never jump.
    """

    def __init__(
        self,
        client: DynamicClient,
        candidate: Candidate,
        *,
        wall: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._candidate = candidate
        self._wall = wall
        self._clock = clock
        self._said = ""

    async def acquire(self, ended: asyncio.Event) -> bool:
        """Return True when this operator leads, False when `ended` is set before."""
        _LOG.info("lease=%s waiting for it", NAME)
        while not ended.is_set():
            await asyncio.to_thread(self._step)
            if self._candidate.leads(self._clock()):
                _LOG.info("lease=%s held", NAME)
                return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), self._candidate.pause)
        return False

    async def keep(self, lost: asyncio.Event) -> None:
        """Renew the Lease until that fails for too long, and set `lost` then."""
        stepping: asyncio.Task[None] | None = None
        while self._candidate.leads(self._clock()):
            # A request that hangs must not keep anybody from noticing that time is over.
            if stepping is None or stepping.done():
                stepping = asyncio.create_task(asyncio.to_thread(self._step))
            await asyncio.sleep(self._candidate.pause)
        self._candidate.lost()
        _LOG.warning("lease=%s lost", NAME)
        lost.set()

    async def release(self) -> None:
        """Let others have the Lease at once; if that fails, they wait until it runs out."""
        with contextlib.suppress(DynamicApiError, HTTPError, OSError):
            await asyncio.to_thread(self._give_back)
        self._candidate.lost()

    def _step(self) -> None:
        """Look at the Lease once, and write it if it is ours or free."""
        candidate, began = self._candidate, self._clock()
        try:
            found = self._read()
            made = candidate.decide(found, began, self._wall())
            if made is None:
                candidate.lost()
                return
            self._write(made, is_new=found is None)
        except (DynamicApiError, HTTPError, OSError) as error:
            is_race = isinstance(error, DynamicApiError) and error.status == _CONFLICT
            if not is_race and str(error) != self._said:
                self._said = str(error)
                _LOG.warning("lease=%s refused: %s", NAME, error)
            return
        candidate.wrote(began)

    def _give_back(self) -> None:
        found = self._read()
        made = self._candidate.released(found, self._wall()) if found else None
        if made is not None:
            self._write(made, is_new=False)

    def _resource(self) -> Any:
        return self._client.resources.get(api_version=API_VERSION, kind="Lease")

    def _read(self) -> Object | None:
        candidate = self._candidate
        try:
            found = self._resource().get(
                name=NAME, namespace=candidate.namespace, _request_timeout=candidate.duration / 3
            )
        except DynamicApiError as error:
            if error.status == _NOT_FOUND:
                return None
            raise
        return cast("Object", found.to_dict())

    def _write(self, lease: Object, *, is_new: bool) -> None:
        candidate, resource = self._candidate, self._resource()
        write = resource.create if is_new else resource.replace
        write(body=lease, namespace=candidate.namespace, _request_timeout=candidate.duration / 3)
