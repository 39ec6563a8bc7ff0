"""`--bind-core` and `--bind-numa` as MindSpore writes them: a switch, a JSON object, a file.

`{"device0": ["0-3", "8,9"], "device1": ["4-7"]}` names what the worker of each device
gets.  `--bind-numa` also takes MindSpore's bind_config file, which may bind CPUs too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from msrun.bounded_file import read_bounded
from msrun.cli.options.parsers import choose, is_boolean, number_ranges
from msrun.errors import UsageError
from msrun.job import Binding, BindMode
from msrun.units import quoted

Numbers = tuple[int, ...]

_DEVICE = re.compile(r"device_?([0-9]{1,5})")
_NUMBER_MAX = 99_999
_SWITCHES = {"auto": BindMode.AUTO, "off": BindMode.OFF}
_SCHEDULER_NOTE = "the scheduler is not bound, so its entry is not used"


@dataclass(frozen=True, slots=True, kw_only=True)
class BindRequest:
    """What one of the two options asks for; None leaves that half alone.

    Args:
        cpus: CPU binding.
        cpu_nodes: Device -> NUMA nodes whose CPUs it gets; stands in for `cpus`.
        memory: Memory binding.
        notes: What of the value is not used.
    """

    cpus: Binding | None = None
    cpu_nodes: dict[int, Numbers] = field(default_factory=dict)
    memory: Binding | None = None
    notes: tuple[str, ...] = ()


def parse_bind_core(value: str) -> BindRequest:
    """Return what `--bind-core` asks for."""
    mode = _switch(value)
    if mode is not None:
        return BindRequest(cpus=Binding(mode=mode))
    by_device, notes = _devices(_json_object(value, value), value, _number_lists)
    return BindRequest(cpus=_given(by_device), notes=notes)


def parse_bind_numa(value: str) -> BindRequest:
    """Return what `--bind-numa` asks for; reads the file that it names."""
    mode = _switch(value)
    if mode is not None:
        return BindRequest(memory=Binding(mode=mode))
    if value.lstrip().startswith("{") or not value.endswith(".json"):
        by_device, notes = _devices(_json_object(value, value), value, _numa_nodes)
        return BindRequest(memory=_given(by_device), notes=notes)
    return _from_file(value)


def is_bind_value(word: str) -> bool:
    """Tell whether the word after `--bind-core` or `--bind-numa` is its value."""
    return is_boolean(word) or word.lower() in _SWITCHES or word.startswith("{")


def is_numa_value(word: str) -> bool:
    """Tell whether the word after `--bind-numa` is its value, a file included."""
    return is_bind_value(word) or word.endswith(".json")


def _switch(value: str) -> BindMode | None:
    """Return the mode that a single word stands for, None when it is no such word."""
    if is_boolean(value):
        return BindMode.AUTO if value.lower() in ("true", "1", "yes", "on") else BindMode.OFF
    return _SWITCHES.get(value.lower())


def _given(by_device: dict[int, Numbers]) -> Binding:
    return Binding(mode=BindMode.GIVEN, by_device=by_device)


def _json_object(text: str, value: str) -> dict[str, object]:
    """Return the JSON object in `text`, which `value` is or names."""
    try:
        root = json.loads(text)
    except (ValueError, RecursionError):
        root = None
    if not isinstance(root, dict):
        example = '{"device0": ["0-3"]}'
        raise UsageError(
            f"{quoted(value)} is no JSON object (choose true, false, auto or such as {example})"
        )
    return cast("dict[str, object]", root)


def _devices(
    entries: dict[str, object], value: str, parse: Callable[[object], Numbers | None]
) -> tuple[dict[int, Numbers], tuple[str, ...]]:
    """Return device -> numbers, and notes."""
    by_device: dict[int, Numbers] = {}
    for key, entry in entries.items():
        numbers = parse(entry)
        match = _DEVICE.fullmatch(key)
        if numbers is None:
            wanted = '["0-3", "8,9"]'
            raise UsageError(
                f"{quoted(value)}: {key}: {json.dumps(entry)} is no list such as {wanted}"
            )
        if match:
            by_device[int(match[1])] = numbers
        elif key != "scheduler":
            raise UsageError(
                f"{quoted(value)}: {quoted(key)} is no device (choose keys such as device0)"
            )
    if not by_device:
        raise UsageError(f"{quoted(value)} names no device (choose keys such as device0)")
    return by_device, (_SCHEDULER_NOTE,) if "scheduler" in entries else ()


def _number_lists(entry: object) -> Numbers | None:
    """Return the numbers of a list of texts, each such as `0-3` or `8,9`."""
    if not isinstance(entry, list):
        return None
    return _numbers(",".join(part if isinstance(part, str) else "?" for part in entry))


def _numbers(text: str) -> Numbers | None:
    """Return the numbers of `0-3,8`, ascending and each once; None when it is no such list."""
    ranges = number_ranges(text.replace(" ", ""), most=_NUMBER_MAX)
    if ranges is None:
        return None
    return tuple(sorted({n for first, last in ranges for n in range(first, last + 1)}))


def _numa_nodes(entry: object) -> Numbers | None:
    """Return NUMA nodes written as a number, as text, or as a list of either."""
    parts = entry if isinstance(entry, list) else [entry]
    is_known = all(isinstance(p, int | str) and not isinstance(p, bool) for p in parts)
    return _numbers(",".join(map(str, parts))) if is_known else None


def _from_file(path: str) -> BindRequest:
    """Return what MindSpore's bind_config file asks the launcher for."""
    content = read_bounded(path, quoted(path), mebibytes=1)
    root = _json_object(content.decode("utf-8", "replace"), path)
    config = _section(root, "bind_config", path)
    cpu_mode = _mode(config, "bind_cpu_mode", ("cpu", "numa", "none"), path)
    memory_mode = _mode(config, "bind_memory_mode", ("numa", "none"), path)
    if config.get("actor_thread_fix_bind"):
        raise UsageError(
            f"{quoted(path)}: actor_thread_fix_bind is for MindSpore's own threads (leave it out)"
        )
    cpus: Binding | None = None
    memory: Binding | None = None
    cpu_nodes: dict[int, Numbers] = {}
    notes: tuple[str, ...] = ()
    if cpu_mode == "cpu":
        by_device, notes = _devices(_main_modules(root, path), path, _number_text)
        cpus = _given(by_device)
    elif cpu_mode == "numa":
        cpu_nodes, notes = _devices(_section(root, "bind_cpu", path), path, _numa_nodes)
    if memory_mode == "numa":
        by_device, more = _devices(_section(root, "bind_memory", path), path, _numa_nodes)
        memory, notes = _given(by_device), tuple(dict.fromkeys(notes + more))
    return BindRequest(cpus=cpus, cpu_nodes=cpu_nodes, memory=memory, notes=notes)


