"""Verbs that control a running job: how they find it; `stop`, `drain` and `signal`."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from msrun.cli.job.rendezvous import DEFAULT_PORT
from msrun.cli.options import parsers
from msrun.cli.options.words import read_words
from msrun.cli.output import answer, say
from msrun.cli.verbs import elsewhere
from msrun.errors import UsageError
from msrun.job import LOOPBACK, SCHEDULER_LOOPBACK, SERVERS_MAX
from msrun.units import PORT_MAX

if TYPE_CHECKING:
    from msrun.cli.system import System
    from msrun.cluster.wire.control_messages import AnyRequest
    from msrun.processes.control_client import ControlClient
    from msrun.processes.control_file import Card

# Of the JSON of all verbs.
SCHEMA = 1
SIGNUM_MAX = 64
_RANK_MAX = (1 << 31) - 1
PATIENCE = 8.0
_CHOICES_MAX = 8

STOP = "Stop JOB, as SIGTERM to its launchers would; each launcher exits with 143."
DRAIN = (
    "Let NODE leave JOB, which goes on without it or with a spare.  NODE is a host name, an "
    "address or a node rank."
)
SIGNAL = "Send SIGNAL, such as USR1 or 10, to the workers of JOB."

SCALE = (
    "Have JOB go on with other parameter servers, or, where Kubernetes runs it with --nnodes "
    "MIN:MAX, with N nodes.  Nodes beyond the first N leave; new ones join."
)

_WHICH = (
    "JOB is a job id or its beginning; leave it out when only one job runs here.  On machines "
    "without a launcher of the job, --master-addr names the node of its scheduler."
)
WHERE = (
    click.Option(["--master-addr"], metavar="HOST", help="Node of the job's scheduler."),
    click.Option(
        ["--master-port"], metavar="PORT", help=f"Port of the scheduler.  [default: {DEFAULT_PORT}]"
    ),
    click.Option(
        ["--secret-file"],
        metavar="FILE",
        help="File with the secret of the job.  [default: ~/.config/msrun/secret]",
    ),
    *elsewhere.OPTIONS,
)
JSON = click.Option(["--json"], is_flag=True, help="JSON on stdout.")
NODES = click.Option(["--nodes"], metavar="N", help="Nodes that the job is to have.")
SERVERS = click.Option(
    ["--servers"], metavar="N", help="Parameter servers that the job is to have, from now on."
)
_NODES_MAX = 1_000_000


def parse(
    name: str, summary: str, args: Sequence[str], *params: click.Parameter, words: str = "[JOB]"
) -> dict[str, Any]:
    """Return what `args` give to the verb `name`.

    Args:
        name: The verb.
        summary: What it does.
        args: The words after it.
        params: Its own options.
        words: How help shows its arguments, which are `words` in the result.

    Raises:
        UsageError: An option is unknown, lacks its value or has a wrong one.
    """
    about = click.Argument(["words"], nargs=-1, metavar=words)
    return read_words(f"msrun {name}", f"{summary}  {_WHICH}", (about, *params, *WHERE), args)


def split(given: dict[str, Any], name: str, wanted: str) -> str:
    """Return the last word, such as the node of `drain`; the words before it name the job."""
    words = given["words"]
    if not words:
        raise UsageError(f"msrun {name} needs a {wanted}: msrun {name} [JOB] {wanted}")
    given["words"] = words[:-1]
    return str(words[-1])


def find(given: dict[str, Any], system: System) -> Card:
    """Return how to reach the job that is meant.

    Raises:
        UsageError: There is none, or more than one.
    """
    if len(given["words"]) > 1:
        raise UsageError(f"{given['words'][1]!r} is one word too many: one JOB at a time")
    job = given["words"][0] if given["words"] else ""
    if given["master_addr"]:
        return _remote(given, job, system)
    for option in ("master_port", "secret_file"):
        if given[option]:
            name = option.replace("_", "-")
            raise UsageError(f"--{name} needs the node of the scheduler: --master-addr HOST")
    cards = {card.job_id: card for card in reversed(system.jobs())}
    if not cards:
        hint = "where another node has its scheduler: --master-addr HOST"
        raise UsageError("no job of yours runs on this machine", hint=hint)
    exact = [job] if job in cards else [name for name in cards if name.startswith(job)]
    if len(exact) == 1:
        return cards[exact[0]]
    choices = parsers.choose(sorted(exact or cards)[:_CHOICES_MAX])
    if not job:
        raise UsageError(f"{len(cards)} jobs run on this machine ({choices})")
    what = "more than one job" if exact else "no job of yours on this machine"
    raise UsageError(f"{job!r} is {what} ({choices})")


def _remote(given: dict[str, Any], job: str, system: System) -> Card:
    """Return how to reach a job by the address of its scheduler and the user's secret."""
    from msrun.processes.control_file import Card  # Help needs none of it.
    from msrun.supervise.secret import own_file, read_secret
    from msrun.transport.sockets import control_keys

    host = given["master_addr"]
    try:
        port = parsers.whole(1, PORT_MAX)(given["master_port"] or str(DEFAULT_PORT))
    except UsageError as error:
        raise UsageError(f"--master-port {error.message}") from None
    addresses = system.resolve(host)
    if not addresses:
        raise UsageError(f"--master-addr {host!r} is no host that this machine knows")
    secret = read_secret(given["secret_file"] or str(own_file()))
    where = addresses[0]
    if where == LOOPBACK and system.port_problem(SCHEDULER_LOOPBACK, port):
        where = SCHEDULER_LOOPBACK
    return Card(job_id=job, host=where, port=port, keys=control_keys(secret))


