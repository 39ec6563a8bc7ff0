"""The things that nodes need before they meet: formation, secret, listening sockets."""

from __future__ import annotations

import socket
import sys

from msrun.cluster.wire.messages import Formation
from msrun.errors import UsageError
from msrun.job import JobSpec, ProgramKind
from msrun.supervise.secret import read_secret
from msrun.transport.keys import new_secret
from msrun.transport.sockets import listen
from msrun.version import __version__


def formation(job: JobSpec) -> Formation:
    """Return the settings and versions that all nodes of `job` must share."""
    has_python = not job.is_alone and job.program.kind is not ProgramKind.COMMAND
    return Formation(
        nnodes_min=job.nnodes_min,
        nnodes_max=job.nnodes_max,
        world_size=None if job.is_alone else job.world_size,
        lease=0.0 if job.is_alone else job.lease,
        release=__version__,
        python=f"{sys.version_info[0]}.{sys.version_info[1]}" if has_python else "",
        torch=_version_of("torch") if has_python else "",
        servers=job.servers,
    )


def _version_of(package: str) -> str:
    """Return the version of an installed package, empty if it is not installed."""
    from importlib import metadata  # takes long, and a job on one node needs none

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def job_secret(job: JobSpec) -> bytes | None:
    """Return the secret of `job`, None without authentication.

    Raises:
        UsageError: Its file cannot be used.
    """
    if job.insecure:
        return None
    return new_secret() if job.is_alone and not job.secret_file else read_secret(job.secret_file)


def listen_or_refuse(host: str, port: int, what: str) -> socket.socket:
    """Return a listening socket.

    Raises:
        UsageError: The address cannot be used; `what` names the option that gave it.
    """
    try:
        return listen(host, port)
    except OSError as error:
        where = f"{host} port {port}" if port else host
        msg = f"{what}: {where} cannot be used: {error.strerror}"
        raise UsageError(msg, hint="choose another --master-port, or end what uses it") from None
