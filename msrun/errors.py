"""Every failure a user can meet, each with its exit code, and the exit codes themselves.

A message says what is wrong with its value, then the limit or the choices; the
hint, when there is one, says what to do next.
"""

from __future__ import annotations

import enum
import signal


class ExitCode(enum.IntEnum):
    """Codes with a fixed meaning; any other code is the first failing rank's own."""

    OK = 0
    USAGE = 2
    INTERNAL = 70
    NODE_LOST = 120
    JOIN_TIMEOUT = 121
    AUTHENTICATION = 122
    DO_NOT_REQUEUE = 123
    HUNG = 124


class MsrunError(Exception):
    """A failure with one honest sentence.

    Args:
        message: What is wrong, its value, then the limit or the choices.
        hint: What to do next; None when the message says it all.
    """

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # where it ends in a traceback

    def render(self) -> str:
        """Return the text a person reads, without a final newline."""
        return f"error: {self.message}" + (f"\n  hint: {self.hint}" if self.hint else "")


class UsageError(MsrunError):
    """Something that the user can put right: an option, a file, a model, the environment.

    Its subclasses say what kind of thing, for scripts that treat some kinds otherwise.
    """

    exit_code = ExitCode.USAGE


class ConfigError(UsageError):
    """The parallel configuration has a mistake, or does not fit the job."""


class ModelError(UsageError):
    """A model, batch, loss or optimizer cannot train under this configuration as in one process."""


class DividedModelError(ModelError, AttributeError):
    """A method or attribute of a whole model was asked of one of its stages."""


class PeerRankError(ModelError):
    """The script raised an exception on another rank, which has the cause and is named."""


class CheckpointError(UsageError):
    """A checkpoint is missing, broken, does not fit, or cannot be written."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint cannot be read, or is not as it was written; an older one may be sound."""


class RanksDisagreeError(UsageError):
    """Ranks of one job did different things where all must do the same."""


class JobFailed(MsrunError):  # noqa: N818 - the outcome of a job, not a mistake of the caller
    """A job that `msrun.launch` or `msrun.Job` started has failed, or was stopped.

    `Job.verdict` has the whole result.

    Args:
        message: Which rank failed first, where, how, and the first line of its exception.
        code: Exit code of the job.
        rank: The rank that failed first; None where no rank did.
        node: Host name of its node; empty without a rank.
        log_file: Its log on that node; empty without a rank.
        error: First line of its exception; empty without one.
        traceback: Text of its exception, if it called a function on this node; else empty.
        hint: As of `MsrunError`.
    """

    def __init__(
        self,
        message: str,
        *,
        code: int,
        rank: int | None = None,
        node: str = "",
        log_file: str = "",
        error: str = "",
        traceback: str = "",
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.rank = rank
        self.node = node
        self.log_file = log_file
        self.error = error
        self.traceback = traceback
        if log_file:
            self.add_note(f"log: {log_file}")
        if traceback:
            self.add_note(f"in rank {rank}:\n{traceback.rstrip()}")


class ProtocolError(MsrunError):
    """A peer sent bytes that are no message of this protocol version."""


class VersionError(ProtocolError):
    """A peer speaks another version of the protocol."""

    exit_code = ExitCode.USAGE


class AuthenticationError(MsrunError):
    """A peer does not hold the job's key, or we do not."""

    exit_code = ExitCode.AUTHENTICATION


class JoinTimeoutError(MsrunError):
    """The nodes of a job did not find each other in time."""

    exit_code = ExitCode.JOIN_TIMEOUT


class UnreachableError(MsrunError):
    """A job does not answer."""

    exit_code = ExitCode.NODE_LOST


def signal_name(signum: int) -> str:
    """Return the name of `signum`; real-time signals have none but their number."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def signal_exit_code(signum: int) -> int:
    """Return the shell's code for a process that signal `signum` ended: 128 + n."""
    return 128 + signum
