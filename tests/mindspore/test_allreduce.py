"""Programs of real MindSpore under msrun."""

from __future__ import annotations

import pytest
from support import script

OURS = "msrun"
pytestmark = [pytest.mark.slow, pytest.mark.process]

TRAIN = """
    import os, sys, time
    import numpy as np
    import mindspore
    from mindspore import Tensor, nn, ops
    from mindspore.communication import get_group_size, get_rank, init
    mindspore.set_context(device_target="CPU")
    init()
    total = ops.AllReduce()(Tensor(np.array([get_rank() + 1.0], np.float32)))
    with open(f"said-{get_rank()}", "a") as file:
        file.write(f"{get_rank()} {get_group_size()} {total.asnumpy()[0]:g}\\n")
"""
HIDDEN = "import torch, runpy; runpy.run_path('train.py')"


def said(*sums):
    return {f"said-{rank}": "".join(f"{rank} 2 {s}\n" for s in sums) for rank in range(2)}


def test_two_workers_reduce(launch, tmp_path):
    job = launch(OURS, ["-n", 2, "--log-dir", "logs", script(tmp_path, TRAIN)])

    assert job.wait() == 0
    assert job.files() == said(3)
    assert "mindspore_scheduler.log" in job.logs()


def test_workers_that_are_forked_with_torch_reduce(launch, tmp_path):
    (tmp_path / OURS).mkdir()
    script(tmp_path / OURS, TRAIN, "train.py")

    job = launch(OURS, ["-n", 2, script(tmp_path, HIDDEN)])

    assert job.wait() == 0
    assert job.files() == said(3)


def test_a_restart_reduces_again(launch, tmp_path):
    failing = TRAIN + "    if os.environ['MSRUN_GENERATION'] + os.environ['RANK'] == '01':\n"
    failing += "        raise ValueError\n    time.sleep(1)\n"

    job = launch(OURS, ["-n", 2, "--max-restarts", 1, script(tmp_path, failing)])

    assert job.wait() == 0
    assert job.files() == said(3, 3)
