"""With a staleness, a rank that makes no step delays the others only at the bound."""

import datetime as dt

import pytest
import torch
import torch.distributed as dist
from ranks import run_warm
from server_jobs import serving
from test_remote_parameters import LOSS, build, part

import msrun

pytestmark = pytest.mark.torch

STALENESS = 2
LIMIT = dt.timedelta(seconds=60)


def go_ahead(path):
    """Train on two ranks, of which the last begins when it is let; return what the first saw.

    Rank 0 lets it only when it has made as many steps as the bound allows, so a rank that waits for
    a slow one would wait for ever.  One step more than that needs a step of the slow rank.
    """
    rt = msrun.init({"servers": {"params": ["*"], "sync": {"staleness": STALENESS}}})
    model = rt.shard(build())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    store = dist.FileStore(path, 2)
    store.set_timeout(LIMIT)
    seen = []
    if rt.rank == 1:
        store.wait(["go"])
    for step in range(STALENESS + 2):
        *inputs, labels = part(step, rt.rank, rt.world_size)
        update.zero_grad()
        LOSS(model(*inputs), labels).backward()
        update.step()
        if rt.rank == 1:
            store.add("steps", 1)
        else:
            seen.append(store.add("steps", 0))
            if step == STALENESS - 1:
                store.set("go", "")
    rt.close()
    return seen


def test_a_slow_rank_delays_the_others_at_the_bound_and_not_before(tmp_path, monkeypatch):
    with serving(tmp_path / "servers", monkeypatch, 1, 2):
        seen, _ = run_warm(go_ahead, 2, str(tmp_path / "store"))

    assert seen[:STALENESS] == [0] * STALENESS
