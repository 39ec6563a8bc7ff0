"""Questions and answers on the wire: what is read, and what never is."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.cluster.wire import codec, control_messages
from msrun.cluster.wire.control_messages import (
    Answer,
    Denied,
    DrainNode,
    GetLog,
    GetNodes,
    GetRanks,
    GetStatus,
    Log,
    Question,
    RankRow,
    Ranks,
    SignalJob,
    StopJob,
    fitting,
)
from msrun.cluster.wire.messages import PROTOCOL_VERSION, Drained, Envelope, SignalRanks
from msrun.errors import ProtocolError, VersionError

QUESTIONS = [
    Question(question="", request=GetStatus()),
    Question(question="train", request=GetLog(rank=3, lines=20)),
    Question(question="train", request=SignalJob(signum=10, ranks=[(0, 3)])),
    Question(question="train", request=StopJob(now=True)),
    Question(question="train", request=DrainNode(node="b")),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: type(q.request).__name__)
def test_a_question_arrives_as_it_was_asked(question):
    frame = control_messages.encode(question)

    assert control_messages.is_question(frame)
    assert control_messages.decode_question(frame) == question


def test_an_answer_arrives_as_it_was_given():
    answer = Answer(answer=Log(host="a", log_file="log", data=b"\xff\n", offset=2))

    assert control_messages.decode_answer(control_messages.encode(answer)) == answer


def test_a_message_of_an_agent_is_no_question_and_the_reverse():
    envelope = Envelope(job_id="j", node_id="a", incarnation=1, body=Drained())
    frame = codec.encode(envelope)

    assert not control_messages.is_question(frame)
    with pytest.raises(ProtocolError):
        control_messages.decode_question(frame)
    with pytest.raises(ProtocolError):
        codec.decode(control_messages.encode(QUESTIONS[0]))


def test_another_version_is_named():
    with pytest.raises(VersionError) as caught:
        control_messages.decode_answer(msgspec.msgpack.encode({"version": 99}))

    assert caught.value.message == (
        f"the job speaks protocol version 99, this msrun {PROTOCOL_VERSION}"
    )


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"version": PROTOCOL_VERSION, "question": "j"}),
        msgspec.msgpack.encode(
            {"version": PROTOCOL_VERSION, "question": "j", "request": {"type": "Format"}}
        ),
        bytes(codec.FRAME_BYTES_MAX + 1),
    ],
    ids=["nothing", "no MessagePack", "no request", "an unknown request", "too large"],
)
def test_what_is_no_question_is_refused(frame):
    with pytest.raises(ProtocolError):
        control_messages.decode_question(frame)


@pytest.mark.parametrize(
    "request_",
    [
        GetNodes(first=1 << 31),
        GetRanks(first=(1 << 64) - 1),
        GetRanks(first=-1),
        GetLog(rank=-1),
        GetLog(rank=0, offset=1 << 63),
        GetLog(rank=0, lines=-1),
        SignalJob(signum=0),
        SignalJob(signum=65),
        SignalJob(signum=200),
        SignalJob(signum=9, ranks=[(0, 1 << 31)]),
        SignalJob(signum=9, ranks=[(0, 0)] * 513),
        SignalJob(signum=9, ranks=[(0, 0)] * 21_800),
        DrainNode(node="n" * 601),
    ],
    ids=lambda request: str(request)[:40],
)
def test_what_nobody_can_mean_is_refused(request_):
    frame = control_messages.encode(Question(question="train", request=request_))

    with pytest.raises(ProtocolError, match=r"a frame is no message: Expected .* `\$.request"):
        control_messages.decode_question(frame)


def test_the_most_that_can_be_asked_for_reaches_an_agent():
    ranges = [((1 << 31) - 1, (1 << 31) - 1)] * 512
    question = Question(question="train", request=SignalJob(signum=64, ranks=ranges))
    order = SignalRanks(ranks=ranges, signum=64)
    envelope = Envelope(job_id="train", node_id="a", incarnation=1, body=order)

    assert control_messages.decode_question(control_messages.encode(question)) == question
    assert codec.decode(codec.encode(envelope)) == envelope


@given(st.binary(max_size=200))
def test_any_bytes_may_come(frame):
    control_messages.is_question(frame)
    for decode in (control_messages.decode_question, control_messages.decode_answer):
        with pytest.raises(ProtocolError):
            decode(frame)


def test_what_is_too_large_is_not_sent():
    with pytest.raises(ProtocolError, match="over the limit"):
        control_messages.encode(Answer(answer=Denied(reason="x" * codec.FRAME_BYTES_MAX)))


def test_a_page_fits_into_a_frame_however_long_its_rows():
    rows = [
        RankRow(rank=n, local_rank=0, host="h" * 255, pid=n, state="s" * 99, seconds=1.0)
        for n in range(1000)
    ]
    page = fitting(rows)

    assert 50 < len(page) < 1000
    assert page == rows[: len(page)]
    control_messages.encode(Answer(answer=Ranks(rows=page, following=len(page))))


def test_a_page_has_at_least_one_row():
    assert len(fitting(["x" * (1 << 17), "y"])) == 1
    assert fitting([]) == []
