"""Plans with pipeline stages: each stage runs its slice of the plan, and all learn as one does."""

from __future__ import annotations

import json

import pytest
import torch
from auto_models import GPT, LENGTH, VOCAB, WIDTH, GPTBlock, tokens
from ranks import run_ranks
from torch import nn
from torch.nn import functional

import msrun
from msrun.cli.main import main

pytestmark = pytest.mark.torch

STEPS = 5
ALONE = {"mesh": {"dp": 1}}
# Where work takes long and a collective longer, stages are the fastest there is.
SLOW = "preset: cpu\nflops: 1.0e+8\nmemory_bandwidth: 1.0e+9\nlaunch: 0.0\ncollective: 0.01\n"
SEARCHED = """
from test_auto_stages import gpt, tokens


def make():
    return gpt().double(), tokens()
"""


def gpt(**options):
    """Return a model with tied embeddings; all targets count, so micro-batches weigh alike."""
    return GPT(layers=4, ignored=-100, **options)


class Skips(nn.Module):
    """No two parts are equal; one weight is used twice, a value skips stages, the loss is outside.

    What no parameter has a part in is dropped from, and read at both ends.
    """

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.drop = nn.Dropout(0.25)
        self.widths = nn.ModuleList([nn.Linear(WIDTH, WIDTH * (n % 2 + 1)) for n in range(6)])
        self.block = GPTBlock(0.5)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        self.unread = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, tokens, noise):
        noise = self.drop(noise) * self.scale
        x = y = self.tokens(tokens) + noise
        for layer in self.widths:
            y = functional.gelu(layer(y))[..., :WIDTH]
        return self.head(self.block(y) + x + noise)


def noisy():
    return tokens()[0], torch.randn(8, LENGTH, WIDTH).double(), tokens()[1]


def by_class(logits, target):
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def given(loss, _):
    return loss


def local(rt, batch):
    """Return this rank's part of a batch."""
    return [x.chunk(rt.layout.size("dp"))[rt.coordinate.get("dp", 0)] for x in batch]


def whole(param):
    return (param.full_tensor() if hasattr(param, "full_tensor") else param).detach()


def train(config, dtype=torch.float64):
    """Return losses, whole weights, the mesh, and the largest share of parameters on a rank."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    net = gpt().to(dtype)
    everything = sum(param.numel() for param in net.parameters())
    torch.manual_seed(1)
    batches = [tokens() for _ in range(STEPS)]
    is_found = config["mesh"] == "auto"
    net = rt.shard(net, sample=batches[0] if is_found else local(rt, batches[0]))
    optimizer = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for batch in batches:
        x, y = local(rt, batch)
        losses.append(rt.step(net, optimizer, given, x, y, y).item())
    weights = {name: whole(param) for name, param in net.named_parameters()}
    held = sum(getattr(p, "_local_tensor", p).numel() for p in net.parameters())
    return losses, weights, dict(rt.layout.axes), held / everything


def auto(mesh, microbatches=4, schedule="1f1b", **others):
    pipeline = {"stages": "auto", "microbatches": microbatches, "schedule": schedule}
    return {"mode": "auto", "mesh": mesh, "pipeline": pipeline, **others}


def check(found, want, rel=1e-10):
    """Hold what ranks found against one process: losses, and the weights that each has."""
    seen = set()
    for losses, weights in found:
        assert losses == pytest.approx(want[0], rel=rel)
        seen |= set(weights)
        for name, weight in weights.items():
            assert torch.allclose(weight, want[1][name], rtol=rel, atol=rel), name
    assert seen == set(want[1])


def test_stages_of_a_named_mesh_learn_what_one_process_does():
    ((*want, _, _),) = run_ranks(train, 1, ALONE)
    for config in (auto({"pp": 2, "tp": 2}), auto({"pp": 2, "dp": 2}, schedule="gpipe")):
        found = run_ranks(train, 4, config)
        check([one[:2] for one in found], want)
        assert all(share < 0.7 for *_, share in found)


def test_stages_that_a_search_finds_or_found_learn_what_one_process_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.yaml").write_text(SLOW)
    (tmp_path / "saved_gpt.py").write_text(SEARCHED)
    ((*want, _, _),) = run_ranks(train, 1, ALONE)
    config = {"mode": "auto", "mesh": "auto"}
    found = run_ranks(train, 4, config | {"topology": "slow.yaml"})
    check([one[:2] for one in found], want)
    assert [one[2] for one in found] == [{"pp": 4, "dp": 1}] * 4
    words = ("--world", "4", "--batch", "8", "--topology", "slow.yaml", "--memory", "120KiB")
    assert main(["search", "saved_gpt.py:make", *words, "-o", "plan.json"]) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["stages"], plan["mesh"], plan["recompute"]) == (2, {"tp": 2}, True)
    found = run_ranks(train, 4, config | {"plan": "plan.json"})
    check([one[:2] for one in found], want)
    assert [one[2] for one in found] == [{"pp": 2, "tp": 2}] * 4


def steps(config, folder, parts):
    """Return losses with clipping, dropout and a checkpoint half way, weights, and a prediction."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    net = Skips().double()
    torch.manual_seed(1)
    batches = [noisy() for _ in range(STEPS)]
    net = rt.shard(net, sample=local(rt, batches[0])[:2])
    optimizer = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for number, batch in enumerate(batches):
        if number == STEPS // 2:
            rt.save(net, optimizer, step=number, path=folder)
        losses.append(rt.step(net, optimizer, by_class, *local(rt, batch), max_norm=0.1).item())
    net.eval()
    with torch.no_grad():
        # Without stages, whoever evaluates divides the batch.
        divided = zip(*(x.chunk(parts) for x in batches[0][:2]), strict=True)
        seen = torch.cat([net(*inputs) for inputs in divided])
    return losses, {name: whole(param) for name, param in net.named_parameters()}, seen


def test_skips_ties_dropout_and_clipping_are_those_of_one_process(tmp_path):
    want = run_ranks(
        steps, 1, {"mode": "auto", "mesh": {"dp": 1}, "accumulate": 4}, str(tmp_path / "a"), 4
    )[0]
    found = run_ranks(steps, 4, auto({"pp": 4}), str(tmp_path / "b"), 1)
    for f in found:
        print(f[0], want[0])
    for f in found:
        assert torch.allclose(f[2], want[2], atol=1e-5)
    # The norm of gradients is taken in float32.
    check([one[:2] for one in found], want, rel=1e-6)
