"""Fill the reference pages of docs/ with what follows from the code, while mkdocs builds the site.

mkdocs loads this file as a hook (mkdocs.yml) and calls its functions `on_*`.  A line
`<!-- generated: NAME -->` of a page stands for what the function of that name below returns.
To read one page as it will be:

    python scripts/reference_pages.py docs/reference/cli.md
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import io
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

import msrun
from msrun import environ, errors
from msrun.cli.main import main
from msrun.cli.options.option import Arity, Option, OptionGroup
from msrun.cli.options.table import PLAN_TABLE, TABLE
from msrun.cli.verb_table import VERBS
from msrun.errors import ExitCode, MsrunError
from msrun.parallel import config

ROOT = Path(__file__).parents[1]
DECISIONS = ROOT / "docs" / "decisions"
# What a job may end with; a code without a sentence here stops the build.
MEANING = {
    ExitCode.OK: "All ranks of one generation exited with 0.",
    ExitCode.USAGE: (
        "A mistake in the command, the environment, the job file or a preloaded module. "
        "No worker was started."
    ),
    ExitCode.INTERNAL: "The scheduler ended or was silent, or a bug of msrun.",
    ExitCode.NODE_LOST: (
        "A process of msrun on a node (reaper, forkserver or store) ended, a node was lost, or "
        "a job does not answer. The report names it."
    ),
    ExitCode.JOIN_TIMEOUT: "The job did not form in time. The message names the missing nodes.",
    ExitCode.AUTHENTICATION: "A peer does not hold the job's key.",
    ExitCode.DO_NOT_REQUEUE: (
        "The same early failure came several times in a row (`--no-progress-limit`). "
        "Do not requeue the job."
    ),
    ExitCode.HUNG: "A rank hung and no restart was left. Do not requeue the job.",
}
# Variables that msrun sets to one value for every worker.
CONSTANT = {
    "PYTHONUNBUFFERED": "Always 1: output reaches the log at once.",
    "MS_ROLE": "Always `MS_WORKER`.",
    "TORCHELASTIC_USE_AGENT_STORE": "Always `True`.",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1, unless you set it.",
    "GLOO_DEVICE_TRANSPORT": "`TCP_TLS` with `--data-tls`, else not set.",
    "GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY": "The node's key for TLS, with `--data-tls`.",
    "GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT": "The node's certificate, with `--data-tls`.",
    "GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE": "The job's authority, with `--data-tls`.",
}
GENERATED = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
INLINE_CODE = re.compile(r"<code>[^<]*</code>")
# The names of `msrun.__all__` that a reader wants first.
FIRST = ("init", "Runtime", "shard", "join", "beat", "collectives", "launch", "Job")


def options() -> str:
    """Return tables of all options of `msrun run`, from the catalog that the parser reads."""
    return "\n\n".join(_option_tables(TABLE))


def plan_options() -> str:
    """Return tables of the options that `msrun plan` has beside those of `msrun run`."""
    return "\n\n".join(_option_tables(option for option in PLAN_TABLE if option not in TABLE))


def verbs() -> str:
    """Return the help of all other verbs, a heading each."""
    parts: list[str] = []
    for verb in VERBS:
        if verb not in ("run", "plan"):
            parts += [f"## msrun {verb}", *_helps(verb)]
    return "\n\n".join(parts)


def _option_tables(table: Iterable[Option[Any]]) -> Iterator[str]:
    """Yield a heading and a table for each group of options."""
    listed = list(table)
    for group in OptionGroup:
        members = [option for option in listed if option.group is group]
        if members:
            rows = ["| option | meaning | default | variables |", "|---|---|---|---|"]
            yield f"### {group.value}"
            yield "\n".join([*rows, *map(_option_row, members)])


def _option_row(option: Option[Any]) -> str:
    metavar = f" {option.metavar}" if option.metavar and option.arity is not Arity.SWITCH else ""
    spellings = [f"`{option.flag}{metavar}`"]
    spellings += [f"`{spelling}`" for spelling in (*option.aliases, *option.negatives)]
    default = f"`{option.default_text}`" if option.default_text else ""
    variables = ", ".join(f"`{variable}`" for variable in option.variables)
    cells = (", ".join(spellings), option.help, default, variables)
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """Return `text` as a cell, which a bar would end."""
    return text.replace("|", "\\|").replace("\n", " ")


def _helps(verb: str) -> Iterator[str]:
    """Yield the help of a verb and of the verbs below it, as typed."""
    text = _help(verb)
    yield f"```text\n{text}```"
    if f"Usage: msrun {verb} VERB" in text:
        for inner in re.findall(r"^  ([a-z]+)  +", text, re.MULTILINE):
            yield f"### msrun {verb} {inner}"
            yield f"```text\n{_help(verb, inner)}```"


def _help(*words: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main([*words, "--help"])
    if code:
        raise SystemExit(f"reference_pages: msrun {' '.join(words)} --help: {output.getvalue()}")
    return output.getvalue()


def configuration() -> str:
    """Return a table of each mapping's keys, from the structs that read them."""
    parts: list[str] = []
    for path, section in _sections(config.ParallelConfig, ""):
        rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
        meanings = arguments(section.__doc__ or "")
        for field in msgspec.structs.fields(section):
            cells = (
                f"`{field.encode_name}`",
                _type(field.type),
                _default(field),
                meanings[field.name],
            )
            rows.append(f"| {' | '.join(map(_cell, cells))} |")
        parts += [f"## {path or 'parallel'}", (section.__doc__ or "").partition("\n")[0]]
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def _sections(section: type[msgspec.Struct], path: str) -> Iterator[tuple[str, type]]:
    """Yield the path and the struct of `section` and of every mapping inside of it."""
    yield path, section
    for field in msgspec.structs.fields(section):
        for inner in _structs(field.type):
            inner_path = f"{path}.{field.encode_name}" if path else field.encode_name
            yield from _sections(inner, inner_path)


