"""Text to value, one function an option's type; every refusal starts with the quoted text."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from msrun.errors import UsageError
from msrun.job import EVERY_RANK, JOB_ID_PATTERN, STOP_SIGNALS, Framework, StartMethod
from msrun.units import PORT_MAX, parse_duration, parse_size, quoted

_WHOLE = re.compile(r"-?[0-9]{1,15}")
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_STD = re.compile(r"[0-3]")
_STD_BY_RANK = re.compile(r"[0-9]{1,6}:[0-3](?:,[0-9]{1,6}:[0-3])*")
_QUOTED = re.compile(r"\A(['\"])(.*)\1\Z")
_ONE_COMMA = re.compile(r"(?<!,),(?!,)")
_RANGE = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10}))?")
_RANK_MAX = 999_999
_DEVICE = re.compile(r"[a-z][a-z_]{1,31}")
_RUN_ID_MAX = 256
# The last lines of a log, which reports show, must always be in one piece.
_LOG_LIMIT_MIN = 1 << 20
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")

# These end a job always, `MORE_SIGNALS` only where they are asked to.
SIGNALS = STOP_SIGNALS
MORE_SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGALRM", "SIGXCPU")


class WorkerWord(Enum):
    """Numbers of workers that depend on the machine."""

    AUTO = "auto"
    GPU = "gpu"
    NPU = "npu"
    CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDevice:
    """Devices whose number torch alone knows, such as `xpu`."""

    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankChoice:
    """Some ranks.

    Args:
        every: All ranks, however many there are.
        ranks: Otherwise these.
    """

    every: bool = False
    ranks: frozenset[int] = frozenset()


def text(value: str) -> str:
    """Return `value`, which must not be empty."""
    if not value:
        raise UsageError("'' is empty")
    return value


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers from `low` to `high`; None sets no upper limit."""
    choices = f"choose a whole number from {low}" + ("" if high is None else f" to {high}")

    def parse(value: str) -> int:
        if not _WHOLE.fullmatch(value):
            raise UsageError(f"{quoted(value)} is not a whole number ({choices})")
        number = int(value)
        if number < low or (high is not None and number > high):
            raise UsageError(f"{quoted(value)} is out of range ({choices})")
        return number

    return parse


def words(*choices: str) -> Callable[[str], str]:
    """Return a parser that accepts only `choices`, in any case."""

    def parse(value: str) -> str:
        if value.lower() not in choices:
            raise UsageError(f"{quoted(value)} is unknown ({choose(choices)})")
        return value.lower()

    return parse


def choose(choices: Sequence[str]) -> str:
    """Return `choose a, b or c`."""
    return f"choose {_either(choices)}"


def guess(choices: Sequence[str]) -> str:
    """Return `; did you mean a, b or c?`, nothing when there is no choice."""
    return f"; did you mean {_either(choices)}?" if choices else ""


def _either(choices: Sequence[str]) -> str:
    *first, last = choices
    return f"{', '.join(first)} or {last}" if first else last


def span(count: int, first: int = 0) -> str:
    """Return `count` numbers from `first` on, at least one, such as `0 to 3`."""
    return str(first) if count == 1 else f"{first} to {first + count - 1}"


def boolean(value: str) -> bool:
    """Return the truth of `value`: true or false, 1 or 0, yes or no, on or off."""
    if not is_boolean(value):
        raise UsageError(f"{quoted(value)} is neither true nor false")
    return value.lower() in _TRUE


def is_boolean(value: str) -> bool:
    """Tell whether `boolean` accepts `value`."""
    return value.lower() in (*_TRUE, *_FALSE)


def workers(value: str) -> int | WorkerWord | TorchDevice:
    """Return a number of workers, or the word that stands for one."""
    known = [word.value for word in WorkerWord]
    if value.lower() in known:
        return WorkerWord(value.lower())
    if _DEVICE.fullmatch(value):
        return TorchDevice(kind=value)
    if not _WHOLE.fullmatch(value) or int(value) < 1:
        raise UsageError(
            f"{quoted(value)} is no number of workers ({choose(('1 or more', *known))})"
        )
    return int(value)


def nodes(value: str) -> tuple[int, int]:
    """Return the fewest and the most nodes of `N` or `MIN:MAX`."""
    low, colon, high = value.partition(":")
    bounds = (low, high if colon else low)
    if not all(_WHOLE.fullmatch(bound) for bound in bounds):
        raise UsageError(
            f"{quoted(value)} is no number of nodes (choose N or MIN:MAX, such as 4 or 2:4)"
        )
    fewest, most = map(int, bounds)
    if not 1 <= fewest <= most:
        raise UsageError(
            f"{quoted(value)} is no range of nodes (choose MIN:MAX with 1 <= MIN <= MAX)"
        )
    return fewest, most


