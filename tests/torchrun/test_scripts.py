"""Scripts that others wrote for torchrun, unchanged under both commands: the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

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
