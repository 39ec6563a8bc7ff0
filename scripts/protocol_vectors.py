"""Write the frames of docs/protocol.md from the messages that stand above them as JSON.

Usage: python scripts/protocol_vectors.py [--check]

For a new message, or a changed one, write its line of JSON by hand, with what is not default.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec

from msrun.cluster.wire import codec, control_messages
from msrun.cluster.wire.control_messages import Answer, Question
from msrun.cluster.wire.messages import PROTOCOL_VERSION, Envelope

PAGE = Path(__file__).parents[1] / "docs" / "protocol.md"
Message = Envelope | Question | Answer
_BLOCK = re.compile("(?<=```vectors\n).*?(?=\n```)", re.DOTALL)
# By a field that no other of them has.
_KINDS: dict[str, type[Message]] = {"job_id": Envelope, "question": Question, "answer": Answer}


def vectors(text: str) -> list[tuple[str, str]]:
    """Return from `text` of the page each message as JSON, and its frame in hexadecimal."""
    lines = [line for block in _BLOCK.findall(text) for line in block.split("\n")]
    return list(zip(lines[::2], lines[1::2], strict=True))


def read(text: str) -> Message:
    """Return the message that is `text` as JSON."""
    (kind,) = _KINDS.keys() & msgspec.json.decode(text).keys()
    return msgspec.json.decode(text, type=_KINDS[kind])


def frame(message: Message) -> bytes:
    """Return the frame that carries `message`."""
    if isinstance(message, Envelope):
        return codec.encode(message)
    return control_messages.encode(message)


def page(text: str) -> str:
    """Return `text` of the page with each message in full and of now, and its frame below it."""

    def current(block: re.Match[str]) -> str:
        found = [read(line) for line in block[0].split("\n") if line[:1] == "{"]
        messages = [msgspec.structs.replace(each, version=PROTOCOL_VERSION) for each in found]
        rows = [
            (msgspec.json.encode(message).decode(), frame(message).hex()) for message in messages
        ]
        return "\n".join(line for row in rows for line in row)

    return _BLOCK.sub(current, text)


def main() -> int:
    """Write the page, or with `--check` return 1 when it is not current."""
    text = PAGE.read_text()
    if "--check" in sys.argv:
        return int(page(text) != text)
    PAGE.write_text(page(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
