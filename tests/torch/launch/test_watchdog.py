"""Ranks that wait for each other in different calls end with a sentence on each of them."""

import threading
import time
import traceback

import pytest
import torch
from ranks import run_ranks, run_warm
from support import script
from torch import nn

import msrun
from msrun.parallel.watchdog.places import ScriptPlace, disagreement
from msrun.parallel.watchdog.script_thread import ScriptThread

pytestmark = pytest.mark.torch

ZERO = {"optimizer": {"zero": 3, "threshold": 0}}
TP = {
    "mesh": {"tp": 2},
    "plan": [
        {"match": "0", "params": {"weight": ["tp", None], "bias": ["tp"]}, "out": [None, "tp"]},
        {"match": "1", "params": {"weight": [None, "tp"]}, "in": [None, "tp"], "out": [None, None]},
    ],
}

SCRIPT = """
import torch, msrun
from torch import nn

rt = msrun.init(CONFIG)
model = rt.shard(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4)))
optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(4):
    x, y = torch.ones(8, 16), torch.zeros(8, dtype=torch.long)
    rt.step(model, optimizer, nn.functional.cross_entropy, x, y)
    if rt.rank == 0 and step == 2:
        MISTAKE
"""
EVALUATES = "with torch.no_grad(): model(torch.ones(20, 16))"
PART = "with torch.no_grad(): model[1](torch.ones(20, 32))"
EVALUATED = (
    "rank 0 is in evaluation call 1 of Sequential after step 3; "
    "rank 1 is in step 4 after no evaluation call, in {waits}"
)


ENDED = "rank 0 has ended after step 3; rank 1 is in step 4"
NIGHTLY = pytest.mark.slow


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("config", "mistake", "told"),
    [
        (TP, EVALUATES, EVALUATED.format(waits="wait_tensor")),
        (TP, "break", ENDED),
        pytest.param(
            ZERO, EVALUATES, EVALUATED.format(waits="all_gather_single of 0"), marks=NIGHTLY
        ),
        pytest.param(
            ZERO,
            PART,
            EVALUATED.replace("of Sequential", "of 1").format(waits="all_gather_single of 0"),
            marks=NIGHTLY,
        ),
        pytest.param(ZERO, "break", ENDED, marks=NIGHTLY),
    ],
)
def test_a_call_of_one_rank_alone_ends_the_job(finished, tmp_path, config, mistake, told):
    text = SCRIPT.replace("CONFIG", repr(config)).replace("MISTAKE", mistake)
    job = finished(tmp_path, "--workers-per-node", 2, script(tmp_path, text, "alone.py"))

    assert job.process.returncode == 1
    sentence = f"msrun.errors.RanksDisagreeError: ranks do not run the same calls: {told}"
    assert job.block().splitlines()[1].strip().startswith(sentence)


def evaluated(config, evaluates):
    """Train and evaluate, on some ranks alone; return the losses and what the evaluations gave."""
    runtime = msrun.init(config)
    torch.manual_seed(0)
    network = runtime.shard(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4)))
    update = torch.optim.SGD(network.parameters(), lr=0.1)
    x, y = torch.ones(4, 16), torch.zeros(4, dtype=torch.long)
    found = []
    for _ in range(3):
        found.append(float(runtime.step(network, update, nn.functional.cross_entropy, x, y)))
        if evaluates(runtime):
            with torch.no_grad():
                found.append(float(nn.functional.cross_entropy(network(x), y)))
    return found


def on_rank_0(runtime):
    return runtime.rank == 0


def on_first_copy(runtime):
    return runtime.coordinate["dp"] == 0


def everywhere(_):
    return True


def test_a_rank_may_evaluate_alone_where_it_needs_no_other():
    # All parameters are below the threshold.
    whole = {"optimizer": {"zero": 3, "threshold": "1MiB"}}
    [everywhere_0, _] = run_warm(evaluated, 2, whole, everywhere)
    alone, other = run_warm(evaluated, 2, whole, on_rank_0)
    assert alone == everywhere_0
    assert other == everywhere_0[::2]


def test_one_copy_of_a_sharded_model_may_evaluate_alone():
    config = TP | {"mesh": {"dp": 2, "tp": 2}}
    alone = run_ranks(evaluated, 4, config, on_first_copy)
    together = run_warm(evaluated, 2, TP, everywhere)[0]
    assert [len(found) for found in alone] == [6, 6, 3, 3]
    for found in alone[:2]:
        assert found == pytest.approx(together, abs=1e-6)


def seen_by_another_thread():
    """Return what another thread sees of this one, while it computes and while it waits."""
    script, found = ScriptThread(seconds=0.5), []
    turns = [threading.Event() for _ in range(3)]

    def look():
        for turn in turns:
            turn.wait()
            found.append(script.waiting())
        found[-1] = [frame.f_code.co_name for frame, _ in traceback.walk_stack(found[-1])]

    thread = threading.Thread(target=look)
    thread.start()
    turns[0].set()
    begin = time.thread_time()
    while time.thread_time() - begin < 0.3:
        torch.ones(2).add(1)
    turns[1].set()
    thread.join(0.5)
    turns[2].set()
    thread.join()
    return found


def test_a_thread_is_seen_where_it_waits_and_not_while_it_computes():
    for first, computing, waiting in run_warm(seen_by_another_thread, 2):
        assert first is computing is None
        assert "seen_by_another_thread" in waiting


def test_ranks_in_one_place_are_left_alone():
    places = [
        ScriptPlace(kind="step", steps=3, scope=n, evaluations=n, waits_in="send") for n in (0, 1)
    ]
    assert disagreement(places) is None


def test_ranks_of_one_place_are_named_together():
    ahead = ScriptPlace(kind="between", steps=3, scope=0, waits_in="barrier")
    behind = ScriptPlace(kind="training", trainings=2, scope=1, model="Net")
    assert disagreement([behind, ahead, behind, ScriptPlace(kind="ended", trainings=1)]) == (
        "ranks do not run the same calls: ranks 0,2 are at training call 2 of Net; "
        "rank 1 is between calls after step 3, in barrier; "
        "rank 3 has ended after training call 1"
    )
