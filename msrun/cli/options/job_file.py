"""`--config job.yaml`: options by name, and script, module, args and env.

The file is read as text throughout: `args: [--lr, 1e-3]` reaches the script as
written, and `nnodes: 1:1` is not the number that YAML 1.1 makes of it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msrun.bounded_file import read_bounded
from msrun.cli.options.option import FileForm, Option
from msrun.cli.options.parsers import guess
from msrun.cli.options.settings import FileTexts, Given
from msrun.errors import UsageError
from msrun.units import quoted, shown

if TYPE_CHECKING:
    import yaml

    from msrun.cli.options.command_line import Table

ALIASES_MAX = 100
DEPTH_MAX = 20
NODES_MAX = 10_000

_TEXT_TAGS = ("str", "int", "float", "bool", "timestamp")
_PROGRAM_KEYS = ("script", "module", "args")

# What a file can hold, all scalars as text: text | None | list of it | mapping of it.
Tree = object


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """What a job file says.

    Args:
        options: Its options.
        script: Path of the script.
        module: Dotted name, instead of a script.
        args: Arguments of the program; None when the file has none.
    """

    options: FileTexts = field(default_factory=FileTexts)
    script: str | None = None
    module: str | None = None
    args: tuple[str, ...] | None = None


def read_job_file(given: Given[str], table: Table) -> JobFile:
    """Return the job file whose path is `given`.

    Raises:
        UsageError: It cannot be read, is no YAML mapping, or says what no option takes.
    """
    return parse_job_file(_read(given), shown(given.value), table)


def parse_job_file(content: str, path: str, table: Table) -> JobFile:
    """Return what `content` says; `path` is for messages."""
    tree = _YamlReader(path).read(content)
    if not isinstance(tree, dict):
        raise UsageError(f"{path}: the file is no mapping of option names to values")
    options = {key: option for option in table for key in option.keys}
    texts: dict[Option[object], tuple[str, ...]] = {}
    keys: dict[Option[object], str] = {}
    for key, value in tree.items():
        name = key.replace("_", "-")
        if name in _PROGRAM_KEYS:
            continue
        option = options.get(name)
        if option is None:
            raise _unknown(path, key, [*options, *_PROGRAM_KEYS])
        if option in texts:
            raise UsageError(f"{path}: {key} is the same option as {keys[option]}")
        if value is not None:
            texts[option] = tuple(option_texts(option, value, f"{path}: {key}"))
            keys[option] = key
    return JobFile(
        options=FileTexts(path=path, texts=texts, keys=keys),
        script=_name(tree, "script", path),
        module=_name(tree, "module", path),
        args=_args(tree.get("args"), path),
    )


def _read(given: Given[str]) -> str:
    content = read_bounded(given.value, given.cite(), mebibytes=1)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{given.cite()} is not UTF-8 text: byte {error.start} is {content[error.start]:#04x}"
        ) from None


def _unknown(path: str, key: str, choices: list[str]) -> UsageError:
    from msrun.parallel.config import ParallelConfig

    close = difflib.get_close_matches(key.replace("_", "-"), choices)
    is_parallel = key in ParallelConfig.__struct_fields__
    hint = "a parallel configuration stands under parallel, or in the file of --parallel"
    return UsageError(
        f"{path}: {quoted(key)} is no option{guess(close)}", hint=hint if is_parallel else None
    )


def _name(tree: dict[str, Tree], key: str, path: str) -> str | None:
    value = tree.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise UsageError(f"{path}: {key}: {_shown(value)} is no text")
    return value


def _args(value: Tree, path: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise UsageError(f"{path}: args: {_shown(value)} is no list")
    return tuple(_scalar(item, f"{path}: args[{i}]") for i, item in enumerate(value))


def option_texts(option: Option[object], value: Tree, where: str) -> Iterator[str]:
    """Yield `value` as it would stand on the command line."""
    match option.file, value:
        case FileForm.LIST, list():
            yield ",".join(_scalar(item, f"{where}[{i}]") for i, item in enumerate(value))
        case FileForm.PAIRS, dict():
            pairs = ((k, _scalar(v, f"{where}.{k}")) for k, v in value.items())
            yield ",".join(f"{k}={v}" for k, v in pairs)
        case FileForm.VARIABLES, dict():
            for name, setting in value.items():
                if "=" in name:
                    raise UsageError(f"{where}: {quoted(name)} is no name of a variable")
                yield f"{name}={_scalar(setting, f'{where}.{name}')}"
        case FileForm.TREE, dict():
            yield json.dumps(value)
        case FileForm.VARIABLES, _:
            raise UsageError(f"{where}: {_shown(value)} is not {option.file.value}")
        case _, str():
            yield value
        case _:
            raise UsageError(f"{where}: {_shown(value)} is not {option.file.value}")


def _scalar(value: Tree, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: {_shown(value)} is not text or a number")
    return value


def _shown(value: Tree) -> str:
    return quoted(value) if isinstance(value, str) else quoted(json.dumps(value))


class _YamlReader:
    """YAML to text, lists and mappings, with a bound on everything."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._nodes = 0

    def read(self, content: str) -> Tree:
        """Return the document in `content`."""
        import yaml

        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            self._check_bounds(yaml.parse(content, Loader=loader))
            root = yaml.compose(content, Loader=loader)
        except yaml.YAMLError as error:
            raise UsageError(f"{self._path} is not YAML: {_problem(error)}") from None
        tree = None if root is None else self._plain(root, 0)
        return {} if tree is None else tree

    def _check_bounds(self, events: Iterator[yaml.Event]) -> None:
        """Refuse what would grow without bound, before anything is built from it."""
        import yaml

        aliases = depth = 0
        for event in events:
            aliases += isinstance(event, yaml.AliasEvent)
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if aliases > ALIASES_MAX or depth > DEPTH_MAX:
                raise UsageError(
                    f"{self._path}: a job file has at most {ALIASES_MAX} aliases "
                    f"and {DEPTH_MAX} levels"
                )

    def _plain(self, node: yaml.Node, depth: int) -> Tree:
        """Return `node` as a plain value; an alias counts as often as it is used."""
        import yaml

        self._nodes += 1
        if self._nodes > NODES_MAX:
            raise UsageError(
                f"{self._path}: a job file has at most {NODES_MAX} values, aliases included"
            )
        if depth > DEPTH_MAX:
            raise UsageError(f"{self._path}: an alias contains itself")
        tag = node.tag.rpartition(":")[2]
        if isinstance(node, yaml.SequenceNode) and tag == "seq":
            return [self._plain(item, depth + 1) for item in node.value]
        if isinstance(node, yaml.MappingNode) and tag == "map":
            return self._mapping(node, depth)
        if isinstance(node, yaml.ScalarNode) and tag in _TEXT_TAGS:
            return self._text(str(node.value))
        if isinstance(node, yaml.ScalarNode) and tag == "null":
            return None
        raise UsageError(
            f"{self._path}, line {node.start_mark.line + 1}: the tag {node.tag} is not used here"
        )

    def _text(self, value: str) -> str:
        if "\0" in value:
            raise UsageError(
                f"{self._path}: {quoted(value)} holds a NUL, which no argument or variable can"
            )
        return value

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Tree]:
        mapping: dict[str, Tree] = {}
        for key_node, value_node in node.value:
            key = self._plain(key_node, depth + 1)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise UsageError(f"{self._path}, line {line}: the key {_shown(key)} is no text")
            if key in mapping:
                raise UsageError(f"{self._path}, line {line}: the key {quoted(key)} is given twice")
            mapping[key] = self._plain(value_node, depth + 1)
        return mapping


def _problem(error: yaml.YAMLError) -> str:
    """Return what YAML found wrong and where, in one line."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return f"line {mark.line + 1}: {problem}" if mark else problem
