import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.cluster.bounds import RankSet
from msrun.cluster.liveness.stacks import Frame
from msrun.cluster.verdict import ExitGroup, RankExit, Verdict
from msrun.cluster.wire import codec
from msrun.cluster.wire.messages import (
    PROTOCOL_VERSION,
    Drained,
    DumpStacks,
    Envelope,
    Finish,
    Hung,
    Interrupted,
    LogPart,
    NodeFailed,
    ReadLog,
    Refused,
    Register,
    Restarting,
    Running,
    SignalRanks,
    Stack,
    Stalled,
    Start,
    Stop,
    WorkerExited,
)
from msrun.errors import ProtocolError

text = st.text(max_size=20)
number = st.integers(-(2**31), 2**31 - 1)
count = st.integers(0, 2**31 - 1)
signum = st.integers(1, 64)
seconds = st.floats(-1e10, 1e10)
ranks = st.lists(number, max_size=4)
rank_sets = st.builds(RankSet.of, st.sets(number, max_size=4))
exits = st.builds(
    RankExit,
    rank=number,
    node_rank=number,
    host=text,
    local_rank=number,
    pid=number,
    code=st.none() | number,
    signum=st.none() | number,
    core=st.booleans(),
    oom=st.booleans(),
    ran_for=seconds,
    age=seconds,
    swept=st.booleans(),
    stalled=seconds,
    error=text,
    tail=st.lists(text, max_size=3),
    log_file=text,
)
verdicts = st.builds(
    Verdict,
    job_id=text,
    code=number,
    reason=text,
    generation=number,
    restarts=number,
    hint=text,
    root=st.none() | exits,
    collateral=st.lists(st.builds(ExitGroup, text, rank_sets), max_size=2),
    finished=rank_sets,
    stuck=st.lists(text, max_size=2),
    insecure=st.booleans(),
)
bodies = st.one_of(
    st.builds(
        Register,
        host=text,
        slots=st.integers(0, 65536),
        store_host=text,
        store_port=st.integers(0, 65535),
        node_rank=st.none() | number,
    ),
    st.builds(WorkerExited, exit=exits, at=seconds),
    st.builds(Drained, stuck=st.lists(text, max_size=3)),
    st.builds(Interrupted, signum=signum),
    st.builds(NodeFailed, reason=text, code=st.integers(0, 255)),
    st.builds(
        Start,
        node_rank=number,
        nnodes=number,
        first_rank=number,
        count=number,
        world_size=number,
        store_host=text,
        store_port=number,
        serve_store=st.booleans(),
    ),
    st.builds(Stop, reason=text, signum=signum),
    st.builds(
        Restarting,
        reason=text,
        log_file=text,
        delay=seconds,
        restart=number,
        max_restarts=number,
    ),
    st.builds(Finish, verdict=verdicts),
    st.builds(Refused, reason=text, code=st.integers(0, 255)),
    st.builds(Running, pids=st.lists(count, max_size=4), age=seconds),
    st.builds(Stalled, rank=count, seconds=seconds, sign=text),
    st.builds(DumpStacks, inquiry=count),
    st.builds(
        Stack,
        inquiry=count,
        worker=exits,
        frames=st.lists(st.builds(Frame, text, number, text), max_size=3),
        problem=text,
    ),
    st.builds(ReadLog, inquiry=count, rank=count, offset=st.none() | count, lines=count),
    st.builds(
        LogPart,
        inquiry=count,
        log_file=text,
        data=st.binary(max_size=20),
        offset=count,
        problem=text,
    ),
    st.builds(SignalRanks, ranks=st.lists(st.tuples(count, count), max_size=3), signum=signum),
    st.builds(Hung, report=text),
)
envelopes = st.builds(
    Envelope, job_id=text, node_id=text, incarnation=number, generation=number, body=bodies
)


def envelope(**changes):
    given = {
        "job_id": "train",
        "node_id": "a",
        "incarnation": 1,
        "generation": 0,
        "body": Interrupted(signum=2),
    }
    return Envelope(**{**given, **changes})


@given(envelopes)
def test_a_message_comes_back_as_it_was(message):
    assert codec.decode(codec.encode(message)) == message


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(frame):
    with contextlib.suppress(ProtocolError):
        assert isinstance(codec.decode(frame), Envelope)


@given(envelopes, st.data())
def test_a_damaged_frame_is_a_message_or_a_protocol_error(message, data):
    frame = bytearray(codec.encode(message))
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolError):
        assert isinstance(codec.decode(bytes(frame)), Envelope)


