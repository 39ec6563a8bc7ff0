"""The page about the protocol says what the code does."""

import re
from pathlib import Path

import msgspec
import protocol_vectors
import pytest

from msrun.cluster.liveness import lease
from msrun.cluster.wire import codec, control_messages, link, messages

PAGE = (Path(__file__).parents[4] / "docs" / "protocol.md").read_text()
VECTORS = protocol_vectors.vectors(PAGE)
MESSAGES = [*messages.FromAgent.__args__, *messages.FromScheduler.__args__]
SPOKEN = [
    messages.Envelope,
    *MESSAGES,
    control_messages.Question,
    *control_messages.AnyRequest.__args__,
    control_messages.Answer,
    *control_messages.AnyReply.__args__,
]


@pytest.mark.parametrize(("text", "frame"), VECTORS, ids=range(len(VECTORS)))
def test_vector(text, frame):
    message = protocol_vectors.read(text)
    decode = {
        messages.Envelope: codec.decode,
        control_messages.Question: control_messages.decode_question,
        control_messages.Answer: control_messages.decode_answer,
    }

    assert decode[type(message)](bytes.fromhex(frame)) == message
    assert protocol_vectors.frame(message).hex() == frame


def structs(value):
    """Return `value` and everything in it that has fields."""
    if isinstance(value, msgspec.Struct):
        inner = [getattr(value, name) for name in value.__struct_fields__]
        return [value, *structs(inner)]
    if isinstance(value, list | tuple):
        return [found for item in value for found in structs(item)]
    return []


ON_THE_PAGE = [s for text, _ in VECTORS for s in structs(protocol_vectors.read(text))]


@pytest.mark.parametrize("kind", SPOKEN)
def test_every_message_has_a_vector(kind):
    assert kind in map(type, ON_THE_PAGE)


@pytest.mark.parametrize("kind", sorted(set(map(type, ON_THE_PAGE)), key=str))
def test_every_field_is_in_a_vector_with_a_value_that_is_not_its_default(kind):
    found = [struct for struct in ON_THE_PAGE if type(struct) is kind]
    fields = [field for field in msgspec.structs.fields(kind) if not field.required]
    usual = {field.name: default(field) for field in fields if field.name != "version"}

    assert [n for n, value in usual.items() if all(getattr(s, n) == value for s in found)] == []


def default(field):
    """Return the value of a field that is left out."""
    made = field.default_factory is not msgspec.NODEFAULT
    return field.default_factory() if made else field.default


def test_the_vectors_of_the_page_are_current():
    assert protocol_vectors.page(PAGE) == PAGE, "run python scripts/protocol_vectors.py"


def fields(name):
    """Return the names that the page gives the fields of a message."""
    (words,) = re.findall(rf"^\| `{name}` \| (.*?)\| [^|]* \|$", PAGE, re.MULTILINE)
    return re.findall(r"`(\w+)`", words)


@pytest.mark.parametrize("message", MESSAGES)
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
    each = 1000 * (link.first_resend(1, lease.lease(0)) - link.RESEND_SECONDS)
    most = link.first_resend(1_000_000, lease.Lease(100.0)) / 100
    assert f"the first has arrived | {link.RESEND_SECONDS:g} s and {each:.3g} ms a node but" in PAGE
    assert f"at most {most:.3g} lease, doubling up to {link.RESEND_SECONDS_MAX:g} s | |" in PAGE
    assert f"has to wait | half of that, at most {times.heartbeat:g} lease | |" in PAGE
