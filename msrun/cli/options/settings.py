"""One value an option, with its source: flag beats environment beats file beats default."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast, final

from msrun.cli.options.command_line import CommandLine, Table
from msrun.cli.options.option import Option
from msrun.cli.options.parsers import shell_words
from msrun.errors import UsageError
from msrun.units import shown

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Level(enum.IntEnum):
    """Where a value came from, the weakest first."""

    DEFAULT = 0
    FILE = 1
    ENVIRONMENT = 2
    FLAG = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where one value came from.

    Args:
        level: Its rank.
        place: The flag as typed, the variable, or the job file's path.
        key: With `FILE`, the key as written.
    """

    level: Level = Level.DEFAULT
    place: str = ""
    key: str = ""

    def cite(self, text: str) -> str:
        """Return how a message names `text` from here, such as `--nnodes 4`."""
        match self.level:
            case Level.FLAG:
                return f"{self.place} {text}"
            case Level.ENVIRONMENT:
                return f"environment {self.place}={text}"
            case Level.FILE:
                return f"{self.place}: {self.key}: {text}"
            case Level.DEFAULT:
                return f"default {text}"

    def __str__(self) -> str:
        return " ".join(filter(None, (self.level.name.lower(), self.place)))


DEFAULT = Source()


@final
@dataclass(frozen=True, slots=True)
class Given(Generic[T_co]):
    """A value, its source and its text there."""

    value: T_co
    source: Source = DEFAULT
    text: str = ""

    def cite(self) -> str:
        """Return how a message names it."""
        return self.source.cite(shown(self.text))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTexts:
    """Options of one job file.

    Args:
        path: The file.
        texts: Option -> its texts; several only for repeated options.
        keys: Option -> its key as written.
    """

    path: str = ""
    texts: Mapping[Option[object], tuple[str, ...]] = field(default_factory=dict)
    keys: Mapping[Option[object], str] = field(default_factory=dict)


class Settings:
    """All options of one command line, each parsed once from its strongest source."""

    def __init__(
        self, line: CommandLine, environment: Mapping[str, str], file: FileTexts, *, table: Table
    ) -> None:
        self.table = table
        self._values: dict[Option[object], tuple[Given[object], ...]] = {}
        for option in table:
            candidates = list(_candidates(option, line, environment, file))
            self._values[option] = tuple(
                Given(_parse(option.parse, text, source), source, text)
                for text, source in (candidates if option.repeated else candidates[:1])
            )

    def with_values(self, values: Mapping[Option[object], tuple[Given[object], ...]]) -> Settings:
        """Return the same with other `values` of some options, the strongest first."""
        other = copy.copy(self)
        other._values = {**self._values, **values}  # noqa: SLF001 - it is a Settings
        return other

    def get(self, option: Option[T]) -> Given[T] | None:
        """Return what was given for `option`, None when nothing was."""
        return next(iter(self.every(option)), None)

    def every(self, option: Option[T]) -> tuple[Given[T], ...]:
        """Return all values given for a repeated option, the strongest first."""
        return cast("tuple[Given[T], ...]", self._values.get(option, ()))

    def value(self, option: Option[T]) -> T:
        """Return the value of an option that has a default."""
        given = self.get(option)
        return cast("T", option.default) if given is None else given.value

    def source(self, option: Option[object]) -> Source:
        """Return where the value of `option` came from."""
        given = self.get(option)
        return DEFAULT if given is None else given.source


def strongest(*candidates: Given[T] | None) -> Given[T] | None:
    """Return the one of several spellings of one setting that counts, None when none is given.

    Raises:
        UsageError: Two from equally strong sources differ.
    """
    given = sorted(
        (candidate for candidate in candidates if candidate is not None),
        key=lambda candidate: -candidate.source.level,
    )
    for other in given[1:]:
        if other.source.level == given[0].source.level and other.value != given[0].value:
            raise UsageError(f"{other.cite()} contradicts {given[0].cite()}")
    return given[0] if given else None


def _candidates(
    option: Option[object], line: CommandLine, environment: Mapping[str, str], file: FileTexts
) -> Iterator[tuple[str, Source]]:
    """Yield the texts given for `option` and their sources, the strongest first."""
    for text in reversed(line.texts.get(option, ())):
        spelling = line.spellings.get(option, option.flag)
        yield from _unless_unset(option, text, Source(level=Level.FLAG, place=spelling))
    for name in option.variables:
        if content := environment.get(name):
            source = Source(level=Level.ENVIRONMENT, place=name)
            texts = _parse(shell_words, content, source) if option.repeated else [content]
            for text in reversed(texts):
                yield from _unless_unset(option, text, source)
    for text in reversed(file.texts.get(option, ())):
        source = Source(level=Level.FILE, place=file.path, key=file.keys[option])
        yield from _unless_unset(option, text, source)


def _unless_unset(
    option: Option[object], text: str, source: Source
) -> Iterator[tuple[str, Source]]:
    if text not in option.unset:
        yield text, source


def _parse(parse: Callable[[str], T], text: str, source: Source) -> T:
    """Return what `parse` makes of `text`; its refusal names the source."""
    try:
        return parse(text)
    except UsageError as error:
        raise UsageError(source.cite(error.message), hint=error.hint) from None
