"""Servers that are killed while ranks train: the curve is that of one process."""

import random
import shutil
import threading
import time

import pytest
import torch
from ranks import run_ranks, run_warm
from server_jobs import serving
from test_remote_parameters import LOSS, OPTIMIZERS, PARAMS, TOLERANCE, batch, build, part

import msrun

pytestmark = pytest.mark.torch


CLIP = 0.05


def curve(steps, max_norm=None):
    model = build()
    update = OPTIMIZERS["momentum"](model)
    losses = []
    for step in range(steps):
        *inputs, labels = batch(step)
        update.zero_grad()
        loss = LOSS(model(*inputs), labels)
        loss.backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        update.step()
        losses.append(loss.item())
    return losses


def train(steps, every, folder, stops, replicas=0, max_norm=None):  # noqa: PLR0917 - of cases
    """Train; after each step of `stops`, wait until the test has killed a server."""
    servers = {"params": PARAMS, "snapshot": {"every": every}, "replicas": replicas}
    rt = msrun.init({"servers": servers})
    model = rt.shard(build())
    update = rt.optimizer(OPTIMIZERS["momentum"](model))
    losses = []
    for step in range(steps):
        mine = part(step, rt.rank, rt.world_size)
        losses.append(rt.step(model, update, LOSS, *mine, max_norm=max_norm).item())
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
        found = run_warm(train, 2, 9, 2, tmp_path, list(stops), 0, CLIP)

    for losses in found:
        assert losses == pytest.approx(curve(9, CLIP), abs=TOLERANCE)


def test_a_killed_server_goes_on_with_copies_at_the_step_it_was_at(tmp_path, monkeypatch, capfd):
    stops = {3: 1, 6: 0}
    with serving(tmp_path, monkeypatch, 3, 2) as job:
        killer = threading.Thread(target=kill_at, args=(job, tmp_path, stops, 2), daemon=True)
        killer.start()
        found = run_warm(train, 2, 9, 1000, tmp_path, list(stops), 1)

    for losses in found:
        assert losses == pytest.approx(curve(9), abs=TOLERANCE)
    said = [line for line in capfd.readouterr().out.splitlines() if "this server" in line]
    assert said == [f"msrun: this server goes on with copies of step {step}" for step in (4, 7)]


def train_apart(steps, apart, folder):
    """Train by a plain loop; at step `apart` rank 1 has its rows before the kill, rank 0 after."""
    servers = {"params": PARAMS, "snapshot": {"every": 1000}}
    rt = msrun.init({"servers": servers})
    model = rt.shard(build())
    update = rt.optimizer(OPTIMIZERS["momentum"](model))
    losses = []
    for step in range(steps):
        *inputs, labels = part(step, rt.rank, rt.world_size)
        if step == apart and rt.rank == 0:
            (folder / f"at-{step}-0").touch()
            while not (folder / f"on-{step}").exists():
                time.sleep(0.01)
        update.zero_grad()
        loss = LOSS(model(*inputs), labels)
        (folder / f"at-{step}-{rt.rank}").touch()
        loss.backward()  # it reduces gradients over both ranks
        update.step()
        losses.append(loss.item())
    rt.close()
    return losses


def test_a_rank_that_waits_for_another_gives_a_killed_server_what_the_other_waits_for(
    tmp_path, monkeypatch
):
    with serving(tmp_path, monkeypatch, 2, 2) as job:
        killer = threading.Thread(target=kill_at, args=(job, tmp_path, {3: 1}, 2), daemon=True)
        killer.start()
        found = run_warm(train_apart, 2, 6, 3, tmp_path)

    assert [sum(each) / 2 for each in zip(*found, strict=True)] == pytest.approx(
        curve(6), abs=TOLERANCE
    )


def test_a_server_that_lost_its_disk_is_named_by_the_rank_that_waits_for_it(tmp_path, monkeypatch):
    def lose_at(job):
        while not (tmp_path / "at-1-0").exists():
            time.sleep(0.01)
        job.kill(0)
        shutil.rmtree(tmp_path / "server-0")
        (tmp_path / "on-1").touch()
        job.start(0)
        job.over.wait()

    with serving(tmp_path, monkeypatch, 1, 1) as job:
        killer = threading.Thread(target=lose_at, args=(job,), daemon=True)
        killer.start()
        with pytest.raises(pytest.fail.Exception, match="server 0 started again without what it"):
            run_warm(train, 1, 3, 100, tmp_path, [1])


def resume(steps, folder):
    """Train from the newest checkpoint on, and end without a word: the test kills these ranks."""
    checkpoint = {"dir": str(folder / "checkpoints"), "every": 2}
    rt = msrun.init({"servers": {"params": PARAMS}, "checkpoint": checkpoint})
    model = rt.shard(build())
    update = rt.optimizer(OPTIMIZERS["momentum"](model))
    begin = rt.resume(model, update)
    return begin, [
        rt.step(model, update, LOSS, *part(step, rt.rank, rt.world_size)).item()
        for step in range(begin, steps)
    ]


@pytest.mark.slow
def test_killed_ranks_go_on_from_their_checkpoint_with_the_same_servers(tmp_path, monkeypatch):
    with serving(tmp_path, monkeypatch, 2, 2) as job:
        first = run_ranks(resume, 2, 6, tmp_path)
        job.next_store()
        monkeypatch.setenv("MSRUN_GENERATION", "1")
        second = run_ranks(resume, 2, 9, tmp_path)

    expected = curve(9)
    for begin, losses in first:
        assert (begin, losses) == (0, pytest.approx(expected[:6], abs=TOLERANCE))
    for begin, losses in second:  # the checkpoint of step 6 was due at the next step
        assert (begin, losses) == (4, pytest.approx(expected[4:], abs=TOLERANCE))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_kills_at_any_moment_change_nothing(seed, tmp_path, monkeypatch):
    draw = random.Random(seed)
    steps, rounds, is_over = 60, 6, threading.Event()
    replicas, max_norm = seed % 2, CLIP if seed < 3 else None
    with serving(tmp_path, monkeypatch, 3, 2) as job:

        def torment():
            for _ in range(rounds):
                is_over.wait(draw.random() * 3)
                victims = draw.sample(range(3), draw.choice([1, 1, 1, 2, 3]))
                for server in victims:
                    job.kill(server)
                is_over.wait(draw.random() * 0.5)
                for server in victims:
                    job.start(server)
            is_over.set()
            job.over.wait()

        killer = threading.Thread(target=torment, daemon=True)
        killer.start()
        every = draw.choice([1, 7, 50])
        found = run_warm(train, 2, steps, every, tmp_path, [], replicas, max_norm, timeout=100)
        assert is_over.wait(60)

    expected = curve(steps, max_norm)
    for losses in found:
        assert losses == pytest.approx(expected, abs=TOLERANCE)
