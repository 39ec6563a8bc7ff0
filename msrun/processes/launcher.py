"""The parts that every launcher process has, with workers or without: stop signals, journal."""

from __future__ import annotations

import os
import pwd
import signal
import stat
from pathlib import Path

from msrun.errors import UsageError
from msrun.job import JobSpec
from msrun.processes.earlier_run import claim_journal
from msrun.supervise import logs

# Signals with which a user stops a job.
STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


def open_journal(job: JobSpec, name: str) -> tuple[int, str]:
    """Open the launcher's own log, which no other launcher can open from now on.

    Returns:
        Its descriptor, and the directory of all logs: below --log-dir where another job that
        runs has that.

    Raises:
        UsageError: It is another job's, or cannot be written.
    """
    log_dir, pattern = job.log_dir, job.worker_log_name
    below = str(Path(log_dir, job.job_id))
    try:
        try:
            return claim_journal(log_dir, pattern, name), log_dir
        except BlockingIOError:
            logs.make_log_dir(below)
            return claim_journal(below, pattern, name), below
    except BlockingIOError:
        msg = f"--log-dir {log_dir} is in use by a job that still runs"
        raise UsageError(msg, hint="choose another directory") from None
    except OSError as error:
        msg = f"--log-dir {log_dir} cannot be written: {error.strerror}"
        raise UsageError(msg) from None


def whose(log_dir: str) -> str:
    """Return a warning about a log directory in which others can do what they like, else nothing.

    The files of this job are its user's alone.  Who may write the directory can still remove them,
    and put others in their place.
    """
    status = Path(log_dir).stat()
    if status.st_uid not in (os.geteuid(), 0):
        owner = f"belongs to user {_user_name(status.st_uid)}"
    elif status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        owner = "may be written by every user"
    else:
        return ""
    return f"warning: --log-dir {log_dir} {owner}, who can remove and replace the logs"


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
