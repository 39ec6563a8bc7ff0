"""Values that ranks exchange without pickle."""

import ast
import io
import pickle
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from ranks import run_warm

import msrun
from msrun.errors import ProtocolError
from msrun.parallel.checkpoint.peers import HostGroup
from msrun.parallel.exchange import messages

pytestmark = pytest.mark.torch

PICKLING = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}


class Note(msgspec.Struct, frozen=True):
    """A value of more than one kind of field."""

    text: str
    numbers: list[float]
    data: bytes = b""


def test_no_collective_pickles():
    found = {
        f"{path.name}: {name}"
        for path in Path(msrun.__file__).parent.rglob("*.py")
        if any(name in (text := path.read_text()) for name in PICKLING)
        for node in ast.walk(ast.parse(text))
        for name in (getattr(node, "attr", None), getattr(node, "id", None))
        if name in PICKLING
    }
    assert found == set()


def _every_direction():
    rank = dist.get_rank()
    group = dist.group.WORLD
    own = Note("x" * 1000 * rank, [float("inf"), 0.5], bytes(range(rank)))
    notes = [Note(str(number), []) for number in range(3)] if rank == 0 else []
    return [
        messages.gather_all(own, Note, group),
        messages.gather_all((rank, "a"), tuple[int, str], None),
        messages.gather_to_first(own, Note, group),
        messages.scatter_from_first(notes, Note, group),
        messages.broadcast("second" if rank == 1 else None, str, 1, group),
    ]


def test_every_rank_gets_the_values():
    notes = [Note("x" * 1000 * rank, [float("inf"), 0.5], bytes(range(rank))) for rank in range(3)]
    for rank, found in enumerate(run_warm(_every_direction, 3)):
        assert found == [
            notes,
            [(0, "a"), (1, "a"), (2, "a")],
            notes if rank == 0 else [],
            Note(str(rank), []),
            "second",
        ]


class _Armed:
    """Unpickling it would fail the test."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


def _as_another_rank_sends(function, *, data):
    """Call `function` on rank 0, while rank 1 sends `data` by hand in the same collectives."""
    group = dist.group.WORLD
    if dist.get_rank() == 0:
        with pytest.raises(ProtocolError) as caught:
            function(group)
        return caught.value.message
    size = torch.tensor([len(data)])
    sizes = [torch.empty_like(size) for _ in range(2)]
    dist.all_gather(sizes, size)
    length = int(max(sizes))
    if length <= messages.BYTES_MAX:
        own = torch.zeros(length, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.all_gather([torch.empty_like(own) for _ in range(2)], own)
    return None


def _pickle_of_a_stranger():
    buffer = io.BytesIO()
    pickle.dump(_Armed(), buffer)
    return _as_another_rank_sends(
        lambda group: messages.gather_all("x", str, group), data=buffer.getvalue()
    )


def _another_type():
    return _as_another_rank_sends(
        lambda group: messages.gather_all("x", str, group), data=msgspec.msgpack.encode([1, 2])
    )


def _nested():
    return _as_another_rank_sends(
        lambda group: messages.gather_all([], list, group), data=b"\x91" * 100_000
    )


@pytest.mark.parametrize("function", [_pickle_of_a_stranger, _another_type, _nested])
def test_what_is_no_such_value_is_named_and_not_run(function):
    sentence, _ = run_warm(function, 2)
    assert sentence.startswith("rank 1 sent no ")


def _endless():
    """Rank 1 claims a length that nobody has memory for."""
    group = dist.group.WORLD
    size = torch.tensor([1 << 50])
    if dist.get_rank() == 1:
        dist.all_gather([torch.empty_like(size) for _ in range(2)], size)
        return None
    with pytest.raises(ProtocolError) as caught:
        messages.gather_all("x", str, group)
    return caught.value.message


def test_lengths_are_bounded():
    assert run_warm(_endless, 2) == [f"rank 1 sends {1 << 50} bytes (limit {1 << 30})", None]


def _values_of_any_size():
    peers = HostGroup()
    return peers.from_first("first" if peers.rank == 0 else "other")


def test_a_text_of_the_first_rank_reaches_all():
    assert run_warm(_values_of_any_size, 2) == ["first", "first"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.zeros(2, 0),
        torch.tensor([1 + 2j]).conj(),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_a_tensor_goes_as_plain_values(tensor):
    found = exchange_of(messages.SentTensor.of(tensor)).tensor()
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor.resolve_conj())


def exchange_of(value):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))


@pytest.mark.parametrize(
    "sent", [([2], "float32", b"123"), ([-1], "bool", b""), ([1], "Size", b"1")]
)
def test_a_tensor_that_is_none_is_refused(sent):
    with pytest.raises(ProtocolError):
        messages.SentTensor(*sent).tensor()
