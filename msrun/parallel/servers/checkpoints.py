"""Checkpoints of a model some of whose parameters live on servers: they are there as any other.

A checkpoint is the whole state of the job, so servers go back with it.  Each rank has whole
parameters while it is written or loaded.
"""

from __future__ import annotations

from typing import Any

from msrun.parallel.checkpoint.api import Checkpoints
from msrun.parallel.checkpoint.moment import Restored
from msrun.parallel.servers.remote import RemoteParameters


class RemoteCheckpoints(Checkpoints):
    """Saves and loads with the parameters of the servers.

    Args:
        remote: These parameters.
        rest: As of `Checkpoints`.
    """

    def __init__(self, remote: RemoteParameters, *rest: Any) -> None:
        super().__init__(*rest)
        self._remote = remote

    def _save(self, *words: Any) -> None:
        with self._remote.whole(is_replaced=False):
            super()._save(*words)

    def _load(self, *words: Any) -> Restored:
        with self._remote.whole(is_replaced=True):
            return super()._load(*words)
