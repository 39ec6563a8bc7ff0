"""Leader election: of several operators one works, the one that holds a Lease.

`Candidate` decides and is pure.  As in Kubernetes' own library, nobody trusts the clock of another
machine: a Lease has run out when it has not changed for its duration by the watcher's own clock.
A leader that cannot renew in time stops working before anybody else may begin.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]

API_VERSION = "coordination.k8s.io/v1"
NAME = "msrun-operator"
# Parts of the duration: when a leader gives up, and how often a Lease is looked at.
_GIVE_UP, _LOOK = 2 / 3, 2 / 15


@dataclass(slots=True)
class Candidate:
    """One operator that would lead.

    Attributes:
        identity: Its name, which no other one has.
        namespace: Where the Lease is.
        duration: Seconds for which the Lease holds without being renewed.
    """

    identity: str
    namespace: str
    duration: float
    _seen: object = field(default=None, init=False)
    _seen_at: float = field(default=0.0, init=False)
    _renewed_at: float | None = field(default=None, init=False)

    @property
    def pause(self) -> float:
        """Seconds between two looks at the Lease."""
        return self.duration * _LOOK

    def leads(self, now: float) -> bool:
        """Whether this one may work; `now` is of a clock that never jumps."""
        held = self._renewed_at
        return held is not None and now - held < self.duration * _GIVE_UP

    def decide(self, lease: Object | None, now: float, wall: float) -> Object | None:
        """Return the Lease to write, None to wait.

        Args:
            lease: The Lease as it is, None when there is none.
            now: Of a clock that never jumps.
            wall: Seconds since 1970, for those who read the Lease.
        """
        if lease is None:
            metadata = {"name": NAME, "namespace": self.namespace}
            empty = {"apiVersion": API_VERSION, "kind": "Lease", "metadata": metadata, "spec": {}}
            return self._taken(empty, wall)
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder == self.identity:
            return self._renewed(lease, wall)
        seen = (holder, spec.get("renewTime"), spec.get("leaseTransitions"))
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        lasts = float(spec.get("leaseDurationSeconds") or self.duration)
        if holder and now - self._seen_at < lasts:
            return None
        return self._taken(lease, wall)

    def wrote(self, now: float) -> None:
        """Note that the Lease was written; `now` is from before that was asked for."""
        self._renewed_at = now

    def lost(self) -> None:
        """Note that another one has it."""
        self._renewed_at = None

    def released(self, lease: Object, wall: float) -> Object | None:
        """Return the Lease for others to take at once, None if another has it already."""
        if (lease.get("spec") or {}).get("holderIdentity") != self.identity:
            return None
        released = self._renewed(lease, wall)
        released["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
        return released

    def _renewed(self, lease: Object, wall: float) -> Object:
        made = copy.deepcopy(lease)
        seconds = max(1, round(self.duration))
        made["spec"] |= {"renewTime": _micro_time(wall), "leaseDurationSeconds": seconds}
        return made

    def _taken(self, lease: Object, wall: float) -> Object:
        made = self._renewed({**lease, "spec": lease.get("spec") or {}}, wall)
        changes = int(made["spec"].get("leaseTransitions") or 0)
        had_other = bool(made["spec"].get("acquireTime"))
        made["spec"] |= {
            "holderIdentity": self.identity,
            "acquireTime": _micro_time(wall),
            "leaseTransitions": changes + had_other,
        }
        return made


def _micro_time(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
