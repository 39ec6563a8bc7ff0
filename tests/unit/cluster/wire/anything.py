"""Strategies for anything that those who hold a key of a job may say."""

import msgspec
from hypothesis import strategies as st

from msrun.cluster.liveness.stacks import Frame
from msrun.cluster.verdict import RankExit, Verdict
from msrun.cluster.wire import codec
from msrun.cluster.wire.messages import (
    Drained,
    DumpStacks,
    Envelope,
    Finish,
    Formation,
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
    Unknown,
    Waiting,
    Warmed,
    WorkerExited,
)
from msrun.errors import ProtocolError

JOB = "train"
SMALL = st.integers(-2, 5)
ODD = SMALL | st.sampled_from([-(2**63), 2**31, 2**63 - 1, 2**64 - 1])
SECONDS = st.floats() | st.floats(0, 100)
TEXT = st.sampled_from(["", "a", "b\n\x1b[31m", "größer"]) | st.text(max_size=3)
NODES = st.sampled_from("abc")
FORMATIONS = [
    Formation(lease=0.0),
    Formation(nnodes_min=2, nnodes_max=2, lease=10.0),
    Formation(nnodes_min=1, nnodes_max=3, lease=10.0),
    Formation(nnodes_min=1, nnodes_max=3, world_size=4, lease=10.0),
]

exits = st.builds(
    RankExit,
    rank=SMALL | ODD,
    node_rank=SMALL,
    host=TEXT,
    local_rank=SMALL,
    pid=ODD,
    code=st.sampled_from([0, 0, 1, None, 300, -9]) | ODD,
    signum=st.none() | st.sampled_from([9, 15, 64]) | ODD,
    oom=st.booleans(),
    ran_for=SECONDS,
    age=SECONDS,
    swept=st.booleans(),
    error=TEXT,
    tail=st.lists(TEXT, max_size=2),
)
# What a node of ours says of its own.
CODES = st.sampled_from([2, 70, 120, 122])
ends = st.builds(
    RankExit,
    rank=SMALL,
    node_rank=SMALL,
    host=TEXT,
    local_rank=SMALL,
    pid=SMALL,
    code=st.sampled_from([0, 1, None]),
    signum=st.sampled_from([None, 9, 15]),
    ran_for=st.floats(0, 100),
    error=TEXT,
)
stuck = st.lists(TEXT, max_size=1)
verdicts = st.builds(
    Verdict, job_id=TEXT, code=SMALL, reason=TEXT, generation=SMALL, restarts=SMALL, root=exits
)


def registers(formations):
    return st.builds(
        Register,
        host=TEXT,
        slots=st.integers(1, 3) | ODD,
        store_host=st.sampled_from(["10.0.0.1", "::1", "", "x" * 300]),
        store_port=ODD,
        node_rank=st.none() | SMALL,
        serves=st.booleans(),
        formation=formations,
        running=SMALL,
        seen=SMALL,
        exits=st.lists(exits, max_size=2),
        stuck=stuck,
    )


LONG = TEXT | st.builds(str.__mul__, st.sampled_from("x训"), st.sampled_from([255, 6_000, 20_000]))
INQUIRIES = st.integers(0, 6) | ODD
frames = st.lists(st.builds(Frame, TEXT, ODD, LONG), max_size=2)
long_exits = exits | st.builds(
    lambda end, text: msgspec.structs.replace(end, error=text, log_file=text, tail=[text] * 3),
    exits,
    # The last is as much as one frame has room for.
    st.sampled_from([255, 6_000, 13_020]).map(lambda count: "x" * count),
)
of_control = st.one_of(
    st.builds(Warmed),
    st.builds(Running, pids=st.lists(ODD, max_size=3), age=SECONDS),
    st.builds(Stalled, rank=ODD, seconds=SECONDS, sign=LONG),
    st.builds(Stack, inquiry=INQUIRIES, worker=long_exits, frames=frames, problem=LONG),
    st.builds(
        LogPart,
        inquiry=INQUIRIES,
        log_file=LONG,
        data=st.binary(max_size=9) | st.sampled_from([9_000, 65_000]).map(bytes),
        offset=ODD,
        problem=TEXT,
    ),
)
ranges = st.lists(st.tuples(ODD, ODD), max_size=3) | st.sampled_from([512, 999, 21_750]).map(
    lambda count: [(0, 9)] * count
)
orders = st.one_of(
    st.builds(DumpStacks, inquiry=INQUIRIES),
    st.builds(ReadLog, inquiry=INQUIRIES, rank=ODD, offset=st.none() | ODD, lines=ODD),
    st.builds(SignalRanks, ranks=ranges, signum=ODD),
    st.builds(Hung, report=LONG),
)
from_agent = st.one_of(
    registers(st.sampled_from(FORMATIONS)),
    st.builds(WorkerExited, exit=exits),
    st.builds(Drained, stuck=stuck),
    st.builds(Interrupted, signum=st.sampled_from([2, 15]) | ODD),
    st.builds(NodeFailed, reason=TEXT, code=st.sampled_from([2, 120]) | ODD),
    of_control,
)
from_scheduler = st.one_of(
    st.builds(
        Start,
        node_rank=SMALL,
        nnodes=SMALL,
        first_rank=SMALL,
        count=SMALL,
        world_size=SMALL,
        store_host=TEXT,
        store_port=ODD,
        serve_store=st.booleans(),
    ),
    st.builds(Stop, reason=TEXT, signum=st.sampled_from([2, 15]) | ODD),
    st.builds(
        Restarting,
        reason=TEXT,
        log_file=TEXT,
        delay=SECONDS,
        restart=SMALL,
        max_restarts=SMALL,
    ),
    st.builds(Finish, verdict=verdicts),
    st.builds(Refused, reason=TEXT, code=SMALL),
    st.builds(Waiting, reason=TEXT, spare=st.booleans()),
    st.builds(Unknown, known=st.none() | SMALL),
    orders,
)
envelopes = st.builds(
    Envelope,
    job_id=st.sampled_from([JOB, "other"]),
    node_id=NODES,
    incarnation=SMALL,
    session=st.integers(0, 3) | ODD,
    seq=st.integers(0, 3) | ODD,
    ack=st.integers(0, 3) | ODD,
    stamp=SECONDS,
    term=st.integers(0, 2) | ODD,
    generation=SMALL | ODD,
    body=st.none() | from_agent | from_scheduler,
)


def wire(message):
    """Return `message` as it arrives; None when the codec does not let it through."""
    try:
        return codec.decode(codec.encode(message))
    except ProtocolError:
        return None


def body_off_the_wire(body):
    envelope = wire(Envelope(job_id=JOB, node_id="a", incarnation=1, body=body))
    return envelope.body if envelope else None
