"""Plans with pipeline stages: each stage runs its slice of the plan, and all learn as one does."""

from __future__ import annotations

import pytest
import torch
from auto_models import GPT, LENGTH, VOCAB
from ranks import run_ranks

import msrun

pytestmark = pytest.mark.torch

STEPS = 5


def gpt(layers=4, **options):
    """Return a model with tied embeddings; every target counts, so micro-batches weigh alike."""
    return GPT(layers=layers, ignored=-100, **options)


def tokens():
    return torch.randint(0, VOCAB, (8, LENGTH)), torch.randint(0, VOCAB, (8, LENGTH))


def local(rt, batch):
    """Return this rank's part of a batch."""
    return [x.chunk(rt.layout.size("dp"))[rt.coordinate.get("dp", 0)] for x in batch]


def train(config, dtype=torch.float64, max_norm=None):
    """Return losses, whole weights, the mesh, and which share of all parameters is here."""
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
        loss = rt.step(net, optimizer, lambda out, _: out, x, y, y, max_norm=max_norm)
        losses.append(loss.item())
    weights, held = {}, 0
    for name, param in net.named_parameters():
        is_divided = hasattr(param, "full_tensor")
        weights[name] = (param.full_tensor() if is_divided else param).detach()
        held += (param.to_local() if is_divided else param).numel()
    return losses, weights, dict(rt.layout.axes), held / everything


def auto(mesh, **pipeline):
    settings = {"stages": "auto", "microbatches": 4} | pipeline
    return {"mode": "auto", "mesh": mesh, "pipeline": settings}


def check(found, want, rel=1e-10):
    """Hold what ranks found against one process: losses, and the weights of their stages."""
    ((losses, weights, _, _),) = want
    seen = set()
    for ours, parts, _, share in found:
        assert ours == pytest.approx(losses, rel=rel)
        assert share < 0.9
        seen |= set(parts)
        for name, weight in parts.items():
            assert torch.allclose(weight, weights[name], rtol=rel, atol=rel), name
    assert seen == set(weights)


@pytest.mark.parametrize(
    "config",
    [auto({"pp": 2, "tp": 2}), auto({"pp": 2, "dp": 2}, schedule="gpipe")],
    ids=["tp", "dp"],
)
def test_stages_learn_what_one_process_does(config):
    want = run_ranks(train, 1, {"mesh": {"dp": 1}})
    check(run_ranks(train, 4, config), want)
