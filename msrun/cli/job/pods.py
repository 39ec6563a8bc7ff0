"""A node that is a pod: its scheduler's name becomes known only when that pod has an address."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msrun.cli.job.formation import find_timeout
from msrun.cli.options import catalog as options
from msrun.cli.output import say
from msrun.environ import Pod
from msrun.errors import JoinTimeoutError
from msrun.units import render_duration, shown

if TYPE_CHECKING:
    from msrun.cli.options.settings import Settings
    from msrun.cli.system import System

_PAUSE_SECONDS = 1.0
_JOIN_SECONDS = 600.0


def await_scheduler_name(settings: Settings, system: System) -> None:
    """Return when the name of the scheduler's pod is known, or where this node is no pod.

    Raises:
        JoinTimeoutError: It is not known within --join-timeout.
    """
    given = settings.get(options.MASTER_ADDR)
    environment = system.environment()
    if given is None or given.source.place != options.MASTER_ADDR.variables[0]:
        return
    if not environment.get(Pod.NODES) or system.resolve(given.value):
        return
    timeout = find_timeout(settings, options.JOIN_TIMEOUT)
    limit = timeout.value if timeout else _JOIN_SECONDS
    say(f"msrun: waiting for the pod of the scheduler, {shown(given.value)}")
    waited = 0.0
    while not system.resolve(given.value):
        if waited >= limit:
            raise JoinTimeoutError(
                f"the pod of the scheduler, {shown(given.value)}, has had no address for "
                f"{render_duration(limit)}",
                hint="kubectl describe pod says why the pod of index 0 does not run",
            )
        system.pause(_PAUSE_SECONDS)
        waited += _PAUSE_SECONDS
