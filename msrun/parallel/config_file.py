"""Reads the parallel configuration from YAML or a mapping, and checks it before anything is made.

A wrong key, type or value raises a `ConfigError` of one sentence that starts with the path of the
key, such as `parallel.optimizer.zero`.  msgspec does the checking; this module rewrites its
messages with the value and the choices.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from msrun.bounded_file import read_bounded
from msrun.errors import ConfigError
from msrun.parallel.config import ROOT, Optimizer, ParallelConfig, Pipeline, Recompute, Reduce
from msrun.parallel.notation.mindspore_keys import translate
from msrun.parallel.notation.rules import check_notation
from msrun.parallel.settings.float8 import Float8
from msrun.parallel.settings.host import Offload
from msrun.parallel.settings.plan_rules import LayoutRule, PlanRule
from msrun.parallel.settings.section import ConfigSection
from msrun.parallel.settings.servers import (
    ServerCache,
    ServerParameters,
    ServerSnapshots,
    Staleness,
)
from msrun.parallel.settings.steps import Checkpoint, Compile, Verify
from msrun.units import quoted

# Keys of MindSpore's configuration that have no counterpart here, with what to do instead.
_REFUSED = {
    "alltoall": "the search picks all-to-all itself where it is cheaper",
    "cost": "costs come from the topology (a preset, or a file of msrun calibrate)",
    "ps": "parameter servers are the key servers",
}


def read_config(source: str | Path | Mapping[str, Any] | ParallelConfig | None) -> ParallelConfig:
    """Return the configuration in `source`.

    Args:
        source: Path of a YAML file, a mapping, or None for plain data parallel.  The mapping may
            stand under one key `parallel`.

    Raises:
        ConfigError: It cannot be read, or a key or value is wrong.
    """
    match source:
        case None:
            return ParallelConfig()
        case ParallelConfig():
            return source
        case str() | Path():
            return parse_config(load_yaml(Path(source)))
        case _:
            return parse_config(source)


def parse_config(tree: object) -> ParallelConfig:
    """Return the configuration in `tree`, plain values such as YAML gives.

    Numbers may be given as text, as in a job file.

    Raises:
        ConfigError: A key or value is wrong.
    """
    tree = _mapping(tree)
    for key, sentence in _REFUSED.items():
        if key in tree:
            raise ConfigError(f"{ROOT}.{key}: {sentence}")
    tree, _ = translate(tree)
    try:
        config = msgspec.convert(tree, ParallelConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_sentence(str(error), tree)) from None
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{ROOT}: {quoted(error.object)} holds half a character, which is no text"
        ) from None
    if isinstance(config.plan, list):
        for index, rule in enumerate(config.plan):
            if isinstance(rule, PlanRule):
                check_notation(rule, f"{ROOT}.plan[{index}]")
    return config


def read_translations(source: str | Path | Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return MindSpore's words in a configuration, each with what they became in ours.

    Raises:
        ConfigError: As `read_config`.
    """
    tree = source if isinstance(source, Mapping) else load_yaml(Path(source))
    return translate(_mapping(tree))[1]


def _mapping(tree: object) -> Mapping[str, Any]:
    """Return the configuration in `tree`, which may have it under the key `parallel`, as job files.

    Raises:
        ConfigError: It is no mapping.
    """
    if isinstance(tree, Mapping) and set(tree) == {ROOT}:
        tree = tree[ROOT]
    tree = {} if tree is None else tree
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{ROOT}: {_shown(tree)} is no mapping")
    return tree


def render_config(config: ParallelConfig) -> str:
    """Return `config` as JSON, which is YAML too."""
    return json.dumps({ROOT: msgspec.to_builtins(config)}, indent=2)


def load_yaml(path: Path) -> object:
    """Return the plain values in a YAML file, of at most 1 MiB and without aliases.

    Raises:
        ConfigError: It cannot be read, or is no YAML.
    """
    import yaml

    content = read_bounded(path, str(path), mebibytes=1)
    try:
        _check_aliases(yaml.parse(content, Loader=yaml.SafeLoader), path)
        return yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, KeyError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{path}{where}: {problem}") from None