def test_every_beginning_of_a_frame_is_refused():
    frame = codec.encode(envelope())

    for length in range(len(frame)):
        with pytest.raises(ProtocolError, match=r"protocol version 0|a frame is no message"):
            codec.decode(frame[:length])


def test_a_frame_with_something_after_it_is_refused():
    with pytest.raises(ProtocolError, match="a frame is no message"):
        codec.decode(codec.encode(envelope()) + b"\0")


def test_deep_nesting_is_refused():
    with pytest.raises(ProtocolError, match="a frame is no message"):
        codec.decode(b"\x91" * 60_000)


def test_the_largest_message_is_sent_and_the_next_larger_is_not():
    overhead = len(codec.encode(envelope(body=Refused(reason="x" * 60_000, code=2)))) - 60_000
    fits = envelope(body=Refused(reason="x" * (codec.FRAME_BYTES_MAX - overhead), code=2))
    too_large = envelope(body=Refused(reason="x" * (codec.FRAME_BYTES_MAX - overhead + 1), code=2))

    frame = codec.encode(fits)

    assert (len(frame), codec.decode(frame)) == (65536, fits)
    with pytest.raises(ProtocolError, match="65537 bytes is over the limit of 65536"):
        codec.encode(too_large)


def test_a_frame_that_is_too_large_is_not_looked_at():
    with pytest.raises(ProtocolError, match="a frame of 65537 bytes is over the limit of 65536"):
        codec.decode(b"\xff" * (codec.FRAME_BYTES_MAX + 1))


@pytest.mark.parametrize(
    "message",
    [envelope(node_id="\udcff"), envelope(incarnation=2**64)],
    ids=["text that is not Unicode", "number of 65 bits"],
)
def test_what_no_peer_could_read_is_not_sent(message):
    with pytest.raises(ProtocolError, match="a message cannot be sent"):
        codec.encode(message)


def test_another_version_is_named_whatever_else_it_says():
    frame = msgspec.msgpack.encode({"version": 99, "body": {"type": "Novelty"}, "news": [1]})

    with pytest.raises(ProtocolError) as caught:
        codec.decode(frame)

    assert (caught.value.message, caught.value.hint) == (
        f"the peer speaks protocol version 99, this is {PROTOCOL_VERSION}",
        "install the same msrun on all nodes",
    )


REGISTER = {"type": "Register", "host": "a", "slots": 1, "store_host": "", "store_port": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"news": 1},
        {"body": {"type": "Novelty"}},
        {"body": {"type": "Interrupted", "signum": 2, "news": 1}},
        {"body": {"type": "Interrupted"}},
        {"generation": "0"},
        {"body": REGISTER | {"slots": -1}},
        {"body": REGISTER | {"slots": 65537}},
        {"body": REGISTER | {"store_port": 65536}},
        {"body": REGISTER | {"host": 256 * "h"}},
        {"body": REGISTER | {"seen": 1 << 54}},
        {"body": REGISTER | {"stuck": 18 * ["4711 D sh"]}},
        {"body": {"type": "SignalRanks", "ranks": [], "signum": 200}},
        {"body": {"type": "SignalRanks", "ranks": 513 * [[0, 0]], "signum": 9}},
        {"body": {"type": "SignalRanks", "ranks": [[0, 1 << 31]], "signum": 9}},
        {"body": {"type": "Stop", "reason": "", "signum": 0}},
        {"body": {"type": "ReadLog", "inquiry": 1, "rank": 0, "offset": 1 << 63}},
        {"body": {"type": "Stalled", "rank": 0, "seconds": float("nan"), "sign": "beat"}},
        {"body": {"type": "NodeFailed", "reason": 2001 * "x", "code": 70}},
        {"job_id": 256 * "j"},
        {"node_id": 601 * "n"},
    ],
    ids=[
        "unknown field",
        "unknown body",
        "unknown body field",
        "missing field",
        "wrong type",
        "no slots",
        "too many slots",
        "no port",
        "no host",
        "no generation",
        "too many processes",
        "no signal to send",
        "too many ranges",
        "no rank",
        "no signal to stop with",
        "no offset",
        "no time",
        "no sentence",
        "no job",
        "no node",
    ],
)
def test_what_this_version_does_not_know_is_refused(change):
    content = msgspec.to_builtins(envelope()) | change

    with pytest.raises(ProtocolError, match="a frame is no message"):
        codec.decode(msgspec.msgpack.encode(content))
