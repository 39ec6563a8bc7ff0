"""The page about the protocol says what the code does."""

import re
from pathlib import Path

import msgspec
import pytest

from msrun.cluster import codec, lease, link, messages

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
BLOCK = re.search("```vectors\n(.*?)\n```", PAGE, re.DOTALL).group(1).split("\n")
VECTORS = list(zip(BLOCK[::2], BLOCK[1::2], strict=True))


@pytest.mark.parametrize(("text", "frame"), VECTORS, ids=range(len(VECTORS)))
def test_vector(text, frame):
    envelope = msgspec.json.decode(text, type=messages.Envelope)

    assert codec.decode(bytes.fromhex(frame)) == envelope
    assert codec.encode(envelope).hex() == frame


def fields(name):
    """Return the names that the page gives the fields of a message."""
    (words,) = re.findall(rf"^\| `{name}` \| (.*?)\| [^|]* \|$", PAGE, re.MULTILINE)
    return re.findall(r"`(\w+)`", words)


@pytest.mark.parametrize(
    "message", [*messages.FromAgent.__args__, *messages.FromScheduler.__args__]
)
def test_every_message_has_its_fields_on_the_page(message):
    assert fields(message.__name__) == list(message.__struct_fields__)


def test_every_field_of_the_envelope_is_on_the_page():
    section = PAGE.split("## Envelope")[1].split("\n\n")[1]
    rows = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)

    assert sorted(rows) == sorted(messages.Envelope.__struct_fields__)
    assert f"| `version` | int | {messages.PROTOCOL_VERSION} |" in section


def test_times_are_those_of_the_page():
    times = lease.Lease(1.0)
    shares = times.heartbeat, times.fence, times.fence + times.grace, times.kill, times.lost
    section = PAGE.split("## Leases")[1].split("\n\n")[2]

    assert re.findall(r"\| ([\d.]+) lease \|", section) == [f"{s:.3g}" for s in shares]
    assert f"| a body is sent again | {link.RESEND_SECONDS:g} s | |" in PAGE
