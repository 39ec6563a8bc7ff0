"""Text for people: escaped, to stderr unless it is the result that was asked for."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import TextIO

from msrun.errors import MsrunError

_CONTROL = re.compile(r"[^\n\x20-\x7e\xa0-\U0010ffff]|[\ud800-\udfff]")


def say(line: str) -> None:
    """Write `line` for a person, to stderr."""
    _write(sys.stderr, line)


def answer(text: str) -> None:
    """Write a result, to stdout."""
    _write(sys.stdout, text)


def say_notes(notes: Iterable[str]) -> None:
    """Write each note on a line of its own."""
    for note in notes:
        say(f"note: {note}")


def say_error(error: MsrunError) -> None:
    """Write why nothing was started, or what ended the job."""
    say(error.render())


def escaped(text: str) -> str:
    """Return `text` without anything that a terminal would act upon, line ends excepted."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def _write(stream: TextIO, text: str) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    plain = escaped(text).encode(encoding, "backslashreplace").decode(encoding)
    stream.write(plain + "\n")
    stream.flush()
