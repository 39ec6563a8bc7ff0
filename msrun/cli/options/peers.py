"""Options that only the peers need: accepted with a note, or refused with a sentence."""

from __future__ import annotations

from msrun.cli.options import parsers
from msrun.cli.options.option import FileForm, Option, OptionGroup, options_in

MONITOR_INTERVAL = Option(
    name="monitor-interval",
    group=OptionGroup.PEERS,
    metavar="SECONDS",
    help="Pause between two looks at workers, which is none: an exit is seen at once.",
    parse=parsers.positive_seconds,
    torchrun="monitor_interval",
)
SIGNALS_TO_HANDLE = Option(
    name="signals-to-handle",
    group=OptionGroup.PEERS,
    metavar="NAMES",
    help="Signals that end the job besides SIGTERM, SIGINT, SIGHUP and SIGQUIT, such as SIGUSR1.",
    parse=parsers.signals,
    torchrun="signals_to_handle",
    file=FileForm.LIST,
)
RDZV_BACKEND = Option(
    name="rdzv-backend",
    group=OptionGroup.PEERS,
    metavar="NAME",
    help="Name of the rendezvous, c10d, static or dynamic: each means msrun's own.",
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
    help="Events of torchelastic's form, a line of JSON each on stderr: console, or null.",
    parse=parsers.words("null", "console"),
    field="event_log",
    default_text="null",
    torchrun="event_log_handler",
)

FRAMEWORK = Option(
    name="framework",
    group=OptionGroup.PEERS,
    metavar="auto|torch|mindspore",
    help="Whose workers they are; those of MindSpore need its scheduler, which auto notices.",
    parse=parsers.framework,
    field="framework",
    default_text="auto",
)

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

NOTED: dict[Option[object], str] = {
    MONITOR_INTERVAL: "has no effect: a worker's exit is an event, nothing polls for it",
}

PEERS = options_in(globals())
