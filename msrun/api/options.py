"""Options by their Python names, as the words that the command line would have.

Names, forms and checks are those of the command line's own catalog: `max_restarts=3` is
`--max-restarts 3`, and a value may have every form that a job file may hold.
"""

from __future__ import annotations

import difflib
import numbers
import os
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from msrun.cli.options import catalog
from msrun.cli.options.job_file import option_texts
from msrun.cli.options.option import Option
from msrun.cli.options.parsers import guess
from msrun.cli.options.table import TABLE
from msrun.errors import UsageError
from msrun.units import quoted, shown

Scalar = str | int | float | bool | os.PathLike[str]
OptionValue = Scalar | Sequence[Scalar] | AbstractSet[Scalar] | Mapping[str, object] | None

# The name of the argument that every job has; the catalog has the long one.
_SHORT: dict[str, Option[Any]] = {"workers": catalog.WORKERS_PER_NODE}
# How other launchers call the number of workers.
_COUNTS = ("num_processes", "nprocs", "nproc", "num_workers", "num_gpus", "gpus", "devices")
_PROGRAM = (catalog.MODULE, catalog.NO_PYTHON, catalog.RUN_PATH)
_DEPTH_MAX = 20


class PythonOptions:
    """The options of one call of `msrun.launch` or `msrun.Job`.

    Args:
        given: Values by name; None is not given.
        has_function: The workers call a function, and run no script.

    Raises:
        UsageError: There is no such option, or it does not take the value.
    """

    def __init__(self, given: Mapping[str, object], *, has_function: bool) -> None:
        self._texts: list[tuple[str, str, str]] = []
        names: dict[Option[object], str] = {}
        for name, value in given.items():
            option = _find(name)
            if value is None:
                continue
            if option in names:
                raise UsageError(f"{name} is the same option as {names[option]}")
            names[option] = name
            for text in _texts(option, name, value):
                _check(option, name, text, has_function=has_function)
                self._texts.append((name, _flag(option, name), text))

    @property
    def words(self) -> list[str]:
        """The options as the command line has them."""
        return [f"{flag}={text}" for _, flag, text in self._texts]

    def in_python(self, sentence: str) -> str:
        """Return a message of the command line with the options as they are written in Python."""
        for name, flag, text in self._texts:
            sentence = sentence.replace(f"{flag} {shown(text)}", f"{name}={shown(text)}")
            sentence = re.sub(rf"{flag}(?![\w-])", name, sentence)
        return sentence


def _spellings(option: Option[object]) -> list[str]:
    """Return the names of `option` in Python."""
    long = [spelling for spelling in option.spellings if spelling.startswith("--")]
    return [spelling.removeprefix("--").replace("-", "_") for spelling in long]


def _find(name: str) -> Option[object]:
    known: dict[str, Option[object]] = dict(_SHORT)
    known |= {spelling: option for option in TABLE for spelling in _spellings(option)}
    if name in known:
        return known[name]
    if name in _COUNTS:
        raise UsageError(f"there is no option {name}", hint="workers=N starts N on this node")
    close = difflib.get_close_matches(name, known)
    raise UsageError(f"there is no option {name}{guess(close)}")


def _flag(option: Option[object], name: str) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if flag in option.spellings else option.flag


def _texts(option: Option[object], name: str, value: object) -> list[str]:
    """Return `value` as it stands on the command line; several texts only if it is repeated."""
    texts = list(option_texts(option, _tree(value, name), name))
    if any("\0" in text for text in texts):
        raise UsageError(f"{name} holds a NUL, which no argument or variable can")
    return texts


def _tree(value: object, name: str, depth: int = 0) -> object:  # noqa: PLR0911 - one a kind
    """Return `value` with text for every number, as a job file holds it."""
    if depth > _DEPTH_MAX:
        raise UsageError(f"{name} has more than {_DEPTH_MAX} levels")
    match value:
        case None | str():
            return value
        case bool():
            return str(value).lower()
        case numbers.Integral():
            return str(int(value))
        case numbers.Real():
            return repr(float(value))
        case os.PathLike() if isinstance(path := os.fspath(value), str):
            return path
        case Mapping():
            return {str(k): _tree(v, f"{name}[{k!r}]", depth + 1) for k, v in value.items()}
        case list() | tuple() | range() | AbstractSet():
            return [_tree(item, f"{name}[{i}]", depth + 1) for i, item in enumerate(value)]
    kind = type(value).__name__
    raise UsageError(
        f"{name}={quoted(repr(value))} is of type {kind}, not text, a number or a path"
    )


def _check(option: Option[object], name: str, text: str, *, has_function: bool) -> None:
    if text in option.unset:
        return
    try:
        value = option.parse(text)
    except UsageError as error:
        raise UsageError(f"{name}={error.message}", hint=error.hint) from None
    if option.refusal:
        raise UsageError(f"{name}={shown(text)} {option.refusal}")
    if option is catalog.JOIN and not value:
        raise UsageError(
            f"{name}={shown(text)}: a job of this program ends with it",
            hint="msrun.Job(...).start() returns at once; msrun run --no-join outlives its shell",
        )
    if has_function and option in _PROGRAM and value:
        raise UsageError(f"{name}={shown(text)} is for scripts, and the workers call a function")
