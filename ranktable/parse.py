"""JSON text -> RankTable, with every problem named by its JSON path."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import NoReturn, TypeVar

from ranktable.check import PROBLEMS_MAX, check_table, quote
from ranktable.model import (
    Extra,
    RankTable,
    RankTableError,
    Server,
    SuperPod,
    TableDevice,
    TableProblem,
    TableStatus,
    UnknownVersionError,
    Version,
)

_BYTES_MAX = 64 * 2**20
# Ten thousand servers of sixteen devices with every field hold about 1.7 million.
_VALUES_MAX = 3_000_000
_DEPTH_MAX = 32
_DIGITS_MAX = 40
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,20}")
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_VERSIONS = {version.value: version for version in Version}
_STATUSES = {status.value: status for status in TableStatus}

T = TypeVar("T")


def parse_table(text: str | bytes, *, is_part: bool = False) -> RankTable:
    """Return the rank table that `text` holds.

    Numbers may be JSON integers or strings.  Fields unknown to the model are kept
    and written back.  A table that is still "initializing" may lack everything
    but its status.

    Args:
        text: The file's content, bytes in UTF-8; at most 64 MiB.
        is_part: Ranks need not start at 0, because the table is one server's piece of a
            larger one.

    Raises:
        UnknownVersionError: The version is neither 1.0 nor 1.2.
        RankTableError: Anything else is wrong.  First all wrong types and missing fields
            are reported, then, once there are none, all that `check_table` finds; 10,000 at most.
    """
    problems: list[TableProblem] = []
    table = _read_table(_load(text), problems)
    problems = problems or list(check_table(table, is_part=is_part))
    if problems:
        raise RankTableError(tuple(problems))
    return table


# -- JSON ------------------------------------------------------------------------------


class _Repeating(dict[str, object]):
    """A JSON object in which a key stands twice."""

    key = ""


def _load(text: str | bytes) -> object:
    if len(text) > _BYTES_MAX:
        _refuse(f"the file is longer than {_BYTES_MAX // 2**20} MiB")
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        _refuse(f"the file is not UTF-8: byte {error.start} is 0x{byte:02x}")
    if sum(decoded.count(mark) for mark in ",[{") > _VALUES_MAX:
        _refuse(f"the file holds more than {_VALUES_MAX} values")
    try:
        return json.loads(
            decoded,
            object_pairs_hook=_json_object,
            parse_int=_json_int,
            parse_float=_json_float,
            parse_constant=_json_constant,
        )
    except json.JSONDecodeError as error:
        _refuse(f"the file is not JSON: line {error.lineno} column {error.colno}: {error.msg}")
    except ValueError as error:  # From one of the functions below.
        _refuse(f"the file is not JSON: {error}")
    except RecursionError:
        _refuse(f"the file is nested deeper than {_DEPTH_MAX} levels")


def _refuse(message: str) -> NoReturn:
    raise RankTableError((TableProblem("", message),)) from None


def _json_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    repeating = _Repeating(value)
    times = Counter(key for key, _ in pairs)
    repeating.key = next(key for key in times if times[key] > 1)
    return repeating


def _json_int(text: str) -> int:
    if len(text) > _DIGITS_MAX:
        raise ValueError(f"a number has {len(text)} digits (at most {_DIGITS_MAX})")
    return int(text)


def _json_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:_DIGITS_MAX]} is out of range")
    return value


def _json_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON value")


def _kind(value: object) -> str:
    """Return what JSON calls the type of `value`, with its article."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


# -- one object at a time --------------------------------------------------------------