def _section(parent: dict[str, object], key: str, path: str, above: str = "") -> dict[str, object]:
    section = parent.get(key)
    if not isinstance(section, dict):
        raise UsageError(f"{quoted(path)}: {above}{key}: {json.dumps(section)} is no JSON object")
    return cast("dict[str, object]", section)


def _mode(config: dict[str, object], key: str, choices: tuple[str, ...], path: str) -> str:
    mode = config.get(key, "none")
    if mode not in choices:
        raise UsageError(
            f"{quoted(path)}: bind_config.{key}: {json.dumps(mode)} is unknown ({choose(choices)})"
        )
    return str(mode)


def _main_modules(root: dict[str, object], path: str) -> dict[str, object]:
    """Return device -> CPUs of its `main` module, the only one that is a whole process."""
    section = _section(root, "bind_cpu", path)
    cpus_by_device = {}
    for device in section:
        modules = _section(section, device, path, "bind_cpu.")
        if others := sorted(modules.keys() - {"main"}):
            raise UsageError(
                f"{quoted(path)}: bind_cpu.{device}.{others[0]} binds threads of MindSpore's own "
                "(choose main)"
            )
        if "main" in modules:
            cpus_by_device[device] = modules["main"]
    return cpus_by_device


def _number_text(entry: object) -> Numbers | None:
    return _numbers(entry) if isinstance(entry, str) else None
