"""Checkpoints of models whose stages share a weight, under names that not every stage has."""

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.parallel.checkpoint.convert import convert
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch


class Read(nn.Module):
    """Reads a weight of its head, which is its embedding, at the beginning."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        x = self.emb(tokens).to(self.head.weight.dtype)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


class Thrice(nn.Module):
    """Has a name for a weight that no stage uses."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(8, 4)
        self.first = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.second = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.first.weight = self.second.weight = self.head.weight = self.shared.weight

    def forward(self, tokens):
        x = self.first(tokens)
        x = self.layers[0](x).tanh()
        x = self.layers[1](x + self.second(tokens)).tanh()
        return self.head(x)


KINDS = {"read": Read, "thrice": Thrice}
STAGES = {"emb": 0, "first": 0, "shared": 0, "layers.0": 0}
STAGES |= {"layers.1": 1, "head": 1, "second": 1}
TOKENS = torch.arange(8).reshape(4, 2)


def config(kind, layout):
    if layout != "pp":
        return {}
    names = [name for name, _ in KINDS[kind]().named_children()]
    stages = {key: stage for key, stage in STAGES.items() if key.partition(".")[0] in names}
    return {"mesh": {"pp": 2}, "pipeline": {"stages": stages, "microbatches": 2}}


def step_of(kind, layout, path, *, saves):
    """Train a step from nothing and save, or a step from what was saved; return the loss."""
    rt = msrun.init(config(kind, layout))
    with torch.random.fork_rng():
        torch.manual_seed(5 if saves else 6)
        model = KINDS[kind]()
    # What is traced without a sample has the weight under the name that is read.
    model = rt.shard(model, sample=[TOKENS] if kind == "thrice" else None)
    update = rt.optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    if not saves:
        rt.load(model, update, path=path)
    count = rt.layout.size("dp")
    part = TOKENS.chunk(count)[rt.coordinate.get("dp", 0)]
    loss = rt.step(
        model,
        update,
        lambda y, t: functional.cross_entropy(y.flatten(0, 1), t.flatten()),
        part,
        part,
    )
    if saves:
        rt.save(model, update, step=1, path=path)
    return loss.item()


def save(kind, layout, path):
    return step_of(kind, layout, path, saves=True)


def load(kind, layout, path):
    return step_of(kind, layout, path, saves=False)


@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_loads_what_stages_saved(kind, tmp_path):
    run_warm(save, 1, kind, "one", tmp_path / "one")
    run_warm(save, 2, kind, "pp", tmp_path / "pp")
    [expected] = run_warm(load, 1, kind, "one", tmp_path / "one")

    for source, layout, ranks in (
        ("pp", "one", 1),
        ("pp", "pp", 2),
        ("pp", "dp", 2),
        ("one", "pp", 2),
    ):
        found = run_warm(load, ranks, kind, layout, tmp_path / source)
        assert found == [pytest.approx(expected, abs=1e-6)] * ranks, (source, layout)


@pytest.mark.parametrize("kind", KINDS)
def test_one_file_has_every_name_once(kind, tmp_path):
    run_warm(save, 2, kind, "pp", tmp_path / "pp")
    convert(tmp_path / "pp", tmp_path / "all.safetensors")
    convert(tmp_path / "pp", tmp_path / "all.pt")

    state = torch.load(tmp_path / "all.pt", weights_only=True)
    KINDS[kind]().load_state_dict(state)
    package = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    found = package.load_file(tmp_path / "all.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], full_tensor(value)) for name, value in state.items())