class _Fields:
    """A JSON object being read: each field that is asked for leaves it.

    After a problem a method returns a placeholder; `parse_table` raises before
    anyone sees it.

    Args:
        value: What the file has in this place; anything but an object is a problem.
        path: Its JSON path.
        problems: Where problems go.
    """

    def __init__(self, value: object, path: str, problems: list[TableProblem]) -> None:
        self._path = path
        self._problems = problems
        self._values: dict[str, object] = {}
        self.is_object = isinstance(value, dict)
        if isinstance(value, dict):
            self._values = dict(value)
            if isinstance(value, _Repeating):
                self.problem(value.key, "stands twice in one object")
        else:
            self._add(path, f"is {_kind(value)}, not an object")

    def path(self, key: str) -> str:
        shown = key if _PLAIN_KEY.fullmatch(key) else quote(key)
        return f"{self._path}.{shown}" if self._path else shown

    def problem(self, key: str, message: str) -> None:
        self._add(self.path(key), message)

    def has(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str) -> str:
        return self._required(key, self.optional_text) or ""

    def number(self, key: str) -> int:
        return self._required(key, self.optional_number) or 0

    def optional_text(self, key: str) -> str | None:
        if key not in self._values:
            return None
        value = self._values.pop(key)
        if isinstance(value, str):
            return value
        self.problem(key, f"is {_kind(value)}, not a string")
        return None

    def optional_number(self, key: str) -> int | None:
        if key not in self._values:
            return None
        value = self._values.pop(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if not isinstance(value, str):
            self.problem(key, f"is {_kind(value)}, not a whole number")
        elif _WHOLE_NUMBER.fullmatch(value):
            return int(value)
        else:
            self.problem(key, f"{quote(value)} is no whole number")
        return None

    def array(self, key: str, read: Callable[["_Fields"], T]) -> tuple[T, ...]:
        """Return the objects of an array, each through `read`; empty without the field."""
        value = self._values.pop(key, [])
        if not isinstance(value, list):
            self.problem(key, f"is {_kind(value)}, not an array")
            return ()
        items = (
            _Fields(item, f"{self.path(key)}[{i}]", self._problems) for i, item in enumerate(value)
        )
        return tuple(read(item) for item in items if item.is_object)

    def require(self, key: str) -> None:
        if key not in self._values:
            self.problem(key, "is missing")

    def extra(self) -> Extra:
        """Return the fields that were not read, as `model.Extra`."""
        kept: list[tuple[str, str]] = []
        for key, value in sorted(self._values.items()):
            trouble = _check_foreign(value)
            if trouble:
                self.problem(key, trouble)
            else:
                kept.append((key, json.dumps(value, sort_keys=True, separators=(",", ":"))))
        return tuple(kept)

    def _add(self, path: str, message: str) -> None:
        self._problems.append(TableProblem(path, message))
        if len(self._problems) == PROBLEMS_MAX:
            raise RankTableError(tuple(self._problems))

    def _required(self, key: str, read: Callable[[str], T | None]) -> T | None:
        self.require(key)
        return read(key)


def _check_foreign(value: object) -> str | None:
    """Return why the value of an unknown field cannot be kept, None when it can."""
    waiting = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if depth > _DEPTH_MAX:
            return f"is nested deeper than {_DEPTH_MAX} levels"
        if isinstance(item, _Repeating):
            return f"holds the key {quote(item.key)} twice"
        if isinstance(item, dict):
            waiting += ((child, depth + 1) for child in item.values())
        elif isinstance(item, list):
            waiting += ((child, depth + 1) for child in item)
    return None


# -- the table -------------------------------------------------------------------------


def _read_table(value: object, problems: list[TableProblem]) -> RankTable:
    fields = _Fields(value, "", problems)
    if not fields.is_object:
        raise RankTableError(tuple(problems))
    status = _read_status(fields)
    version = _read_version(fields, is_needed=status is TableStatus.COMPLETED)
    if status is TableStatus.COMPLETED:
        if fields.has("server_group_list"):
            fields.problem("server_group_list", "holds several tables; take out the one you need")
        fields.require("server_list")
        if version is Version.V1_0:
            fields.require("server_count")
    server_count = fields.optional_number("server_count")
    server_list = fields.array("server_list", _read_server)
    super_pod_list = fields.array("super_pod_list", _read_super_pod)
    if not problems and server_count not in (None, len(server_list)):
        length = len(server_list)
        fields.problem("server_count", f"is {server_count}, but server_list is {length} long")
    return RankTable(
        version=version,
        status=status,
        server_list=server_list,
        super_pod_list=super_pod_list,
        extra=fields.extra(),
    )


def _read_status(fields: _Fields) -> TableStatus:
    if not fields.has("status"):
        fields.problem("status", 'is missing (choose "completed" or "initializing")')
        return TableStatus.COMPLETED
    text = fields.optional_text("status")
    if text is not None and text not in _STATUSES:
        fields.problem("status", f'is {quote(text)} (choose "completed" or "initializing")')
    return _STATUSES.get(text or "", TableStatus.COMPLETED)


def _read_version(fields: _Fields, *, is_needed: bool) -> Version:
    if fields.has("version"):
        text = fields.optional_text("version")
        if text is not None and text not in _VERSIONS:
            raise _unknown_version(
                fields, "version", f'{quote(text)} is not read (choose "1.0" or "1.2")'
            )
        return _VERSIONS.get(text or "", Version.V1_0)
    if fields.has("group_list"):
        raise _unknown_version(
            fields,
            "group_list",
            "is the form older than version 1.0, which is not read; write the table anew",
        )
    if is_needed:
        fields.problem("version", 'is missing (choose "1.0" or "1.2")')
    return Version.V1_0


def _unknown_version(fields: _Fields, key: str, message: str) -> UnknownVersionError:
    return UnknownVersionError((TableProblem(fields.path(key), message),))


def _read_server(fields: _Fields) -> Server:
    fields.require("device")
    return Server(
        server_id=fields.text("server_id"),
        device=fields.array("device", _read_device),
        host_ip=fields.optional_text("host_ip"),
        server_ip=fields.optional_text("server_ip"),
        container_ip=fields.optional_text("container_ip"),
        pod_ip=fields.optional_text("pod_ip"),
        hardware_type=fields.optional_text("hardware_type"),
        host_nic_ip=fields.optional_text("host_nic_ip"),
        extra=fields.extra(),
    )


def _read_device(fields: _Fields) -> TableDevice:
    return TableDevice(
        device_id=fields.number("device_id"),
        rank_id=fields.number("rank_id"),
        device_ip=fields.optional_text("device_ip"),
        super_device_id=fields.optional_number("super_device_id"),
        device_port=fields.optional_number("device_port"),
        backup_device_ip=fields.optional_text("backup_device_ip"),
        backup_device_port=fields.optional_number("backup_device_port"),
        host_port=fields.optional_number("host_port"),
        device_logical_id=fields.optional_number("device_logical_id"),
        extra=fields.extra(),
    )


def _read_super_pod(fields: _Fields) -> SuperPod:
    fields.require("server_list")
    return SuperPod(
        super_pod_id=fields.text("super_pod_id"),
        server_list=fields.array("server_list", _read_pod_server),
        extra=fields.extra(),
    )


def _read_pod_server(fields: _Fields) -> str:
    server_id = fields.text("server_id")
    for key, _ in fields.extra():
        fields.problem(key, "is no field of a super pod's server")
    return server_id