def host(value: str) -> str:
    """Return a host name or address; an IPv6 address without its brackets."""
    bare = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if not bare or any(c.isspace() or not c.isprintable() or c in "[]/" for c in bare):
        raise UsageError(f"{quoted(value)} is no host name or address")
    return bare


def endpoint(value: str) -> tuple[str, int | None]:
    """Return host and port of `HOST[:PORT]`; an IPv6 address with a port needs brackets."""
    name, _, port = value.rpartition(":")
    if port and value == f":{port}":
        raise UsageError(f"{quoted(value)} names no host (choose HOST or HOST:PORT)")
    if not name or (":" in name and not name.endswith("]")):
        return host(value), None
    try:
        return host(name), whole(0, PORT_MAX)(port)
    except UsageError as error:
        raise UsageError(f"{quoted(value)} is no HOST[:PORT]: {error.message}") from None


def positive_seconds(value: str) -> float:
    """Return a duration above zero."""
    seconds = parse_duration(value)
    if seconds <= 0:
        raise UsageError(f"{quoted(value)} must be above zero")
    return seconds


def hang_timeout(value: str) -> float | None:
    """Return a duration above zero, None for `auto`, inf for `off`."""
    if value.lower() == "auto":
        return None
    if value.lower() in ("off", "0"):
        return math.inf
    try:
        return positive_seconds(value)
    except UsageError:
        choices = choose(("auto", "off", "a duration above zero such as 90s"))
        raise UsageError(f"{quoted(value)} is no time for a hang ({choices})") from None


def idle_timeout(value: str) -> float:
    """Return a duration of at least a second, inf for `off`."""
    if value.lower() in ("off", "0"):
        return math.inf
    seconds = parse_duration(value)
    if seconds < 1:
        raise UsageError(f"{quoted(value)} is too short (choose off, or 1s or more)")
    return seconds


def log_limit(value: str) -> int | None:
    """Return a size of at least a mebibyte, None for `off`."""
    if value.lower() == "off":
        return None
    size = parse_size(value)
    if size < _LOG_LIMIT_MIN:
        raise UsageError(f"{quoted(value)} is too small (choose off, or 1MiB or more)")
    return size


def patience(value: str) -> float:
    """Return a duration above zero; MindSpore's negative numbers wait for ever."""
    is_negative = _WHOLE.fullmatch(value) and int(value) < 0
    return positive_seconds("inf" if is_negative else value)


def lease(value: str) -> float:
    """Return a duration of a second or more, within which a busy machine is still heard."""
    seconds = parse_duration(value)
    if not 1 <= seconds < math.inf:
        raise UsageError(f"{quoted(value)} is out of range (choose a duration from 1s)")
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RdzvConf:
    """torchrun's `--rdzv-conf`.

    Args:
        seconds: Name of our option -> its value.
        ignored: Keys of torch's own rendezvous, which msrun has no use for.
    """

    seconds: Mapping[str, float]
    ignored: tuple[str, ...] = ()


# `timeout` and `read_timeout` are those of torch's store, and no time for nodes to join.
_TORCHS_OWN = (
    *("close_timeout", "heartbeat_timeout", "is_host", "keep_alive_interval"),
    *("keep_alive_max_attempt", "local_addr", "rank", "read_timeout", "store_type", "timeout"),
    "use_libuv",
)


def rdzv_conf(value: str) -> RdzvConf:
    """Return what torchrun's `k=v,...` means here; keys that torch does not know are refused.

    One pair of quotation marks around it is taken off: lines in programs and YAML files have them
    as they stand in a shell's, and torch's own test too.
    """
    known: dict[str, tuple[str, Callable[[str], float]]] = {
        "join_timeout": ("join-timeout", patience),
        "last_call_timeout": ("last-call", parse_duration),
    }
    seconds: dict[str, float] = {}
    ignored: list[str] = []
    for part in filter(None, _QUOTED.sub(r"\2", value.strip()).split(",")):
        key, equals, setting = (word.strip() for word in part.partition("="))
        if not equals:
            raise UsageError(f"{quoted(value)}: {quoted(part)} is no KEY=VALUE")
        if key in known:
            name, parse = known[key]
            seconds[name] = parse(setting)
        elif key in _TORCHS_OWN:
            ignored.append(key)
        else:
            raise UsageError(
                f"{quoted(value)}: {quoted(key)} is not known to msrun ({choose(tuple(known))})"
            )
    return RdzvConf(seconds=seconds, ignored=tuple(ignored))


