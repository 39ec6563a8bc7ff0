"""The parts that every launcher process has, with workers or without: stop signals, journal."""

from __future__ import annotations

import signal
from pathlib import Path

from msrun.errors import UsageError
from msrun.supervise import logs

# Signals with which a user stops a job.
STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


def open_journal(log_dir: str, name: str) -> int:
    """Open the launcher's own log, which no other launcher can open from now on.

    Raises:
        UsageError: It is another job's, or cannot be written.
    """
    try:
        return logs.claim(str(Path(log_dir, name)))
    except BlockingIOError:
        msg = f"--log-dir {log_dir} is in use by a job that still runs"
        hint = "choose another directory; a further node of one job here needs a --node-rank"
        raise UsageError(msg, hint=hint) from None
    except OSError as error:
        msg = f"--log-dir {log_dir} cannot be written: {error.strerror}"
        raise UsageError(msg) from None
