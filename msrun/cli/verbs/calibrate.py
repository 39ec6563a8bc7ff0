"""`msrun calibrate`: a job that measures the devices and links it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from msrun.cli.options.words import read_words
from msrun.cli.output import say
from msrun.cli.verbs.run import run

if TYPE_CHECKING:
    from msrun.cli.system import System

SUMMARY = (
    "Measure the speed of devices and links, and write it as a topology for `msrun search` and "
    "for `mode: auto`.  The measurement is a job: it takes the options of `msrun run`, and on "
    "several nodes you start it on each."
)
PROGRAM = "msrun.parallel.calibrate"


def calibrate(args: Sequence[str], system: System) -> int:
    """Run the job that measures."""
    params = (
        click.Option(
            ["-o", "--output"],
            default="topology.yaml",
            show_default=True,
            metavar="FILE",
            help="Topology, written by rank 0.",
        ),
        click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar="[RUN OPTIONS]"),
    )
    given = read_words("msrun calibrate", SUMMARY, params, args, keeps_unknown=True)
    code = run([*given["words"], "-m", PROGRAM, given["output"]], system)
    if code == 0:
        say(f"see {given['output']}")
    return code
