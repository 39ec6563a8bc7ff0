"""From argv to texts: which options were given, how they were spelled, and the program.

click tokenises; two things it cannot do are done before.  Every option is given a
value, so that `--join`, `--join=True` and `--join True` all work but `--join train.py`
starts train.py; and the spelling is kept, because messages use the user's own word.
"""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import click

from msrun.cli.options.foreign import INSTEAD
from msrun.cli.options.option import Arity, Option, OptionGroup
from msrun.cli.options.parsers import choose
from msrun.cli.options.words import SETTINGS, read_params, with_hyphens
from msrun.cli.verb_table import VERBS
from msrun.errors import UsageError
from msrun.version import __version__

Table = tuple[Option[object], ...]

_OWN = ("--help", "-h", "--version")
_OTHER = (("-h, --help", "This text."), ("--version", "Version of msrun."))
_COLUMN = 28
_EPILOG = (
    "Every option is also read from MSRUN_OPTION, torchrun's options from PET_OPTION, and all of "
    "them from the job file: flag beats environment beats file beats default.  Options may be "
    "written with underscores.  Everything after SCRIPT belongs to the script."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """What stands on the command line.

    Args:
        texts: Option -> its values, in the order given.
        spellings: Option -> how it was written last.
        program: First word that is not an option, and all words after it, untouched.
    """

    texts: dict[Option[object], tuple[str, ...]] = field(default_factory=dict)
    spellings: dict[Option[object], str] = field(default_factory=dict)
    program: tuple[str, ...] = ()


def read_command_line(name: str, summary: str, table: Table, args: Sequence[str]) -> CommandLine:
    """Return what `args` say.

    Args:
        name: The words before `args`, for the help.
        summary: First sentence of the help.
        table: Options that are known.
        args: Words after the verb.

    Raises:
        UsageError: An option is unknown or lacks its value.
        click.exceptions.Exit: Help or the version was asked for, and printed.
    """
    words, spellings = _with_values(args, table)
    params = read_params(_Verb(name, summary, table), name, words)
    texts = {option: params[_key(option)] for option in table}
    return CommandLine(
        texts={option: given for option, given in texts.items() if given},
        spellings=spellings,
        program=params["program"],
    )


def _key(option: Option[object]) -> str:
    return "option_" + option.name.replace("-", "_")


def _with_values(args: Sequence[str], table: Table) -> tuple[list[str], dict[Option[object], str]]:
    """Return `args` with a value for each option, and the spelling of each option."""
    known = {spelling: option for option in table for spelling in option.spellings}
    negative = {spelling: option for option in table for spelling in option.negatives}
    words: list[str] = []
    spellings: dict[Option[object], str] = {}
    rest = deque(args)
    while rest:
        spelling, attached = _split(rest[0], known)
        _check_foreign(rest[0], known)
        name = _expanded(with_hyphens(spelling), table)
        if name in _OWN:
            words.append(rest.popleft())
            continue
        option = known.get(name) or negative.get(name)
        if option is None:
            break
        rest.popleft()
        spellings[option] = spelling
        if name in negative:
            attached = _opposite(spelling, attached)
        elif attached is None:
            attached = _following(option, spelling, rest, known)
        words.append(f"{option.flag}={attached}")
    return [*words, *rest], spellings


def _check_foreign(word: str, known: Container[str]) -> None:
    """Refuse an option of another launcher, and a long one with one hyphen, by what is meant."""
    spelling = word.partition("=")[0]
    name = with_hyphens(spelling)
    if name in known:
        return
    if name in INSTEAD:
        raise UsageError(f"there is no option {spelling}", hint=INSTEAD[name])
    if name.startswith("-") and f"-{name}" in known:
        raise UsageError(f"there is no option {spelling}; did you mean -{spelling}?")


# The words of MindSpore's launcher, as they are spelled here.
_MINDSPORES = frozenset(
    {
        *("--worker-num", "--local-worker-num", "--master-addr", "--master-port", "--node-rank"),
        *("--log-dir", "--join", "--cluster-time-out", "--bind-core", "--bind-numa"),
        *("--sim-level", "--sim-rank-id", "--rank-table-file", "--worker-log-name"),
        "--tail-worker-log",
    }
)


def _expanded(name: str, table: Table) -> str:
    """Return the option that `name` begins, as argparse does for torchrun; else `name` itself.

    Where several options begin so, those of torchrun come first, and then those of MindSpore: their
    command lines mean here what they mean there.

    Raises:
        UsageError: Several options begin so.
    """
    known = {s: option for option in table for s in (*option.spellings, *option.negatives)}
    if name in known or name in _OWN or not name.startswith("--") or name == "--":
        return name
    begun = {s: option for s, option in known.items() if s.startswith(name)}
    torchruns = {s: option for s, option in begun.items() if s == _of_torchrun(option)}
    mindspores = {s: option for s, option in begun.items() if s in _MINDSPORES}
    meant = torchruns or mindspores or begun
    if len(set(meant.values())) > 1:
        raise UsageError(f"{name} may mean {choose(sorted(meant)).removeprefix('choose ')}")
    return min(meant, key=len, default=name)


def _of_torchrun(option: Option[object]) -> str:
    return "--" + option.torchrun.replace("_", "-")


def _split(word: str, known: Container[str]) -> tuple[str, str | None]:
    """Return spelling and attached value of `--name=value`, `-r3` and `-r=3`."""
    if word.startswith("-") and not word.startswith("--") and word[:2] in known:
        return word[:2], word[2:].removeprefix("=") or None
    spelling, equals, value = word.partition("=")
    return spelling, value if equals else None


def _opposite(spelling: str, attached: str | None) -> str:
    if attached is not None:
        raise UsageError(f"{spelling} takes no value")
    return "false"


def _following(
    option: Option[object], spelling: str, rest: deque[str], known: Container[str]
) -> str:
    """Return the value of an option that has none attached; takes it from `rest` if need be."""
    if option.arity is Arity.ONE:
        following = with_hyphens(_split(rest[0], known)[0]) if rest else ""
        if not rest or following in known or following in _OWN:
            raise UsageError(f"{spelling} needs a value ({option.metavar})")
        return rest.popleft()
    is_next = option.arity is Arity.OPTIONAL and rest and option.is_value(rest[0])
    return rest.popleft() if is_next else "true"


class _Verb(click.Command):
    """One verb, as click parses it and prints its help."""

    def __init__(self, name: str, summary: str, table: Table) -> None:
        options: list[click.Parameter] = [
            click.Option(
                [_key(option), *option.spellings, *option.negatives],
                type=click.UNPROCESSED,
                multiple=True,
            )
            for option in table
        ]
        version = click.Option(
            ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_print_version
        )
        program = click.Argument(
            ["program"], nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]..."
        )
        super().__init__(
            name,
            params=[*options, version, program],
            help=summary,
            epilog=_EPILOG,
            context_settings={**SETTINGS, "allow_interspersed_args": False},
        )
        self._table = table

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings."""
        del ctx
        for group in OptionGroup:
            members = [option for option in self._table if option.group is group]
            if members:
                with formatter.section(group.value):
                    _write_rows(formatter, [_help_row(option) for option in members])
        with formatter.section("Other"):
            _write_rows(formatter, _OTHER)
        with formatter.section("Verbs, as the first word"):
            _write_rows(formatter, [(name, verb.help) for name, verb in VERBS.items()])


def _write_rows(formatter: click.HelpFormatter, rows: Iterable[tuple[str, str]]) -> None:
    """Write two columns; unlike click's own, they never break an option at its hyphens."""
    indent = " " * formatter.current_indent
    for name, text in rows:
        lines = textwrap.wrap(text, formatter.width - len(indent) - _COLUMN, break_on_hyphens=False)
        is_wide = len(name) > _COLUMN - 2
        names = [name, *[""] * len(lines)]
        pairs = zip_longest(names, ["", *lines] if is_wide else lines, fillvalue="")
        for left, right in pairs:
            if left or right:
                formatter.write(f"{indent}{left:<{_COLUMN}}{right}".rstrip() + "\n")


def _help_row(option: Option[object]) -> tuple[str, str]:
    """Return both columns of an option's help."""
    short = [spelling for spelling in option.aliases if not spelling.startswith("--")]
    long = [spelling for spelling in option.aliases if spelling.startswith("--")]
    both = "/".join([option.flag, *option.negatives])
    names = ", ".join([*short, both]) + (f" {option.metavar}" if option.metavar else "")
    also = f"  Also {', '.join(long)}." if long else ""
    default = f"  [default: {option.default_text}]" if option.default_text else ""
    return names, f"{option.help}{also}{default}"


def _print_version(ctx: click.Context, parameter: click.Parameter, is_asked: object) -> None:
    del parameter
    if is_asked and not ctx.resilient_parsing:
        click.echo(f"msrun {__version__}")
        ctx.exit()
