"""`msrun convert`: checkpoints as single files and back."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from msrun.cli.options.words import read_words
from msrun.cli.output import say

if TYPE_CHECKING:
    from msrun.cli.system import System

SUMMARY = (
    "Turn the checkpoint SRC into the file DST, which ends in .safetensors or .pt, or such a file "
    "into a checkpoint directory that any parallel layout loads.  If there are several checkpoints "
    "in SRC, the newest is converted."
)


def convert(args: Sequence[str], system: System) -> int:
    """Convert what `args` name."""
    del system
    params = (
        click.Argument(["source"], metavar="SRC"),
        click.Argument(["target"], metavar="DST"),
        click.Option(
            ["--optimizer"],
            is_flag=True,
            help="Convert the optimizer's state too; not with .safetensors.",
        ),
    )
    given = read_words("msrun convert", SUMMARY, params, args)
    # By name, since nothing outside `msrun.parallel` may need torch.
    module = importlib.import_module("msrun.parallel.checkpoint.convert")
    say(module.convert(given["source"], given["target"], optimizer=given["optimizer"]))
    return 0
