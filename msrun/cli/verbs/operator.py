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
from msrun.units import parse_duration

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
_LEASE_SECONDS_MAX = 3600.0
# By the names that operators of the field have.
_RUN_OPTIONS = (
    click.Option(["--namespace"], metavar="NAME", help="Watch this namespace alone."),
    click.Option(
        ["--metrics-bind-address"],
        metavar="HOST:PORT",
        default="0",
        show_default=True,
        help="Where Prometheus reads /metrics, such as :8080; 0 is nowhere.",
    ),
    click.Option(
        ["--health-probe-bind-address"],
        metavar="HOST:PORT",
        default="0",
        show_default=True,
        help="Where /healthz and /readyz are, such as :8081; 0 is nowhere.",
    ),
    click.Option(
        ["--leader-elect"], is_flag=True, help="Of several operators, let one work at a time."
    ),
    click.Option(
        ["--leader-elect-lease-duration"],
        metavar="DURATION",
        default="15s",
        show_default=True,
        help="Time after which another one takes over.",
    ),
    click.Option(
        ["--leader-elect-resource-namespace"],
        metavar="NAME",
        help="Namespace of the Lease.  [default: of the pod]",
    ),
    click.Option(
        ["--gang-scheduler-name"],
        metavar="NAME",
        default="",
        help="Place all pods of an MSJob at once: volcano or scheduler-plugins.",
    ),
)


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
    words = read_words("msrun operator run", RUN, _RUN_OPTIONS, args)
    lacking = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if lacking:
        raise UsageError(
            f"msrun operator needs {' and '.join(lacking)}",
            hint="install the extra: pip install 'msrun[kubernetes]'",
        )
    edge: Any = importlib.import_module(_EDGE)
    options = edge.OperatorOptions(
        namespace=words["namespace"],
        metrics_address=words["metrics_bind_address"],
        probe_address=words["health_probe_bind_address"],
        elects=words["leader_elect"],
        lease_seconds=_lease_seconds(words["leader_elect_lease_duration"]),
        lease_namespace=words["leader_elect_resource_namespace"],
        gang_scheduler=words["gang_scheduler_name"],
    )
    asyncio.run(edge.serve(options, wall=Loop.wall_time, clock=Loop.now))
    return ExitCode.OK


def _lease_seconds(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except UsageError as error:
        raise UsageError(f"--leader-elect-lease-duration {error.message}") from None
    if not 1 <= seconds <= _LEASE_SECONDS_MAX:
        limits = f"1s to {_LEASE_SECONDS_MAX:g}s"
        raise UsageError(f"--leader-elect-lease-duration {text} is out of range (choose {limits})")
    return seconds


def _print(args: Sequence[str]) -> int:
    read_words("msrun operator manifests", MANIFESTS, (), args)
    folder = importlib.resources.files(_DEPLOY) / "deploy"
    texts = [(folder / name).read_text().rstrip("\n") for name in _FILES]
    answer("\n---\n".join(texts))
    return ExitCode.OK
