"""All options: those of a job, and those of `plan` besides."""

from __future__ import annotations

from msrun.cli.options import parsers
from msrun.cli.options.catalog import WORKING
from msrun.cli.options.fleet import FLEET_TABLE
from msrun.cli.options.option import Arity, FileForm, Option, OptionGroup
from msrun.cli.options.peers import PEERS

TABLE = (*WORKING, *FLEET_TABLE, *PEERS)

ALL = Option(
    name="all",
    group=OptionGroup.PLAN,
    help="Defaults and the whole mesh too.",
    parse=parsers.boolean,
    default=False,
    arity=Arity.SWITCH,
    file=FileForm.ABSENT,
)
ENV_OF = Option(
    name="env-of",
    group=OptionGroup.PLAN,
    metavar="RANK",
    help="Environment of that worker too.",
    parse=parsers.whole(0),
    file=FileForm.ABSENT,
)
JSON = Option(
    name="json",
    group=OptionGroup.PLAN,
    help="One JSON document instead of text.",
    parse=parsers.boolean,
    default=False,
    arity=Arity.SWITCH,
    file=FileForm.ABSENT,
)
OUTPUT_DIR = Option(
    name="output-dir",
    group=OptionGroup.PLAN,
    metavar="DIR",
    help="Directory for the files of a backend that starts nodes, instead of text.",
    parse=parsers.text,
    aliases=("-o",),
    file=FileForm.ABSENT,
)
PLAN_TABLE: tuple[Option[object], ...] = (*TABLE, ALL, ENV_OF, JSON, OUTPUT_DIR)
