"""PMI's key-value space, in which ranks that Hydra started can tell each other where to meet.

Hydra is the mpirun of MPICH and of Intel MPI.  This is version 1 of PMI as it speaks it to every
rank: a line asks, a line answers, on a descriptor that the process was born with.
"""

from __future__ import annotations

import atexit
import functools
import os
import select
import socket
import sys
from ipaddress import ip_address

from msrun.errors import UsageError
from msrun.units import shown

_SECONDS = 120.0
_LINE_BYTES_MAX = 4096
_KEY = "msrun-meets"
_HINT = "set MASTER_ADDR and MASTER_PORT, or start one msrun on each node"


@functools.cache
def meet(descriptor: int, rank: int) -> tuple[str, str]:
    """Return the host of rank 0 and the name of the job; every rank of the job has to call this.

    Args:
        descriptor: Where the process manager listens.
        rank: This rank.

    Raises:
        UsageError: It does not answer, or not as PMI says, or a rank has not called within 2 min.
    """
    _ask(descriptor, "cmd=init pmi_version=1 pmi_subversion=1", "response_to_init")
    # Who has said so much must say goodbye, or Hydra kills all.  After MPI_Init that is MPI's.
    atexit.register(_finalize, descriptor, os.getpid())
    space = _ask(descriptor, "cmd=get_my_kvsname", "my_kvsname").get("kvsname", "")
    if rank == 0:
        own = f"kvsname={space} key={_KEY} value={_own_host()}"
        _ask(descriptor, f"cmd=put {own}", "put_result")
    _ask(descriptor, "cmd=barrier_in", "barrier_out")
    reply = _ask(descriptor, f"cmd=get kvsname={space} key={_KEY}", "get_result")
    return reply.get("value", ""), space


def _ask(descriptor: int, line: str, expected: str) -> dict[str, str]:
    """Return the fields of the answer to `line`."""
    what = f"the mpirun that started this rank, asked {shown(line)} by PMI_FD={descriptor},"
    try:
        os.write(descriptor, f"{line}\n".encode())
        answer = _read_line(descriptor)
    except OSError as error:
        raise UsageError(f"{what} is not there: {error.strerror}", hint=_HINT) from None
    if not answer:
        raise UsageError(f"{what} has not answered within {_SECONDS:g}s", hint=_HINT)
    fields = dict(word.partition("=")[::2] for word in answer.split())
    if fields.get("cmd") != expected or fields.get("rc", "0") != "0":
        raise UsageError(f"{what} has answered {shown(answer.strip())}", hint=_HINT)
    return fields


def _read_line(descriptor: int) -> str:
    """Return a line, empty when none comes in time."""
    data = b""
    while not data.endswith(b"\n") and len(data) < _LINE_BYTES_MAX:
        if not select.select([descriptor], [], [], _SECONDS)[0]:
            return ""
        if not (more := os.read(descriptor, _LINE_BYTES_MAX)):
            break
        data += more
    return data.decode(errors="replace")


def _own_host() -> str:
    """Return an address at which other nodes may reach this one, else its name."""
    name = socket.gethostname()
    try:
        addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(name, 0, socket.AF_INET)]
    except OSError:
        addresses = []
    return next((address for address in addresses if not ip_address(address).is_loopback), name)


def _finalize(descriptor: int, pid: int) -> None:
    if os.getpid() == pid and "mpi4py.MPI" not in sys.modules:
        try:
            _ask(descriptor, "cmd=finalize", "finalize_ack")
        except UsageError:
            return  # Something else has said it.
