"""The last things a launcher does about a job: its result on disk, then on the console."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import msgspec

from msrun import environ
from msrun.bounded_file import open_to_read
from msrun.cluster.verdict import RankExit, Verdict, render, render_seconds
from msrun.errors import ExitCode, MsrunError
from msrun.processes.console import Console
from msrun.supervise import logs

VERDICT_FILE = "verdict.json"
_BYTES_MAX = 1 << 20
_MESSAGE_BYTES_MAX = 4096  # what Kubernetes keeps
_OF_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EROFS)


def report(verdict: Verdict, console: Console, log_dir: str, *, workers: int, took: float) -> None:
    """Write `verdict` to its file and show it.

    Args:
        verdict: The job's result.
        console: Where to show it.
        log_dir: Directory of its file.
        workers: Workers on this node.
        took: Seconds since the launcher started.
    """
    try:
        _write(verdict, Path(log_dir, VERDICT_FILE))
    except OSError as error:
        console.say(f"warning: {Path(log_dir, VERDICT_FILE)} was not written: {error.strerror}")
    if verdict.code:
        _leave_message(verdict)
        console.say(render(verdict))
        return
    for process in verdict.stuck:
        console.say(f"warning: could not be killed: {process}")
    console.say(f"msrun: {workers}/{workers} workers finished after {render_seconds(took)}")


def record(
    error: Exception,
    known: str,
    job_id: str,
    log_dir: str,
    *,
    generation: int,
    root: RankExit | None = None,
) -> None:
    """Write the verdict of a job that a failure of its launcher ends.

    Args:
        error: The failure.
        known: What had gone wrong before, as a sentence; empty if nothing had.
        root: The failure of a worker that came first, if one is known.
        job_id: The job.
        log_dir: Directory of the file.
        generation: The generation that ran.
    """
    what, code = f"this is a bug in msrun: {type(error).__name__}: {error}", ExitCode.INTERNAL
    if isinstance(error, MsrunError):
        what, code = error.message, error.exit_code
    verdict = Verdict(
        job_id=job_id,
        code=code,
        reason=f"{what}; before that, {known}" if known else what,
        generation=max(generation, 0),
        restarts=max(generation, 0),
        root=root,
    )
    # The caller raises `error`, which says more than that this file cannot be written either.
    with contextlib.suppress(OSError):
        _write(verdict, Path(log_dir, VERDICT_FILE))


def _leave_message(verdict: Verdict) -> None:
    """Tell Kubernetes what the exit code of this pod means, where this is a pod."""
    if path := environ.message_file():
        words = f"exit code {verdict.code}: {verdict.reason}".encode(errors="replace")
        with contextlib.suppress(OSError):
            Path(path).write_bytes(words[:_MESSAGE_BYTES_MAX])


def in_words(error: Exception) -> Exception:
    """Return `error`, as a sentence if its reason is a limit of the machine and no bug of ours."""
    if not isinstance(error, OSError) or error.errno not in _OF_MACHINE:
        return error
    what = f": {error.filename}" if error.filename else ""
    msg = f"the launcher cannot go on: {error.strerror}{what}"
    refusal = MsrunError(msg, hint="see `ulimit -n`, free space and free memory")
    refusal.__cause__ = error
    return refusal


def read(log_dir: str, job_id: str) -> Verdict | None:
    """Return the result that a launcher of that job has written; None when it has not, yet."""
    try:
        with open_to_read(str(Path(log_dir, VERDICT_FILE))) as file:
            verdict = msgspec.json.decode(file.read(_BYTES_MAX), type=Verdict)
    except (OSError, msgspec.MsgspecError):
        return None
    return verdict if verdict.job_id == job_id else None


def _write(verdict: Verdict, path: Path) -> None:
    """Replace `path` in one step, so that a reader never sees half of it."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with os.fdopen(logs.create(str(draft)), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(verdict), indent=2) + b"\n")
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
