"""Options that only the peers need: accepted with a note, or refused with a sentence."""

from __future__ import annotations

from msrun.cli.options import parsers
from msrun.cli.options.option import FileForm, Option, OptionGroup, options_in

MONITOR_INTERVAL = Option(
    name="monitor-interval",
    group=OptionGroup.PEERS,
    metavar="SECONDS",
    help="No effect: a worker's exit is seen at once.",
    parse=parsers.positive_seconds,
    torchrun="monitor_interval",
)
SIGNALS_TO_HANDLE = Option(
    name="signals-to-handle",
    group=OptionGroup.PEERS,
    metavar="NAMES",
    help="No effect: SIGTERM, SIGINT, SIGHUP and SIGQUIT end the job, SIGUSR1 and 2 reach workers.",
    parse=parsers.signals,
    torchrun="signals_to_handle",
    file=FileForm.LIST,
)
RDZV_BACKEND = Option(
    name="rdzv-backend",
    group=OptionGroup.PEERS,
    metavar="NAME",
    help="No effect: c10d, static and dynamic all mean msrun's own rendezvous.",
    parse=parsers.rdzv_backend,
    torchrun="rdzv_backend",
)
LOGS_SPECS = Option(
    name="logs-specs",
    group=OptionGroup.PEERS,
    metavar="NAME",
    help="Only default is accepted.",
    parse=parsers.words("default"),
    torchrun="logs_specs",
)
EVENT_LOG_HANDLER = Option(
    name="event-log-handler",
    group=OptionGroup.PEERS,
    metavar="NAME",
    help="Only null is accepted: verdict.json and the scheduler's log have the events.",
    parse=parsers.words("null"),
    torchrun="event_log_handler",
)

_FILTERS = "is refused: every worker's output is in its own log, which grep can search"
_SIMULATION = "is refused: msrun simulates no cluster (choose -1, off)"

SIM_LEVEL = Option(
    name="sim-level",
    group=OptionGroup.REFUSED,
    metavar="N",
    help="Level of a dry run.",
    parse=str,
    unset=frozenset({"-1"}),
    refusal=_SIMULATION,
)
SIM_RANK_ID = Option(
    name="sim-rank-id",
    group=OptionGroup.REFUSED,
    metavar="RANK",
    help="Rank of a dry run.",
    parse=str,
    unset=frozenset({"-1"}),
    refusal=_SIMULATION,
)
DUPLICATE_STDOUT_FILTERS = Option(
    name="duplicate-stdout-filters",
    group=OptionGroup.REFUSED,
    metavar="WORDS",
    help="Copy of some lines of stdout.",
    parse=str,
    torchrun="duplicate_stdout_filters",
    file=FileForm.LIST,
    unset=frozenset({""}),
    refusal=_FILTERS,
)
DUPLICATE_STDERR_FILTERS = Option(
    name="duplicate-stderr-filters",
    group=OptionGroup.REFUSED,
    metavar="WORDS",
    help="Copy of some lines of stderr.",
    parse=str,
    torchrun="duplicate_stderr_filters",
    file=FileForm.LIST,
    unset=frozenset({""}),
    refusal=_FILTERS,
)

NOTED: dict[Option[object], str] = {
    MONITOR_INTERVAL: "has no effect: a worker's exit is an event, nothing polls for it",
}

PEERS = options_in(globals())
