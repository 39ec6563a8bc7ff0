"""A node that is a pod: its scheduler's name becomes known only when that pod has an address.

A name server may also still know the address of an earlier pod of index 0, for as long as it keeps
what it has learnt.  So the name is asked again until somebody listens at what it means.
"""

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

_PAUSE_SECONDS = 0.25
_JOIN_SECONDS = 600.0
_PORT = 29500


def await_scheduler_name(settings: Settings, system: System) -> None:
    """Return when the scheduler's pod is found by its name, or where this node is no such pod.

    Raises:
        JoinTimeoutError: It is not found within --join-timeout.
    """
    given = settings.get(options.MASTER_ADDR)
    environment = system.environment()
    if given is None or given.source.place != options.MASTER_ADDR.variables[0]:
        return
    if not environment.get(Pod.NODES) or environment.get(Pod.INDEX) == "0":
        return
    port = settings.get(options.MASTER_PORT)
    number = port.value if port else _PORT
    timeout = find_timeout(settings, options.JOIN_TIMEOUT)
    limit = timeout.value if timeout else _JOIN_SECONDS
    began, has_said = system.now(), False
    while True:
        addresses = system.resolve(given.value)
        if addresses and system.reaches(addresses[0], number):
            return
        if not has_said:
            has_said = True
            say(f"msrun: waiting for the pod of the scheduler, {shown(given.value)}")
        if system.now() - began >= limit:
            raise JoinTimeoutError(
                f"the pod of the scheduler, {shown(given.value)}, {_why(addresses, number)} for "
                f"{render_duration(limit)}",
                hint="kubectl describe pod says why the pod of index 0 does not run",
            )
        system.pause(_PAUSE_SECONDS)


def _why(addresses: tuple[str, ...], port: int) -> str:
    if not addresses:
        return "has had no address"
    return f"has not listened at {addresses[0]} port {port}"
