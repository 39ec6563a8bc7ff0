"""A rank that ends early, by itself or by a mistake, makes nobody wait."""

import multiprocessing
import os
from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import MODELS, OPTIMIZERS, batches, build
from support import script

import msrun
from msrun.parallel.checkpoint import schema, store

pytestmark = pytest.mark.torch

LEAVES = """
import sys
import torch, msrun

rt = msrun.init({"checkpoint": {"dir": "ckpt", "every": 1}})
torch.manual_seed(1)
model = rt.shard(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    if step == 1 and rt.rank == LEAVER:
        sys.exit(0)
    rt.step(model, optimizer, torch.nn.functional.mse_loss, torch.ones(2, 4), torch.ones(2, 1))
    print("step", step, flush=True)
"""


@pytest.mark.parametrize("leaver", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_its_checkpoint_is_whole_and_the_others_are_told(finished, tmp_path, leaver):
    program = script(tmp_path, LEAVES.replace("LEAVER", str(leaver)), "leaves.py")
    job = finished(tmp_path, "--workers-per-node", 2, program)

    # The one that stayed cannot train alone, and says so; the fixture's patience is a minute.
    assert job.process.returncode == 1
    assert job.log(leaver) == "step 0\n"
    stayed = job.log(1 - leaver)
    assert stayed.startswith("step 0\n")
    assert f"rank {leaver} has ended after step 1" in stayed
    assert f"rank {1 - leaver} is in step 2" in stayed
    newest = store.find_newest(tmp_path / "ckpt")
    assert schema.read_manifest(newest).step == 1


MISTAKE = """
import torch, msrun

class Layer(torch.nn.Linear):
    def forward(self, x):
        if rt.rank == 1 and done:
            raise ValueError("a wrong label")
        return super().forward(x)

rt = msrun.init({
    "mesh": {"pp": 2},
    "pipeline": {"stages": {"0": 0, "1": 1}, "microbatches": 2},
    "checkpoint": {"dir": "ckpt", "every": 1},
})
done = []
model = rt.shard(torch.nn.Sequential(Layer(4, 4), Layer(4, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    rt.step(model, optimizer, torch.nn.functional.mse_loss, torch.ones(2, 4), torch.ones(2, 4))
    done.append(True)
"""


def test_a_mistake_in_one_stage_ends_the_others_and_is_the_cause(finished, tmp_path):
    job = finished(tmp_path, "--workers-per-node", 2, script(tmp_path, MISTAKE, "mistake.py"))

    assert job.process.returncode == 1
    assert job.block().startswith(
        "error: rank 1 (node HOST, local_rank 1, pid N) exited with code 1 after Ns\n"
        "  ValueError: a wrong label\n"
    )
    assert "\ncollateral: rank 0 " in job.block()  # by SIGTERM, or by what it could not send


def without_peer(rank, folder, answers):
    """Train to where a checkpoint is due; then rank 1 is gone, as after a kill."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    store_file = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store_file, rank=rank, world_size=2)
    runtime = msrun.init({"checkpoint": {"dir": f"{folder}/ckpt", "every": 1}})
    network = runtime.shard(build("mlp"))
    update = OPTIMIZERS["sgd"](network.parameters())
    runtime.step(network, update, MODELS["mlp"][1], *batches("mlp")[0])
    checkpoints = runtime.checkpoints
    # What rank 0 has yet to read of the step is lost when its peer closes the connection first.
    store_file.set(f"trained {rank}", "")
    if rank == 1:
        store_file.wait(["trained 0"])
        os._exit(0)
    with pytest.raises(msrun.errors.UsageError) as caught:
        checkpoints.finish_at_exit(timedelta(minutes=5))
    answers.put(caught.value.message)


def test_a_rank_that_is_gone_is_known_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [
        context.Process(target=without_peer, args=(rank, tmp_path, answers)) for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    try:
        message = answers.get(timeout=30)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()

    assert message.startswith("not all ranks came within 0:05:00: ")
