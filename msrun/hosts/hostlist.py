"""Hosts by name: lists such as `node[01-04,7]`, hostfiles, and filters that choose from them.

A list keeps its order and its repetitions.  Hostfiles of Open MPI, MPICH, Intel MPI,
DeepSpeed and PBS are one form here: a host, or a list of them, and what is said of it.

    node0 slots=8              # Open MPI, DeepSpeed
    node[1-3]:8                # MPICH, Intel MPI
    alice@[2001:db8::7]:2222   # user and port of ssh
    10.0.0.9 slots=2 user=alice port=2222
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from msrun.errors import UsageError
from msrun.units import PORT_MAX, quoted

HOSTS_MAX = 65_536
SLOTS_MAX = 1024
TEXT_MAX = 16 * 2**20

# None begins with "-", so that no program takes a name for an option of its own.
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252})")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\\+-]{0,63}")
_RANGE = re.compile(r"([0-9]{1,15})(?:-([0-9]{1,15}))?")
_WHOLE = re.compile(r"[0-9]{1,9}")
_ADDRESS = re.compile(r"[0-9.]+")
_LAST_NUMBER = re.compile(r"(.*?)([0-9]{1,15})([^0-9]*)")
_BRACKETS_MAX = 16


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A node as a hostfile names it.

    Args:
        name: Host name or address; IPv6 without brackets.
        slots: Places for workers; None lets the node decide.
        user: Who logs in there; None for the user of this process.
        port: Port of its ssh server; None for ssh's own choice.
        devices: Which of its devices a filter chose; None for all of them.
    """

    name: str
    slots: int | None = None
    user: str | None = None
    port: int | None = None
    devices: tuple[int, ...] | None = None


# -- lists -----------------------------------------------------------------------------


def expand(text: str) -> tuple[str, ...]:
    """Return the names of a list such as `rack[1-2]node[08-10,15],login,[::1]`.

    A number keeps the width of the range's first.  Several brackets in a name count
    like digits, the last one fastest, as in Slurm.

    Raises:
        UsageError: The text is no such list, or has more than 65,536 hosts.
    """
    names: list[str] = []
    for part in _split(text):
        names += _expand_one(part, HOSTS_MAX - len(names))
    return tuple(names)


def compress(names: Iterable[str]) -> str:
    """Return a short list that `expand` turns into exactly `names`, which must be sound ones."""
    parts: list[str] = []
    group: tuple[str, ...] | None = None
    runs: list[tuple[str, str]] = []
    for name in names:
        numbered = _numbered(name)
        if numbered is None or numbered[::2] != group:
            parts += _bracketed(group, runs)
            group, runs = None, []
        if numbered is None:
            parts.append(f"[{name}]" if ":" in name else name)
        else:
            group = numbered[::2]
            _append(runs, numbered[1])
    return ",".join([*parts, *_bracketed(group, runs)])


def _split(text: str) -> Iterator[str]:
    """Yield the parts between the commas that stand outside of brackets."""
    if len(text) > TEXT_MAX:
        raise UsageError(f"a host list has {len(text)} characters (at most {TEXT_MAX})")
    part, is_inside = "", False
    for piece in [*re.split(r"([\[\],])", text), ","]:
        if piece == "," and not is_inside:
            if not part.strip():
                raise UsageError(f"host list {quoted(text)} lacks a name at a comma or its end")
            yield part.strip()
            part = ""
        else:
            part += piece
            is_inside = piece == "[" or (is_inside and piece != "]")
    if part:
        raise UsageError(f"host list {quoted(text)} has a bracket that is not closed")


