"""Outputs of models as frames, which one rank sends to the others."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import msgspec
import pytest
import torch

from msrun.errors import ModelError
from msrun.parallel.exchange.frame import SentOutput, fill, frame_of
from msrun.parallel.losses.batch import tensors_in

pytestmark = pytest.mark.torch

Pair = namedtuple("Pair", "left right")  # noqa: PYI024 - a class of a script


@dataclass
class Output(OrderedDict):
    """As in transformers: a mapping whose fields are its keys."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None

    def __post_init__(self):
        self.update(logits=self.logits, loss=self.loss)

    def __reduce__(self):
        return (Output, (self.logits, self.loss))


class Cache:
    """A class that no frame has."""


def _sent(output):
    """Return `output` after it went through bytes."""
    wire = msgspec.msgpack.encode(frame_of(output))
    tensors = iter(tensors_in(output))
    asked = []

    def receive(shape, dtype):
        asked.append((shape, dtype))
        return next(tensors)

    found = fill(msgspec.msgpack.decode(wire, type=SentOutput), receive)
    assert asked == [(tuple(t.shape), t.dtype) for t in tensors_in(output)]
    return found


ONE, TWO = torch.ones(2, 3), torch.zeros((), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "output",
    [
        ONE,
        None,
        (ONE, [TWO, 3, "x", None], {"a": (ONE,), 7: 0.5}),
        Pair(ONE, (TWO,)),
        Output(ONE),
        Output(ONE, TWO),
        OrderedDict(b=ONE, a=TWO),
        (torch.Size([2, 3]), ONE),
    ],
    ids=lambda output: type(output).__name__,
)
def test_an_output_arrives_in_its_classes(output):
    found = _sent(output)
    assert type(found) is type(output)
    assert found is output or repr(found) == repr(output)


@pytest.mark.parametrize(
    ("output", "name"),
    [({"cache": [Cache()]}, "the output['cache'][0] is a Cache"), ({ONE}, "the output is a set")],
)
def test_what_cannot_be_sent_is_named_on_all_ranks(output, name):
    with pytest.raises(ModelError) as caught:
        fill(frame_of(output), pytest.fail)
    assert caught.value.message == (
        f"{name}, and the last stage of a pipeline sends the others tensors and plain values"
    )


@pytest.mark.parametrize(
    "kind", [("subprocess", "Popen"), ("os", "system"), ("builtins", "exec"), ("no.module", "X")]
)
def test_a_frame_cannot_name_code_to_run(kind):
    wire = {"frame": {"type": "sequence", "kind": kind, "items": []}}
    with pytest.raises(ModelError) as caught:
        fill(msgspec.convert(wire, SentOutput), pytest.fail)
    assert f"returns a {'.'.join(kind)}, which this rank has not" in caught.value.message
