"""The files of a node for its parameter servers, which only jobs with servers have."""

from __future__ import annotations

from pathlib import Path

from msrun import environ
from msrun.processes.run_dir import write_private
from msrun.transport.keys import hkdf


def hand_over(directory: Path, secret: bytes | None, job_id: str) -> None:
    """Make the directory of the servers, with their key, or the word that there is none.

    Args:
        directory: As `node_plan.servers_directory` has it.
        secret: The job's secret; None with --insecure.
        job_id: The job.

    Raises:
        OSError: It cannot be made.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / environ.SERVERS_KEY
    if path.exists():
        return
    if secret is None:
        write_private(str(path), environ.SERVERS_INSECURE)
    else:
        write_private(str(path), hkdf(secret, f"msrun servers {job_id}".encode()).hex())


def count(directory: Path, total: int) -> None:
    """Write how many servers there are, for server 0.

    Raises:
        OSError: It cannot be written.
    """
    path = directory / environ.SERVERS_COUNT
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    write_private(str(new), str(total))
    new.replace(path)