def _structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for argument in typing.get_args(kind):
        if typing.get_origin(kind) is not typing.Literal:
            yield from _structs(argument)


def _type(kind: Any) -> str:
    """Return in words what a key of type `kind` takes."""
    inner = typing.get_args(kind)
    match typing.get_origin(kind):
        case typing.Literal:
            words = ", ".join(f"`{_yaml(value)}`" for value in inner)
        case typing.Union | types.UnionType:
            words = " or ".join(map(_type, inner))
        case builtins.list:
            words = f"list of ({_type(inner[0])})"
        case builtins.tuple:
            words = f"list of {len(inner)}: {', '.join(map(_type, inner))}"
        case builtins.dict:
            words = f"mapping of {_type(inner[0])} to ({_type(inner[1])})"
        case _ if next(_structs(kind), None):
            words = "mapping, below"
        case _:
            plain = {int: "number", str: "text", bool: "true or false", type(None): "`null`"}
            words = plain.get(kind, str(kind))
    return words


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = typing.cast("Callable[[], Any]", field.default_factory)()
    if isinstance(value, msgspec.Struct):
        return "its defaults"
    return f"`{_yaml(value)}`"


def _yaml(value: object) -> str:
    """Return `value` as a job file has it, on one line."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def arguments(docstring: str) -> dict[str, str]:
    """Return name -> text of the section `Args:` of a docstring in Google's form."""
    section = inspect.cleandoc(docstring).partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", section, re.MULTILINE)
    # The name of the key has a column of its own.
    return {name: re.sub(r"\s+", " ", text).partition(" Key `")[0] for name, text in entries}


def names() -> str:
    """Return a heading for each public name, under which mkdocstrings puts its docstrings."""
    parts: list[str] = []
    public = dict.fromkeys([*FIRST, *msrun.__all__])
    for name in (name for name in public if not name.startswith("__")):
        value = getattr(msrun, name)
        settings = ["options:", "  heading_level: 3"]
        if inspect.ismodule(value):
            settings += ["  show_root_heading: false", "  show_root_toc_entry: false"]
            target = value.__name__
        else:
            target = f"{value.__module__}.{value.__qualname__}"
        lines = [f"::: {target}", *(f"    {line}" for line in settings)]
        parts += [f"## msrun.{name}", "\n".join(lines)]
    return "\n\n".join(parts)


