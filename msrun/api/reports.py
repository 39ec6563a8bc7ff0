"""What the launcher of a program's job tells the program, as lines of JSON over a socket."""

from __future__ import annotations

import msgspec

from msrun.cluster.verdict import Verdict


class LaunchOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher is to do; a file, because options may be long.

    Args:
        words: The command line after `msrun`.
        function: The function that the workers call; empty with a script.
    """

    words: list[str]
    function: str = ""


class LaunchReport(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all reports."""


class LaunchBegan(LaunchReport, frozen=True, tag=True, kw_only=True):
    """The job can be started, and is now.

    Args:
        pid: The launcher.
        job_id: The job.
        log_dir: Directory of its logs.
        log_files: Rank -> its log, of this node's ranks; empty where they are not known yet.
    """

    pid: int
    job_id: str = ""
    log_dir: str = ""
    log_files: dict[int, str] = {}


class LaunchRefused(LaunchReport, frozen=True, tag=True, kw_only=True):
    """The job cannot be started.

    Args:
        kind: Class of the error.
        message: As of `MsrunError`.
        hint: As of `MsrunError`.
    """

    kind: str
    message: str
    hint: str | None


class LaunchEnded(LaunchReport, frozen=True, tag=True, kw_only=True):
    """The job is over.

    Args:
        code: Its exit code.
        verdict: Its result; None where another process has it.
    """

    code: int
    verdict: Verdict | None = None


AnyReport = LaunchBegan | LaunchRefused | LaunchEnded

_decoder: msgspec.json.Decoder[AnyReport] = msgspec.json.Decoder(AnyReport)


def encode(report: AnyReport) -> bytes:
    """Return `report` as one line."""
    return msgspec.json.encode(report) + b"\n"


def decode(line: bytes) -> AnyReport:
    """Return the report in one line."""
    return _decoder.decode(line)
