"""Scripts that others wrote for torchrun, unchanged under both commands: the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from ports import free_port
from support import script

pytestmark = [pytest.mark.torch, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPTS = Path(__file__).with_name("scripts")
CPU = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("name", ["test_ops", "test_sync", "test_script"])
def test_accelerates_own_scripts_pass(both, name):
    pytest.importorskip("accelerate")
    sides = both(["--nproc-per-node=2", "-m", f"accelerate.test_utils.scripts.{name}"], env=CPU)

    assert [side.process.returncode for side in sides] == [0, 0]


@pytest.mark.parametrize(
    ("name", "needs"),
    [("nano_gpt", "torch"), ("lightning_ddp", "lightning"), ("hf_trainer", "transformers")],
)
def test_a_training_script_has_the_same_losses(both, name, needs):
    pytest.importorskip(needs)
    sides = both(["--nproc-per-node=2", SCRIPTS / f"{name}.py"], env=CPU)

    assert [side.process.returncode for side in sides] == [0, 0]
    ours, theirs = (side.written() for side in sides)
    assert ours == theirs
    assert len(ours) == 2


def test_a_training_script_runs_on_two_nodes(launch):
    """Each with two workers, as with `--nproc-per-node=4` on one node."""
    line = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    line += [f"--master-port={free_port()}", SCRIPTS / "nano_gpt.py"]
    nodes = [
        launch("msrun", [f"--node-rank={rank}", *line], folder="two", env=CPU) for rank in (0, 1)
    ]
    alone = launch("torchrun", ["--nproc-per-node=4", SCRIPTS / "nano_gpt.py"], env=CPU)

    assert [side.wait() for side in (*nodes, alone)] == [0, 0, 0]
    losses = [[said.partition(" ")[2] for said in side.written()] for side in (nodes[0], alone)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


AGAIN = """
    import os
    import msrun, torch, torch.distributed as dist

    def opened():
        return [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")]

    seen = []
    for _ in range(6):
        rt = msrun.init()
        dist.all_reduce(torch.ones(2))
        dist.barrier(dist.new_group([0, 1]))
        rt.close()
        seen.append(opened())
    with open(f"said-{os.environ['RANK']}", "w") as file:
        # The last may have the connection to the peer that is gone already.
        file.write(str(max(map(max, (map(int.__sub__, n, seen[0]) for n in seen))) <= 1 or seen))
"""


def test_a_group_that_is_closed_gives_back_its_threads_and_descriptors(launch, tmp_path):
    side = launch("msrun", ["--nproc-per-node=2", script(tmp_path, AGAIN)])

    assert side.wait() == 0
    assert side.written() == ["True", "True"]
