"""`msrun operator`: MSJob and MsrunJob objects of a Kubernetes cluster become running jobs."""

from __future__ import annotations

import asyncio
import importlib
import importlib.resources
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from msrun.cli.options.words import read_words
from msrun.cli.output import answer, say
from msrun.errors import ExitCode, UsageError
from msrun.transport.loop import Loop

if TYPE_CHECKING:
    from msrun.cli.system import System

RUN = (
    "Run the operator until it is ended: watch MSJob (mindspore.gitee.com/v1) and MsrunJob "
    "(msrun.io/v1) objects, create what they ask for and write their status.  It finds the "
    "cluster as a pod does, else as kubectl does."
)
MANIFESTS = (
    "Print what kubectl apply needs for the operator: the definitions of MSJob and MsrunJob, the "
    "account with its rights, and the Deployment."
)
_VERBS = {"run": RUN, "manifests": MANIFESTS}
_NEEDS = ("kopf", "kubernetes")
_EDGE = "launchers.operator.serve"
_DEPLOY = "launchers.operator"
_FILES = ("definitions.yaml", "operator.yaml")


def operator(args: Sequence[str], system: System) -> int:
    """Do what `args` say about the operator."""
    del system
    name, *rest = [*args, ""]
    if name in ("", "-h", "--help"):
        say(_usage())
        return ExitCode.OK if name else ExitCode.USAGE
    if name not in _VERBS:
        raise UsageError(f"msrun operator has no verb {name!r} (choose {', '.join(_VERBS)})")
    return (_run if name == "run" else _print)(rest[:-1])


def _usage() -> str:
    rows = [f"  {name:9} {text.partition(':')[0]}." for name, text in _VERBS.items()]
    return "\n".join(["Usage: msrun operator VERB [OPTIONS]", "", *rows])


def _run(args: Sequence[str]) -> int:
    params = (
        click.Option(["--namespace"], metavar="NAME", help="Watch this namespace alone."),
        click.Option(
            ["--liveness"], metavar="URL", help="Answer health checks at http://HOST:PORT/PATH."
        ),
    )
    words = read_words("msrun operator run", RUN, params, args)
    lacking = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if lacking:
        raise UsageError(
            f"msrun operator needs {' and '.join(lacking)}",
            hint="install the extra: pip install 'msrun[kubernetes]'",
        )
    edge: Any = importlib.import_module(_EDGE)
    asyncio.run(
        edge.serve(Loop.wall_time, namespace=words["namespace"], liveness=words["liveness"])
    )
    return ExitCode.OK


def _print(args: Sequence[str]) -> int:
    read_words("msrun operator manifests", MANIFESTS, (), args)
    folder = importlib.resources.files(_DEPLOY) / "deploy"
    texts = [(folder / name).read_text().rstrip("\n") for name in _FILES]
    answer("\n---\n".join(texts))
    return ExitCode.OK
