"""`msrun verify`: run a script up to the first step that was compared with one process."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msrun import environ
from msrun.bounded_file import read_bounded
from msrun.cli.options.command_line import read_command_line
from msrun.cli.options.table import TABLE
from msrun.cli.output import say, say_notes
from msrun.errors import UsageError

if TYPE_CHECKING:
    from msrun.cli.system import System

SUMMARY = (
    "Run SCRIPT, with the options of `msrun run`, up to its first training step, and compare "
    "loss, gradients and buffers with those of one process.  A difference ends the job with its "
    "likely cause.  Of a model that does not fit rank 0, layers are compared.  Of a plain loop one "
    "call of the model is compared, and not its loss function."
)


def verify(args: Sequence[str], system: System) -> int:
    """Run the job that `args` describe for one step; return 0 if it is that of one process."""
    with tempfile.TemporaryDirectory(prefix="msrun-verify-") as folder:
        report = Path(folder, "report")
        words = ["--env", f"{environ.VERIFY}={report}", *args]
        line = read_command_line("msrun verify", SUMMARY, TABLE, words)
        from msrun.cli.job.prepare import prepare, read_request  # Help needs none of it.

        request = read_request(line, TABLE, system)
        if request.is_fleet:
            raise _several_nodes()
        prepared = prepare(request, system)
        if not prepared.plan.job.is_alone:
            raise _several_nodes()
        say_notes(prepared.notes)
        code = prepared.launcher.submit(prepared.plan)
        if code:
            return code
        try:
            text = read_bounded(report, "the report", mebibytes=1).decode(errors="replace")
        except UsageError:
            raise UsageError(
                "nothing was verified: the script ended without a training step",
                hint="train with rt.step of the object that msrun.init() returns, or pass the "
                "optimizer of a plain loop to rt.optimizer",
            ) from None
        is_equal, _, sentence = text.partition("\n")
        if is_equal != "equal":
            raise UsageError(sentence)
        say(f"verified: {sentence}")
        return 0


def _several_nodes() -> UsageError:
    return UsageError(
        "msrun verify runs on one node",
        hint="say `verify: first_step` in the parallel configuration of a job on several nodes",
    )