def _expand_one(part: str, most: int) -> list[str]:
    """Return the names that one part of a list stands for, `most` at most."""
    pieces = re.split(r"\[([^\[\]]*)\]", part)
    if len(pieces) > 2 * _BRACKETS_MAX + 1:
        raise UsageError(f"host {quoted(part)} has more than {_BRACKETS_MAX} brackets")
    if len(pieces) > 1 and ":" in pieces[1]:
        if len(pieces) != 3 or pieces[0] or pieces[2]:  # noqa: PLR2004 - "", address, ""
            raise UsageError(f"host {quoted(part)}: an address in brackets stands alone")
        pieces = [pieces[1]]
    names = [pieces[0]]
    for numbers, literal in zip(pieces[1::2], pieces[2::2], strict=True):
        counted = _expand_numbers(part, numbers, most // len(names))
        names = [f"{name}{number}{literal}" for name in names for number in counted]
    if len(names) > most:
        raise UsageError(_too_many(part))
    for name in names:
        _check_name(name)
    return names


def _expand_numbers(part: str, text: str, most: int) -> list[str]:
    numbers: list[str] = []
    for entry in text.split(","):
        match = _RANGE.fullmatch(entry.strip())
        if match is None:
            raise UsageError(f"host {quoted(part)}: {quoted(entry)} is no range such as 01-04 or 7")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise UsageError(f"host {quoted(part)}: range {entry} goes backwards")
        width = len(first) if first.startswith("0") else 1
        if last.startswith("0") and len(last) != len(first):
            raise UsageError(f"host {quoted(part)}: range {entry} has numbers of unequal width")
        if int(last) - int(first) >= most - len(numbers):
            raise UsageError(_too_many(part))
        numbers += (f"{n:0{width}}" for n in range(int(first), int(last) + 1))
    return numbers


def _too_many(part: str) -> str:
    return f"host list with {quoted(part)} has more than {HOSTS_MAX} hosts"


def _numbered(name: str) -> tuple[str, str, str] | None:
    """Return `name` in three, of which the second is the number that lists count by."""
    if ":" in name:
        return None
    # The last number of an address, or of the name before its domain.
    head, dot, domain = (name, "", "") if _ADDRESS.fullmatch(name) else name.partition(".")
    match = _LAST_NUMBER.fullmatch(head)
    return (match[1], match[2], match[3] + dot + domain) if match else None


def _append(runs: list[tuple[str, str]], number: str) -> None:
    """Add `number` to the last run if it continues it, else as a run of its own."""
    if runs:
        first, last = runs[-1]
        width = len(first) if first.startswith("0") else 1
        if number == f"{int(last) + 1:0{width}}":
            runs[-1] = (first, number)
            return
    runs.append((number, number))


def _bracketed(group: tuple[str, ...] | None, runs: list[tuple[str, str]]) -> list[str]:
    if group is None:
        return []
    spans = [first if first == last else f"{first}-{last}" for first, last in runs]
    text = ",".join(spans)
    return [f"{group[0]}{text if text.isdigit() else f'[{text}]'}{group[1]}"]


# -- one host --------------------------------------------------------------------------


def _check_name(name: str) -> None:
    plain = name
    if ":" in name:
        try:
            ipaddress.IPv6Address(name)
        except ValueError:
            raise UsageError(f"host {quoted(name)} is no IPv6 address") from None
        plain = name.partition("%")[2] or "no_zone"
    if not _NAME.fullmatch(plain):
        hint = "a name has letters, digits, '.', '-' and '_', and does not begin with '-' or '.'"
        raise UsageError(f"host {quoted(name)} is no host name or address", hint=hint)


def _number(what: str, text: str, least: int, most: int) -> int:
    if not _WHOLE.fullmatch(text) or not least <= int(text) <= most:
        raise UsageError(f"{what} {quoted(text)} is no number from {least} to {most}")
    return int(text)


def _slots(text: str) -> int:
    try:
        return _number("slots", text, 1, SLOTS_MAX)
    except UsageError as error:
        hint = "a port of ssh is written user@host:PORT or port=PORT"
        raise UsageError(error.message, hint=hint) from None


def _port(text: str) -> int:
    return _number("port", text, 1, PORT_MAX)


def _user(text: str) -> str:
    if not _USER.fullmatch(text):
        raise UsageError(f"user {quoted(text)} is no name to log in by")
    return text


def parse_hosts(word: str) -> tuple[Host, ...]:
    """Return the hosts of `[USER@]LIST[:NUMBER]`.

    The number is a port of ssh after a user, and otherwise the slots of each host, as
    MPICH has it.

    Raises:
        UsageError: The word is no such thing.
    """
    user, at, rest = word.rpartition("@")
    names, number = _split_number(rest)
    host = Host(
        name="",
        user=_user(user) if at else None,
        port=None if number is None or not at else _port(number),
        slots=None if number is None or at else _slots(number),
    )
    return tuple(replace(host, name=name) for name in expand(names))


def _split_number(text: str) -> tuple[str, str | None]:
    """Return the list of `LIST[:NUMBER]`, and what stands behind its colon, None without."""
    if text.count(":") > 1 and "[" not in text:
        return f"[{text}]", None  # a bare address
    inside, bracket, rest = text.rpartition("]")
    names, colon, number = rest.partition(":")
    return inside + bracket + names, number if colon else None


# -- hostfiles -------------------------------------------------------------------------

_READERS: dict[str, tuple[str, Callable[[str], int | str]]] = {
    "slots": ("slots", _slots),
    "slot": ("slots", _slots),
    "count": ("slots", _slots),
    "cpu": ("slots", _slots),
    "max_slots": ("max_slots", _slots),
    "slots_max": ("max_slots", _slots),
    "user": ("user", _user),
    "username": ("user", _user),
    "port": ("port", _port),
}


def parse_hostfile(text: str, name: str) -> tuple[Host, ...]:
    """Return the hosts of a hostfile, each once, in the order of their first lines.

    A host that is repeated without a number has a slot for each time, as in a node file
    of PBS.

    Args:
        text: The file's content.
        name: What to call the file in messages.

    Raises:
        UsageError: A line is wrong, or there is no host; the message starts with `name:line`.
    """
    if len(text) > TEXT_MAX:
        raise UsageError(f"{name} has {len(text)} characters (at most {TEXT_MAX})")
    hosts: dict[str, tuple[Host, int]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        try:
            for host in _read_line(words):
                earlier = hosts.get(host.name)
                hosts[host.name] = (_repeated(earlier, host), earlier[1] if earlier else number)
        except UsageError as error:
            raise UsageError(f"{name}:{number}: {error.message}", hint=error.hint) from None
        if len(hosts) > HOSTS_MAX:
            raise UsageError(f"{name}:{number}: there are more than {HOSTS_MAX} hosts")
    if not hosts:
        raise UsageError(f"{name} names no host", hint="write one on each line")
    return tuple(host for host, _ in hosts.values())


def _read_line(words: Sequence[str]) -> tuple[Host, ...]:
    if not words:
        return ()
    hosts = parse_hosts(words[0])
    first = {"slots": hosts[0].slots, "user": hosts[0].user, "port": hosts[0].port}
    given: dict[str, Any] = {field: value for field, value in first.items() if value is not None}
    for word in words[1:]:
        field, value = _read_field(word)
        if field in given:
            raise UsageError(f"{quoted(word)}: {field} {given[field]} is already given")
        given[field] = value
    most = given.pop("max_slots", None)
    if most is not None and given.setdefault("slots", most) > most:
        raise UsageError(f"slots {given['slots']} is more than max_slots {most}")
    return tuple(replace(host, **given) for host in hosts)


def _read_field(word: str) -> tuple[str, int | str]:
    key, equals, value = word.partition("=")
    field, read = _READERS.get(key.lower().replace("-", "_"), ("", str))
    if not equals or not field:
        choices = "slots=, max_slots=, user= or port="
        raise UsageError(f"{quoted(word)} is not known of a host (choose {choices})")
    return field, read(value)


def _repeated(earlier: tuple[Host, int] | None, host: Host) -> Host:
    """Return `host` with the slot of `earlier`, the same host on a line before."""
    if earlier is None:
        return host
    before, line = earlier
    is_counted = host.slots is None and (host.user, host.port) == (before.user, before.port)
    if not is_counted:
        raise UsageError(f"host {host.name} stands on line {line} already")
    return replace(host, slots=_slots(str((before.slots or 1) + 1)))


def render_host(host: Host) -> str:
    """Return the line of `host` in a hostfile that `parse_hostfile` reads back."""
    name = f"[{host.name}]" if ":" in host.name else host.name
    fields = {"slots": host.slots, "user": host.user, "port": host.port}
    said = [f"{key}={value}" for key, value in fields.items() if value is not None]
    return " ".join([name, *said])


# -- filters ---------------------------------------------------------------------------


def select(hosts: Sequence[Host], *, include: str = "", exclude: str = "") -> tuple[Host, ...]:
    """Return those of `hosts` that two filters leave, in their order.

    A filter is a list such as `node[1-3],node7`, or DeepSpeed's `node1@node2:0,2`, in
    which the numbers behind a colon choose devices of the hosts before it.

    Args:
        hosts: What there is.
        include: Hosts to keep; empty keeps all.
        exclude: Hosts, or devices of them, to leave out.

    Raises:
        UsageError: A filter is no such thing, names a host or device that is not there, or
            nothing is left.
    """
    chosen: list[Host] = []
    wanted = _parse_filter("--include", include, hosts)
    unwanted = _parse_filter("--exclude", exclude, hosts)
    for host in hosts:
        if include and host.name not in wanted:
            continue
        devices = wanted.get(host.name)
        if host.name in unwanted:
            if not (refused := unwanted[host.name]):
                continue
            devices = [d for d in devices or range(host.slots or 0) if d not in refused]
            if not devices:
                continue
        if devices:
            host = replace(host, slots=len(devices), devices=tuple(devices))  # noqa: PLW2901
        chosen.append(host)
    if not chosen:
        raise UsageError("--include and --exclude leave no host")
    return tuple(chosen)


def _parse_filter(flag: str, text: str, hosts: Sequence[Host]) -> dict[str, list[int]]:
    """Return the hosts that a filter names, with their devices; none means all."""
    try:
        return _chosen(text, {host.name: host for host in hosts})
    except UsageError as error:
        raise UsageError(f"{flag} {quoted(text)}: {error.message}") from None


def _chosen(text: str, known: Mapping[str, Host]) -> dict[str, list[int]]:
    chosen: dict[str, list[int]] = {}
    for part in filter(None, (part.strip() for part in text.split("@"))):
        names, devices = _split_number(part)
        for name in expand(names):
            if name in chosen:
                raise UsageError(f"{name} is given twice")
            if name not in known:
                raise UsageError(f"{name} is no host of the job")
            chosen[name] = _parse_devices(devices, known[name])
    return chosen


def _parse_devices(text: str | None, host: Host) -> list[int]:
    if text is None:
        return []
    if host.slots is None:
        raise UsageError(f"{host.name} has no slots= to choose devices from")
    what = f"device of {host.name}"
    return sorted({_number(what, part, 0, host.slots - 1) for part in text.split(",")})