def job_id(value: str) -> str:
    """Return a name that can stand in paths and messages."""
    if not JOB_ID_PATTERN.fullmatch(value):
        raise UsageError(
            f"{quoted(value)} is no job id "
            "(choose 1 to 64 letters, digits, '_', '.' or '-', first a letter or digit)"
        )
    return value


def run_id(value: str) -> str:
    """Return torchrun's name of a job, which may be any text of one line."""
    if not value.isprintable() or len(value) > _RUN_ID_MAX:
        raise UsageError(f"{quoted(value)} is no run id (choose up to {_RUN_ID_MAX} characters)")
    return value


def rdzv_backend(value: str) -> str:
    """Return the name of a rendezvous that one of ours stands for."""
    known = ("c10d", "static", "dynamic")
    if value.lower().startswith("etcd"):
        raise UsageError(
            f"{quoted(value)} is not used: msrun brings its own rendezvous ({choose(known)})"
        )
    return words(*known)(value)


def start_method(value: str) -> StartMethod:
    """Return how workers start; torchrun's words are taken for their nearest relatives."""
    known = {
        "fork": StartMethod.FORK,
        "forkserver": StartMethod.FORK,
        "exec": StartMethod.EXEC,
        "spawn": StartMethod.EXEC,
    }
    return known[words(*known)(value)]


def framework(value: str) -> Framework:
    """Return whose workers the job has."""
    return Framework(words(*(each.value for each in Framework))(value))


def module_names(value: str) -> tuple[str, ...]:
    """Return dotted names separated by commas."""
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(
                f"{quoted(name)} is no module name (choose names such as numpy,my.package)"
            )
    return names


def variable(value: str) -> Mapping[str, str]:
    """Return the one variable that `NAME=VALUE` sets."""
    name, equals, setting = value.partition("=")
    if not equals or not _VARIABLE.fullmatch(name) or "\0" in setting:
        raise UsageError(f"{quoted(value)} is no NAME=VALUE")
    return {name: setting}


def shell_words(value: str) -> list[str]:
    """Split one text as a shell would, for options that are given several times."""
    try:
        return shlex.split(value)
    except ValueError:
        raise UsageError(f"{quoted(value)} has an unmatched quotation mark") from None


def std_by_rank(value: str) -> dict[int, int]:
    """Return the streams by local rank of torchrun's `-t` or `-r`, such as `3` or `0:3,1:1`."""
    if _STD.fullmatch(value):
        return {EVERY_RANK: int(value)}
    if not _STD_BY_RANK.fullmatch(value):
        raise UsageError(
            f"{quoted(value)} selects no streams (choose 0 none, 1 stdout, 2 stderr, 3 both, "
            "or by local rank, such as 0:3,1:1)"
        )
    parts = (part.split(":") for part in value.split(","))
    return {int(rank): int(std) for rank, std in parts}


def texts(value: str) -> tuple[str, ...]:
    """Return texts separated by commas, two of which stand for one of a text."""
    parts = (part.replace(",,", ",") for part in _ONE_COMMA.split(value))
    return tuple(part for part in parts if part)


def ranks(value: str) -> RankChoice:
    """Return the ranks of `0,2-3`, `all` (MindSpore: -1) or `none`."""
    if value.lower() in ("all", "-1"):
        return RankChoice(every=True)
    if value.lower() == "none":
        return RankChoice()
    ranges = number_ranges(value, most=_RANK_MAX)
    if ranges is None:
        raise UsageError(f"{quoted(value)} is no list of ranks (choose such as 0,2-3, all or none)")
    return RankChoice(ranks=frozenset(n for first, last in ranges for n in range(first, last + 1)))


def number_ranges(value: str, *, most: int) -> list[tuple[int, int]] | None:
    """Return first and last number of each part of `0,2-3`; None if `value` has another form.

    Args:
        value: The text.
        most: Largest number, which bounds the memory of a caller that counts a range out.
    """
    ranges: list[tuple[int, int]] = []
    for part in value.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last <= most:
            return None
        ranges.append((first, last))
    return ranges


def signals(value: str) -> frozenset[str]:
    """Return the signals that are named, with or without `SIG`, and can end a job."""
    chosen = set()
    for part in filter(None, (word.strip().upper() for word in value.split(","))):
        name = part if part.startswith("SIG") else f"SIG{part}"
        if name not in (*SIGNALS, *MORE_SIGNALS):
            known = choose((*SIGNALS, *MORE_SIGNALS))
            raise UsageError(f"{quoted(value)} names {quoted(part)} ({known})")
        chosen.add(name)
    return frozenset(chosen)


def numa_binding(value: str) -> str:
    """Return one of torchrun's modes."""
    return words("node", "socket", "exclusive", "core-complex")(value)
