"""One table: a line, its program, and the exit code of both commands and what workers have seen.

Where the two differ it is on purpose, and the migration page says why.
"""

from __future__ import annotations

import pytest
from support import script

pytestmark = [pytest.mark.torch, pytest.mark.process]

SAYS = "os.environ['RANK'] + ' ' + os.environ['WORLD_SIZE'] + ' ' + ' '.join(sys.argv[1:])"
PROGRAM = """
    import os, sys
    with open(f"said-{os.environ['RANK']}", "w") as file:
        file.write(SAYS)
    sys.exit(int(os.environ.get("CODE", "0")))
"""
# Line -> what it says of rank 0, exit code of msrun, of torchrun.
TABLE = {
    "--nproc_per=2 --redirect=3 --stand P --lr 1": ("0 2 --lr 1", 0, 0),
    "--nnodes=1:1 --nproc-per-node=auto P": (None, 0, 0),
    "--nproc-per-node=cpu P": (None, 0, 0),
    "--standalone --rdzv-endpoint=localhost:0 P": ("0 1 ", 0, 0),
    "--nnodes=1 --node-rank=1 P": ("0 1 ", 0, 0),
    "--nnodes=1 --node-rank=0 --master-addr=127.0.0.1 --master-port=PORT P": ("0 1 ", 0, 0),
    "--rdzv-conf=timeout=5,read_timeout=60 --event-log-handler=console --monitor-interval=0.5 "
    "--role=trainer --signals-to-handle=SIGTERM,SIGUSR1 --shutdown-timeout=5 P": ("0 1 ", 0, 0),
    "--nproc-per-node=xpu P": (None, 2, 1),
    "--nproc-per-node=none P": (None, 2, 1),
    "--nproc-per-node=gpu P": (None, 2, 1),
    "--numa-binding=nearest P": (None, 2, 2),
}
# Other values of an option that CI has a line for.
AT_NIGHT = ("--nproc-per-node=cpu P", "--nproc-per-node=xpu P", "--nproc-per-node=none P")
ROWS = [pytest.param(line, marks=[pytest.mark.slow] * (line in AT_NIGHT)) for line in TABLE]


@pytest.mark.parametrize("line", ROWS)
@pytest.mark.few(1)
def test_a_line_means_the_same(both, tmp_path, line):
    said, ours, theirs = TABLE[line]
    program = script(tmp_path, PROGRAM.replace("SAYS", SAYS))
    words = [program if word == "P" else word for word in line.split()]

    sides = both(words)

    assert [side.process.returncode for side in sides] == [ours, theirs]
    assert sides[0].written() == sides[1].written()
    if said is not None:
        assert sides[0].written()[0] == said


def test_the_exit_code_of_a_worker_is_that_of_the_job(both, tmp_path):
    """On purpose: torchrun has 1 for every failure."""
    sides = both([script(tmp_path, PROGRAM.replace("SAYS", SAYS))], env={"CODE": "42"})

    assert [side.process.returncode for side in sides] == [42, 1]


def test_workers_are_bound_without_gpus_too(both, tmp_path):
    """On purpose: torchrun needs a GPU for each worker, and numactl."""
    program = script(tmp_path, PROGRAM.replace("SAYS", SAYS))
    sides = both(["--numa-binding=core-complex", program])

    assert [side.process.returncode for side in sides] == [0, 1]


def test_another_interpreter_runs_the_script(both, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@" > said-$RANK\n')
    python.chmod(0o755)

    for name in ("msrun", "torchrun"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").touch()

    sides = both(["train.py", "--lr", "1"], env={"PYTHON_EXEC": str(python)})

    assert [side.written() for side in sides] == [["-u train.py --lr 1\n"]] * 2
