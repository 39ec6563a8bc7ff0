"""The file with which tools control a job from a machine that runs one of its launchers.

It is in the job's private directory, which only its user can read.  Its keys are those of the
control role, which can inspect and stop the job, but not join it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import msgspec

from msrun.job import JobSpec
from msrun.processes import run_dir
from msrun.supervise.channel import dump, load
from msrun.transport.sockets import ControlKeys, control_keys

_NAME = "control.json"
_BYTES_MAX = 64 * 1024


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a job.

    Args:
        job_id: The job; empty for the one that the scheduler runs.
        host: Numeric address of the scheduler.
        port: Its port.
        keys: The keys of the control role; None without authentication.
        pid: The launcher on this machine; 0 when there is none.
        log_dir: Where it keeps its logs.
        workers: Workers that it starts.
        serves: The scheduler is its child.
        began: When it began, on this machine's monotonic clock.
    """

    job_id: str
    host: str
    port: int
    keys: ControlKeys | None
    pid: int = 0
    log_dir: str = ""
    workers: int = 0
    serves: bool = False
    began: float = 0.0


def card_of(job: JobSpec, port: int, secret: bytes | None, *, workers: int, began: float) -> Card:
    """Return the card of the launcher of `job` that this process is.

    Args:
        job: The job.
        port: Port of its scheduler.
        secret: The secret of the job; None without authentication.
        workers: Workers that this launcher starts.
        began: When it began, on this machine's monotonic clock.
    """
    return Card(
        job_id=job.job_id,
        host=job.listen_host,
        port=port,
        keys=control_keys(secret) if secret else None,
        pid=os.getpid(),
        log_dir=job.log_dir,
        workers=workers,
        serves=job.serves,
        began=began,
    )


def write(directory: Path, card: Card) -> None:
    """Leave `card` in a job's private directory, whole from its first moment.

    Raises:
        OSError: It cannot be written.
    """
    draft = directory / f"{_NAME}.new"
    run_dir.write_private(str(draft), dump(card).decode())
    draft.rename(directory / _NAME)


def jobs() -> list[Card]:
    """Return this user's jobs that run on this machine, one for each launcher."""
    return [card for directory in run_dir.held() if (card := _read(directory / _NAME))]


def has_node(job: JobSpec, *, but: Path | None = None) -> bool:
    """Tell whether another launcher of `job` may run on this machine, which it needs not know.

    Args:
        job: A job of several nodes whose ranks the scheduler decides.
        but: The private directory of this launcher.
    """
    if job.is_alone or job.node_name or job.node_rank is not None:
        return False
    for directory in run_dir.held():
        is_of_job = directory.name == job.job_id or directory.name.startswith(f"{job.job_id}.")
        if is_of_job and directory != but:
            card = _read(directory / _NAME)
            # One that has just begun has written none yet.
            if card is None or (card.job_id, card.port) == (job.job_id, job.master_port):
                return True
    return False


def is_beside(job: JobSpec, own: Path | None = None) -> bool:
    """Tell whether another node of `job` has a private directory on this machine, besides `own`."""
    others = (directory.name for directory in run_dir.held() if directory != own)
    return any(name == job.job_id or name.startswith(f"{job.job_id}.") for name in others)


def _read(path: Path) -> Card | None:
    """Return the card at `path`; None if the job has just begun, or has ended."""
    try:
        with path.open("rb") as file:
            return cast("Card", load(file.read(_BYTES_MAX), Card))
    except (OSError, ValueError, RecursionError):
        return None
