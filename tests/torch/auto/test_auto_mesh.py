"""`mesh: auto`: a mesh that is found trains as one process does."""

from __future__ import annotations

import math

import pytest
import torch
from auto_models import MODELS, Llama
from ranks import run_warm
from torch import nn

import msrun
from msrun.errors import ModelError, UsageError
from msrun.parallel.auto.agreed import agreed

pytestmark = pytest.mark.torch

AUTO = {"mode": "auto", "mesh": "auto"}


def train(config):
    """Return losses, whole weights, the mesh, micro-batches, and how much of all is here."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    net = Llama(layers=3).double()
    torch.manual_seed(1)
    whole = [MODELS["llama"][1]() for _ in range(3)]
    is_found = config["mesh"] == "auto"
    net = rt.shard(net, sample=whole[0])
    parts, index = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
    optimizer = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for batch in whole:
        x, y = (part.chunk(parts)[index] for part in batch)
        losses.append(rt.step(net, optimizer, lambda out, _: out, x, y, y).item())
    weights, held = {}, 0
    for name, param in net.named_parameters():
        is_divided = hasattr(param, "full_tensor")
        weights[name] = (param.full_tensor() if is_divided else param).detach()
        held += (param.to_local() if is_divided else param).numel()
    assert is_found or parts == 1
    return losses, weights, dict(rt.layout.axes), rt.sharded(net).microbatches, held


@pytest.mark.parametrize(
    ("memory", "parts"),
    [(None, 1), pytest.param("340KiB", 1, marks=pytest.mark.slow), ("150KiB", 2)],
)
def test_a_found_mesh_learns_what_one_process_does(memory, parts):
    ((want, weights, _, _, whole),) = run_warm(train, 1, {"mesh": {"dp": 1}})
    found = run_warm(train, 4, AUTO | ({"memory": memory} if memory else {}))
    for losses, ours, mesh, made, held in found:
        assert math.prod(mesh.values()) == 4
        assert next(iter(mesh)) == "dp"
        assert (made, held < whole) == (parts, memory is not None)
        assert losses == pytest.approx(want, rel=1e-10)
        for name, weight in weights.items():
            assert torch.allclose(ours[name], weight, rtol=1e-10, atol=1e-12), name


def early():
    """Return what is said of all that needs the mesh before it is found."""
    rt = msrun.init(AUTO)
    said = []
    for ask in (
        lambda: rt.layout,
        lambda: rt.loader(torch.utils.data.TensorDataset(torch.zeros(8)), 2),
        lambda: rt.group("dp"),
        lambda: rt.coordinate,
    ):
        with pytest.raises(UsageError) as caught:
            ask()
        said.append(caught.value.message)
    return said


def test_before_it_is_found_there_is_no_mesh():
    (said,) = run_warm(early, 1)
    assert said == ["parallel.mesh: auto is chosen by rt.shard: call it first"] * 4


def refused(config, samples=8):
    x = torch.zeros(samples, 8, dtype=torch.long)
    with pytest.raises(UsageError) as caught:
        msrun.init(config).shard(Llama(), sample=(x, x.clone()))
    return caught.value.message


def test_what_cannot_be_found_is_one_sentence():
    for said in run_warm(refused, 2, AUTO | {"memory": "1KiB"}):
        assert said.startswith("parallel.memory: no plan fits; the smallest takes ")
    for said in run_warm(refused, 2, {"mode": "auto", "mesh": {"dp": 2}, "accumulate": 3}):
        assert said == (
            "parallel.accumulate: 3 does not divide the 8 samples of a local batch, and mode auto "
            "needs equal micro-batches"
        )


class Tangle(nn.Module):
    """Adds the products of all pairs of its layers' outputs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(14))

    def forward(self, x):
        parts = [layer(x) for layer in self.layers]
        return sum(a * b for index, a in enumerate(parts) for b in parts[:index])


def tangled():
    rt = msrun.init(AUTO)
    with pytest.raises(ModelError) as caught:
        rt.shard(Tangle(), sample=[torch.ones(8, 8)])
    return caught.value.message.partition(" (")[0], caught.value.hint


@pytest.mark.slow
def test_a_model_too_wide_for_the_search_is_refused_on_all_ranks():
    sentence = (
        "parallel.mode: auto: so many tensors of the model meet in one step that the search would "
        "need a table of 67108864 cells"
    )
    assert run_warm(tangled, 2) == [(sentence, "name mesh and plan without mode: auto")] * 2


def undecided():
    """Return what a rank raises, and its cause, where the decision of rank 0 fails by itself."""
    rt = msrun.init({"mesh": {"dp": 2}})
    with pytest.raises(ModelError) as caught:
        agreed(lambda: {}["missing"], rt.context)
    return caught.value.message, type(caught.value.__cause__).__name__


def test_an_unexpected_error_of_the_search_ends_all_ranks_with_one_sentence():
    """Else the other ranks wait until the launcher ends them."""
    sentence = "parallel.mode: auto: the search on rank 0 failed: KeyError: 'missing'"
    assert run_warm(undecided, 2) == [(sentence, "KeyError"), (sentence, "NoneType")]
