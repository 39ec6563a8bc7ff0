"""What a forward reads of tensors is known where it follows from shapes, and else is refused."""

from __future__ import annotations

import sys

import pytest
import torch
from auto_quirks import ReadsConstants, given
from torch import nn

from msrun.errors import ModelError
from msrun.parallel.auto.tracing.trace import trace
from msrun.parallel.torch_compat import outside_of_tracing, without_graph_dumps

pytestmark = pytest.mark.torch


class Reads(nn.Module):
    """Doubles where it says so; `saying` returns a tensor."""

    def __init__(self, saying):
        super().__init__()
        self.up, self.saying = nn.Linear(8, 8), saying
        self.register_buffer("count", torch.ones(()))

    def forward(self, x):
        return self.up(x) * (2 if self.saying(self, x).any() else 1)


def written(_, x):
    """Return what was known before it was written."""
    mask = torch.ones(8, 8)
    mask.view(-1)[:8] = x[0]
    return mask > 0


def assigned(_, x):
    mask = torch.ones(8, 8)
    mask.data = x
    return mask > 0


def drawn(_, x):
    return torch.rand(len(x)) > 0.5


UNKNOWN = {
    "input": lambda _, x: x > 0,
    "parameter": lambda net, _: net.up.weight > 0,
    "buffer": lambda net, _: net.count > 0,
    "random": drawn,
    "written": written,
    "assigned": assigned,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_values_that_may_change_are_refused_without_a_dump(name, capfd):
    with pytest.raises(ModelError) as caught:
        trace(Reads(UNKNOWN[name]), (given(),))
    line = Reads.forward.__code__.co_firstlineno + 1
    assert caught.value.message == (
        "search: the forward of Reads cannot be traced: it reads the value of a tensor "
        f"(test_data_dependence.py, line {line})"
    )
    assert "torch.where" in caught.value.hint
    assert capfd.readouterr() == ("", "")


def test_values_that_follow_from_shapes_are_those_of_a_forward():
    torch.manual_seed(0)
    traced = trace(ReadsConstants(), (given(),))
    assert not traced.refused
    # The forward multiplies by the sum of the mask, and not by 2, since the mask is not symmetric.
    factors = [step.attrs["other"] for step in traced.program.steps if step.packet == "mul"]
    assert factors == [30.0]


def test_functions_compute_outside_of_a_trace(capfd):
    asked = []

    def saying(_, x):
        with outside_of_tracing():
            asked.append(bool(torch.ones(2).sum() == 2))
        return x > 0

    with pytest.raises(Exception, match="data-dependent"), without_graph_dumps():
        torch.export.export(Reads(saying), (given(),), strict=False)
    assert asked == [True]
    assert capfd.readouterr().err == ""
    with without_graph_dumps():
        print("said inside", file=sys.stderr)
    assert capfd.readouterr().err == "said inside\n"


@pytest.mark.slow
def test_experts_that_loop_are_traced_as_one_product():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        use_cache=False,
        experts_implementation="eager",
    )
    model = transformers.MixtralForCausalLM(config)
    traced = trace(model, (torch.ones(2, 4, dtype=torch.long),))
    assert "grouped_mm_fallback" in {step.packet for step in traced.program.steps}
    assert config._experts_implementation == "eager"
