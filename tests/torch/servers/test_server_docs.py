"""Every snippet of docs/servers.md runs on two ranks and two servers."""

import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from ranks import run_warm
from server_jobs import serving
from torch import nn

import msrun

pytestmark = pytest.mark.torch

PAGE = Path(__file__).parents[3] / "docs" / "servers.md"
BLOCK = re.compile(r"^```(\w+)( prelude)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONFIG = {"servers": {"params": ["items.weight", "users.weight"]}}


def run_all(prelude, snippets, folder):
    """Run each snippet as a script of its own."""
    os.chdir(folder)
    losses = []
    for snippet in snippets:
        names = {"__name__": "__main__"}
        msrun.init(CONFIG)
        exec(prelude + snippet, names)
        losses.append(names.get("loss"))
        names["rt"].close()
    return len(losses)


class Tables(nn.Module):
    """A model with every parameter that a configuration of the page names, or two on `meta`."""

    def __init__(self, device):
        super().__init__()
        self.names = ["items", "users"] if device == "meta" else ["items", "users", "embed"]
        with torch.device(device):
            for name in self.names:
                setattr(self, name, nn.Embedding(60, 4))
        self.out = nn.Linear(4, 1)

    def forward(self, ids):
        return self.out(sum(getattr(self, name)(ids) for name in self.names))


def run_configs(configs):
    """Train with each configuration; return the losses of its steps."""
    losses = []
    for config in configs:
        rt = msrun.init(config)
        model = rt.shard(Tables("meta" if "init" in str(config) else "cpu"))
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ids, values = torch.arange(8) * (rt.rank + 1), torch.ones(8, 1)
        steps = [rt.step(model, optimizer, nn.functional.mse_loss, ids, values) for _ in range(3)]
        losses.append([loss.item() for loss in steps])
        rt.close()
    return losses


def test_snippets_run(tmp_path, monkeypatch):

    blocks = [match.groups() for match in BLOCK.finditer(PAGE.read_text())]
    [prelude] = [code for kind, is_prelude, code in blocks if is_prelude]
    snippets = [code for kind, is_prelude, code in blocks if kind == "python" and not is_prelude]
    configs = [yaml.safe_load(code) for kind, _, code in blocks if kind == "yaml"]

    with serving(tmp_path / "servers", monkeypatch, 2, 2):
        counts = run_warm(run_all, 2, prelude, snippets, tmp_path)
        losses, _ = run_warm(run_configs, 2, configs)

    assert counts == [len(snippets)] * 2
    assert len(snippets) > 2
    assert len(losses) > 2
    assert all(first > last for first, *_, last in losses)
