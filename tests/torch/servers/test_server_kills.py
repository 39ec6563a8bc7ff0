"""Servers that are killed while ranks train: the curve is that of one process."""

import random
import threading
import time

import pytest
from ranks import run_warm
from server_jobs import serving
from test_remote_parameters import LOSS, OPTIMIZERS, PARAMS, TOLERANCE, batch, build, part

import msrun

pytestmark = pytest.mark.torch


def curve(steps):
    model = build()
    update = OPTIMIZERS["momentum"](model)
    losses = []
    for step in range(steps):
        *inputs, labels = batch(step)
        update.zero_grad()
        loss = LOSS(model(*inputs), labels)
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


def train(steps, every, folder, stops):
    """Train; after each step of `stops`, wait until the test has killed a server."""
    rt = msrun.init({"servers": {"params": PARAMS, "snapshot": {"every": every}}})
    model = rt.shard(build())
    update = rt.optimizer(OPTIMIZERS["momentum"](model))
    losses = []
    for step in range(steps):
        losses.append(rt.step(model, update, LOSS, *part(step, rt.rank, rt.world_size)).item())
        if step in stops:
            (folder / f"at-{step}-{rt.rank}").touch()
            while not (folder / f"on-{step}").exists():
                time.sleep(0.01)
    rt.close()
    return losses


def kill_at(job, folder, stops, ranks):
    """Kill a server at each stop, and start it again once the ranks go on."""
    for step, server in stops.items():
        for rank in range(ranks):
            while not (folder / f"at-{step}-{rank}").exists():
                time.sleep(0.01)
        job.kill(server)
        (folder / f"on-{step}").touch()
        job.start(server)
    job.over.wait()


def test_a_killed_server_changes_nothing(tmp_path, monkeypatch):
    stops = {3: 1, 6: 0}
    with serving(tmp_path, monkeypatch, 2, 2) as job:
        killer = threading.Thread(target=kill_at, args=(job, tmp_path, stops, 2), daemon=True)
        killer.start()
        found = run_warm(train, 2, 9, 2, tmp_path, list(stops))

    for losses in found:
        assert losses == pytest.approx(curve(9), abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_kills_at_any_moment_change_nothing(seed, tmp_path, monkeypatch):
    draw = random.Random(seed)
    steps, kills = 400, []
    is_over, is_done = threading.Event(), threading.Event()
    with serving(tmp_path, monkeypatch, 3, 2) as job:

        def torment():
            while not is_over.wait(draw.random() * 2):
                victims = draw.sample(range(3), draw.choice([1, 1, 1, 2, 3]))
                for server in victims:
                    job.kill(server)
                is_over.wait(draw.random() * 0.5)
                for server in victims:
                    job.start(server)
                kills.extend(victims)
            is_done.set()
            job.over.wait()

        killer = threading.Thread(target=torment, daemon=True)
        killer.start()
        found = run_warm(train, 2, steps, draw.choice([1, 7, 50]), tmp_path, [], timeout=100)
        is_over.set()
        assert is_done.wait(10)

    expected = curve(steps)
    for losses in found:
        assert losses == pytest.approx(expected, abs=1e-5)  # of 400 steps
    assert len(kills) > 5
