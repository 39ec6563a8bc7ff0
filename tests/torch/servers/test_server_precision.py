"""Parameter servers in half precision: bf16 trains as without servers (fp16 is refused)."""

import pytest
import torch
from ranks import run_warm
from server_jobs import serving
from torch import nn
from torch.nn import functional

import msrun

pytestmark = [
    pytest.mark.torch,
    # One of two runs in the job is without servers.
    pytest.mark.filterwarnings("ignore:msrun. this job has 2 parameter"),
]

STEPS = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(60, 8)
        self.hidden = nn.Linear(8, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, ids):
        return self.out(torch.tanh(self.hidden(self.table(ids)))).squeeze(-1).float()


def train(servers):
    """Return losses and weights; `hidden` is a copy on servers, and `out` on the ranks."""
    torch.manual_seed(5)
    rt = msrun.init({"precision": "bf16", **servers})
    model = rt.shard(Net())
    update = rt.optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    losses = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        ids, target = torch.randint(0, 60, (16,), generator=draw), torch.rand(16, generator=draw)
        mine = [each.chunk(rt.world_size)[rt.rank] for each in (ids, target)]
        losses.append(rt.step(model, update, functional.mse_loss, *mine).item())
    kinds = {name: each.dtype for name, each in model.named_parameters()}
    state = rt.state_dict(model)
    rt.close()
    return losses, state, kinds


def both():
    servers = {"params": ["table.weight", "hidden.*"]}
    return train({"servers": servers}), train({})


def test_bf16_trains_as_without_servers(tmp_path, monkeypatch):
    with serving(tmp_path, monkeypatch, 2, 2):
        found = run_warm(both, 2)

    for (losses, state, kinds), (expected, weights, _) in found:
        assert losses == pytest.approx(expected, abs=1e-5)
        assert set(kinds.values()) == {torch.float32}
        for name, weight in weights.items() if state else ():
            torch.testing.assert_close(state[name], weight, rtol=0, atol=1e-4)
    assert found[0][0][0][-1] < found[0][0][0][0]