def _check_aliases(events: Iterable[object], path: Path) -> None:
    """Refuse aliases: nested ones expand a small file without bound."""
    if any(type(event).__name__ == "AliasEvent" for event in events):
        raise ConfigError(f"{path}: aliases (*name) are not used here: write the value out")


# Patterns of msgspec's messages.  `re` compiles and caches them at the first error, not on import.
_WHERE = r"(?s)(.*) - at (?:`?key`? in )?`\$(.*)`"
_UNKNOWN = r"Object contains unknown field `(.*)`"
_MISSING = r"Object missing required field `(.*)`"
_OURS = r"(?s)([a-z_]+(?:\[\d+\])?(?:\.[a-z_]+)*): (.*)"
_STEP = r"\.([^.\[]+)|\[(\d+)\]"


def _sentence(text: str, tree: object) -> str:
    """Return msgspec's message `text` as one sentence: path of the key, value, problem."""
    match = re.fullmatch(_WHERE, text)
    problem, path = (match[1], match[2].replace("[...]", "")) if match else (text, "")
    value, section, key = _follow(tree, path)
    if unknown := re.fullmatch(_UNKNOWN, problem):
        keys = [field.encode_name for field in msgspec.structs.fields(section)]
        close = difflib.get_close_matches(unknown[1], keys, n=1)
        guess = f"did you mean {close[0]}?" if close else f"choose {', '.join(keys)}"
        return f"{ROOT}{path}.{unknown[1]}: is no key ({guess})"
    if missing := re.fullmatch(_MISSING, problem):
        return f"{ROOT}{path}.{missing[1]}: is missing"
    if problem.startswith("Invalid enum value"):
        return f"{ROOT}{path}: {_shown(value)} is not known (choose {_choices(section, key)})"
    if problem.startswith("Expected"):
        return f"{ROOT}{path}: {_shown(value)}: e{problem[1:].replace('`', '')}"
    ours = re.fullmatch(_OURS, problem)
    return f"{ROOT}{path}.{ours[1]}: {ours[2]}" if ours else f"{ROOT}{path}: {problem}"


def _follow(tree: object, path: str) -> tuple[object, type[ConfigSection], str]:
    """Return the value at `path`, the section that holds it, and its key there."""
    section: type[ConfigSection] = ParallelConfig
    key = ""
    for step in re.finditer(_STEP, path):
        section = _SECTIONS.get(key, section)
        if step[1] is None:
            tree = tree[int(step[2])] if isinstance(tree, list) else None
        else:
            key = step[1]
            tree = tree.get(key) if isinstance(tree, Mapping) else None
    # msgspec gives the path of the mapping for an unknown key, and of the key for a wrong value.
    is_section = key in _SECTIONS and isinstance(tree, Mapping)
    return tree, _SECTIONS[key] if is_section else section, key


def _choices(section: type[ConfigSection], key: str) -> str:
    """Return the values that the literal type of `key` allows."""
    choices: list[object] = []
    pending = [f.type for f in msgspec.structs.fields(section) if f.encode_name == key]
    while pending:
        kind = pending.pop(0)
        if get_origin(kind) is Literal:
            choices += get_args(kind)
        else:
            pending += get_args(kind)
    return ", ".join(map(str, choices))


_SECTIONS: dict[str, type[ConfigSection]] = {
    "plan": PlanRule,
    "layout": LayoutRule,
    "optimizer": Optimizer,
    "pipeline": Pipeline,
    "recompute": Recompute,
    "offload": Offload,
    "reduce": Reduce,
    "servers": ServerParameters,
    "sync": Staleness,
    "snapshot": ServerSnapshots,
    "cache": ServerCache,
    "checkpoint": Checkpoint,
    "float8": Float8,
    "compile": Compile,
    "verify": Verify,
}


def _shown(value: object) -> str:
    if isinstance(value, str):
        return quoted(value)
    try:
        return quoted(json.dumps(value, default=str))[1:-1]
    except TypeError:  # a key that JSON does not have, such as a date
        return quoted(str(value))