@contextlib.contextmanager
def connected(
    given: dict[str, Any], system: System, patience: float = PATIENCE
) -> Iterator[ControlClient]:
    """Yield a connection to the job that is meant."""
    client = system.connect(find(given, system), patience)
    try:
        yield client
    finally:
        client.close()


def stop(args: Sequence[str], system: System) -> int:
    """Stop a job."""
    now = click.Option(["--now"], is_flag=True, help="SIGKILL at once, without waiting --grace.")
    given = parse("stop", STOP, args, now, JSON)
    from msrun.cluster.wire.control_messages import StopJob

    return _order(given, StopJob(now=given["now"]), system)


def drain(args: Sequence[str], system: System) -> int:
    """Let a node leave a job."""
    given = parse("drain", DRAIN, args, JSON, words="[JOB] NODE")
    node = split(given, "drain", "NODE")
    from msrun.cluster.wire.control_messages import DrainNode

    return _order(given, DrainNode(node=node), system)


def scale(args: Sequence[str], system: System) -> int:
    """Change the number of servers, or say how nodes of a job come and go that runs here."""
    given = parse("scale", SCALE, args, NODES, SERVERS, JSON)
    servers = parse_servers(given)
    if servers is not None:
        from msrun.cluster.wire.control_messages import ScaleServers

        return _order(given, ScaleServers(servers=servers), system)
    if given["nodes"] is None:
        raise UsageError("msrun scale needs --servers N, or --launcher kubernetes and --nodes N")
    parse_nodes(given)
    job = find(given, system).job_id
    raise UsageError(
        "msrun scale --nodes needs --launcher kubernetes: nothing starts nodes of job "
        f"{job} by itself",
        hint=f"to grow, start msrun on one more node; to shrink: msrun drain {job} NODE",
    )


def parse_servers(given: dict[str, Any]) -> int | None:
    """Return what `--servers` gives, None where it is not there.

    Raises:
        UsageError: It is no number of servers, or `--nodes` is there, too.
    """
    if given["servers"] is None:
        return None
    if given["nodes"] is not None:
        raise UsageError("--servers and --nodes are two changes: give one at a time")
    try:
        return parsers.whole(1, SERVERS_MAX)(given["servers"])
    except UsageError as error:
        raise UsageError(f"--servers {error.message}") from None


def parse_nodes(given: dict[str, Any]) -> int:
    """Return what `--nodes` gives.

    Raises:
        UsageError: It is not there, or no number of nodes.
    """
    if given["nodes"] is None:
        raise UsageError("msrun scale needs a number: --nodes N or --servers N")
    try:
        return parsers.whole(1, _NODES_MAX)(given["nodes"])
    except UsageError as error:
        raise UsageError(f"--nodes {error.message}") from None


def send_signal(args: Sequence[str], system: System) -> int:
    """Send a signal to workers."""
    ranks_option = rank_option("Ranks that get the signal", "all")
    given = parse("signal", SIGNAL, args, ranks_option, JSON, words="[JOB] SIGNAL")
    signum = parse_signal(split(given, "signal", "SIGNAL"))
    ranks = parse_ranks(given["rank"]) if given["rank"] else []
    from msrun.cluster.wire.control_messages import SignalJob

    return _order(given, SignalJob(signum=signum, ranks=ranks), system)


def _order(given: dict[str, Any], order: AnyRequest, system: System) -> int:
    """Send `order` to the job, and print its answer."""
    from msrun.cluster.wire.control_messages import Done

    with connected(given, system) as client:
        sentence = client.ask(order, Done).sentence
    if given["json"]:
        answer(json.dumps({"schema": SCHEMA, "done": sentence}))
    else:
        say(f"msrun: {sentence}")
    return 0


def rank_option(what: str, default: str) -> click.Option:
    """Return the option that chooses ranks."""
    return click.Option(
        ["--rank", "-r"], metavar="RANKS", help=f"{what}, such as 0,2-3.  [default: {default}]"
    )


def parse_ranks(text: str) -> list[tuple[int, int]]:
    """Return the first and last rank of each range in `text`, such as `0,2-3`."""
    ranges = parsers.number_ranges(text, most=_RANK_MAX)
    if ranges is None:
        raise UsageError(f"--rank {text!r} is no list of ranks (choose such as 0,2-3)")
    from msrun.cluster.bounds import RANGES_MAX

    if len(ranges) > RANGES_MAX:
        raise UsageError(f"--rank has {len(ranges)} ranges of ranks, and may have {RANGES_MAX}")
    return ranges


def parse_signal(text: str) -> int:
    """Return the number of the signal that `text` names, such as `USR1`, `SIGUSR1` or `10`."""
    if text.isascii() and text.isdecimal() and 1 <= int(text) <= SIGNUM_MAX:
        return int(text)
    known: dict[str, int] = {each.name: each.value for each in signal.Signals}
    name = text.upper()
    signum = known.get(name) or known.get(f"SIG{name}")
    if signum is None:
        raise UsageError(
            f"{text!r} is no signal (choose such as USR1, SIGUSR1, or 1 to {SIGNUM_MAX})"
        )
    return signum