def exit_codes() -> str:
    """Return a table of the codes with a fixed meaning, and the errors that carry them."""
    rows = ["| code | name | meaning | errors |", "|---|---|---|---|"]
    for code in ExitCode:
        kinds = [f"`{error.__name__}`" for error in _errors() if error.exit_code is code]
        rows.append(f"| {code.value} | `{code.name}` | {MEANING[code]} | {', '.join(kinds)} |")
    return "\n".join(rows)


def _errors() -> list[type[MsrunError]]:
    """Return the error classes in the order in which they are written."""
    kinds = [value for value in vars(errors).values() if inspect.isclass(value)]
    return [kind for kind in kinds if issubclass(kind, MsrunError)]


def worker_variables() -> str:
    """Return a table of what a worker gets, from what a worker with known values gets."""
    meanings = arguments(environ.WorkerIdentity.__doc__ or "")
    # Every field has a value of its own, so that a variable's value says which field it is.
    sample: dict[str, Any] = {}
    for number, field in enumerate(msgspec.structs.fields(environ.WorkerIdentity), 1001):
        value: Any = {int: number, str: f"value {number}"}.get(field.type)
        sample[field.name] = value
        if field.type is bool:
            sample[field.name] = False
        elif field.default is None:  # only jobs with parameter servers have it
            sample[field.name] = None
        elif value is None:
            sample[field.name] = (f"host {number}", f"port {number}")
    fields = {str(value): name for name, value in sample.items() if not isinstance(value, tuple)}
    for name, value in sample.items():
        if isinstance(value, tuple):
            fields |= {value[0]: f"{name}: Host", value[1]: f"{name}: Port"}
    rows = ["| variable | value |", "|---|---|"]
    for variable, value in environ.worker_env(environ.WorkerIdentity(**sample), {}).items():
        name, _, part = fields.get(value, "").partition(": ")
        text = CONSTANT.get(variable) or meanings[name].replace("Host and port", part or "Host")
        rows.append(f"| `{variable}` | {_cell(text)} |")
    return "\n".join(rows)


def starters() -> str:
    """Return a table of what starts ranks, and the variables by which it says who they are."""
    rows = ["| started by | rank | ranks | rank on the node |", "|---|---|---|---|"]
    for starter in environ._STARTERS:  # noqa: SLF001 - the table itself is what the page shows
        variables = (starter.rank, starter.world_size, starter.local_rank)
        cells = [f"`{name}`" if name else "" for name in variables]
        rows.append(f"| {starter.source} | {' | '.join(cells)} |")
    return "\n".join(rows)


def decisions() -> str:
    """Return a link to each decision, by its title."""
    lines = []
    for path in sorted(DECISIONS.glob("0*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines)


WRITERS: dict[str, Callable[[], str]] = {
    write.__name__: write
    for write in (
        options,
        plan_options,
        verbs,
        configuration,
        names,
        exit_codes,
        worker_variables,
        starters,
        decisions,
    )
}


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page with all that is generated in its place; mkdocs calls this."""
    filled = GENERATED.sub(lambda mark: WRITERS[mark[1]](), markdown)
    # The folder of decisions, right in the repository, is a page of the site.
    return filled.replace("](decisions/)", "](decisions/index.md)")


def on_page_content(html: str, **_: object) -> str:
    """Show a bar in a table's code as a bar: GitHub needs it escaped, Python-Markdown does not."""
    return INLINE_CODE.sub(lambda code: code[0].replace("\\|", "|"), html)


if __name__ == "__main__":
    for file in sys.argv[1:]:
        print(on_page_markdown(Path(file).read_text(encoding="utf-8")))
