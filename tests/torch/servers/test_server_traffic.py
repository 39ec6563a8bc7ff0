"""Rows that are used much are divided among the servers when a real job is scaled."""

import threading
import time

import pytest
import torch
from ranks import run_warm
from server_jobs import serving

import msrun
from msrun.parallel.servers.disk import ServerDisk
from msrun.processes import server_files

pytestmark = pytest.mark.torch

ROWS, SLICES = 1200, 12
# Both of server 0 at first, and by bytes alone after a scale to 3 servers, too.
BUSY = [4, 6]
LIMIT = 60


def until(is_so):
    """Return what a condition becomes."""
    limit = time.monotonic() + LIMIT
    while time.monotonic() < limit:
        if found := is_so():
            return found
        time.sleep(0.01)
    raise AssertionError("in vain")


def train(folder):
    """Look up rows of two slices alone, around a change of the servers."""
    rt = msrun.init({"servers": {"params": ["weight"]}})
    model = rt.shard(torch.nn.Embedding(ROWS, 4, sparse=True, _weight=torch.zeros(ROWS, 4)))
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    ids = torch.cat([torch.arange(index, ROWS, SLICES) for index in BUSY])
    for step in range(4):
        if step == 2:
            (folder / "busy").touch()
            until((folder / "moved").exists)
        optimizer.zero_grad()
        model(ids).sum().backward()
        optimizer.step()
    weight = rt.state_dict(model)["weight"]
    rt.close()
    return sorted(weight.sum(1).unique(return_counts=True)[1].tolist())


def test_busy_slices_get_servers_of_their_own(tmp_path, monkeypatch):
    owners = []

    def decided():
        decision = ServerDisk(tmp_path / "head").decision()
        return decision.ownership.owners["weight"] if decision else []

    def scale(job):
        until((tmp_path / "busy").exists)
        owners.append(decided())
        server_files.count(tmp_path, 3)
        job.start(2)
        until(lambda: 2 in decided())
        owners.append(decided())
        (tmp_path / "moved").touch()
        job.over.wait()

    with serving(tmp_path, monkeypatch, 2, 1) as job:
        scaler = threading.Thread(target=scale, args=(job,), daemon=True)
        scaler.start()
        [counts] = run_warm(train, 1, tmp_path)

    before, after = owners
    assert [before[index] for index in BUSY] == [0, 0]
    assert len({after[index] for index in BUSY}) == len(BUSY)
    assert sorted(map(after.count, range(3))) == [4, 4, 4]
    assert counts == [200, 1000]
