"""The cases of torch's own test of torchrun, each under both commands: one table of verdicts.

They are those of `test/distributed/launcher/test_run.py` in torch 2.13, in its order, told anew.
Where the two commands differ it is on purpose, and the migration page says why.

Left out is what mocks torch's own functions: devices that are not there (for msrun
`tests/unit/processes/test_accelerators.py`, `tests/cli/test_command_lines.py` and
`tests/unit/test_environ.py`, for `--virtual-local-rank`), an agent that raises
(`tests/cli/test_main.py`), and a rendezvous that is shut down: here, as in every test of a job,
nothing of one may be left.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from ports import free_port
from support import script

pytestmark = [pytest.mark.torch, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(200)]

# Every variable that torch's own script reads, and a sentinel of the launcher's environment.
PYTHON = """
    import os, sys
    names = "LOCAL_RANK RANK GROUP_RANK ROLE_RANK ROLE_NAME LOCAL_WORLD_SIZE WORLD_SIZE "
    names += "ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS SENTINEL "
    names += "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID "
    names += "TORCHELASTIC_ERROR_FILE"
    found = {name: os.environ[name] for name in names.split()}
    if "--fail" in sys.argv:
        raise RuntimeError("asked to fail")
    with open(f"said-{found['RANK']}", "w") as file:
        said = "LOCAL_RANK ROLE_RANK ROLE_NAME LOCAL_WORLD_SIZE WORLD_SIZE SENTINEL"
        file.write(" ".join(found[name] for name in said.split()))
"""
SHELL = '#!/bin/sh\necho "creating said-$RANK"\necho "$RANK $WORLD_SIZE" > "said-$RANK"\n'
LAUNCHED = """
    import torch.distributed as dist
    open("said-0", "w").write(str(dist.is_torchelastic_launched()))
"""
MEETS = """
    import os, sys
    import torch, torch.distributed as dist
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=sys.argv[1], world_size=size, rank=rank)
    one_hot = torch.nn.functional.one_hot(torch.tensor(rank), num_classes=size)
    dist.all_reduce(one_hot)
    open(f"said-{rank}", "w").write(str(one_hot.sum().item()))
"""
PROGRAMS = {"PYTHON": PYTHON, "LAUNCHED": LAUNCHED, "MEETS": MEETS}
ELASTIC = "--nnodes=1:2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=localhost:PORT"


@dataclass(frozen=True)
class Verdict:
    """What becomes of a line.

    Args:
        line: The words.
        workers: How many ran, under both commands; None for the CPUs of this machine.
        ours: Exit code of msrun.
        theirs: Exit code of torchrun.
        env: Variables of both.
        out: What stdout has, with N for each rank.
        nodes: How many start the line at once.
    """

    line: str
    workers: int | None = 4
    ours: int = 0
    theirs: int = 0
    env: dict[str, str] = field(default_factory=dict)
    out: str = ""
    nodes: int = 1


REFUSED = {"workers": 0, "ours": 2, "theirs": 1}
PET = {
    "PET_NNODES": "1",
    "PET_NPROC_PER_NODE": "4",
    "PET_RDZV_ID": "71",
    "PET_MONITOR_INTERVAL": "1",
    "PET_START_METHOD": "spawn",
    "PET_NO_PYTHON": "1",
}
ALONE = "--nnodes=1 --rdzv-id=71 --monitor-interval=1 --start-method=spawn"
TEMPLATE = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]: "}
TABLE = {
    "user_script_python": Verdict(f"{ALONE} --nproc-per-node=4 PYTHON"),
    "user_script_python_caffe2_bc": Verdict(
        "--nnodes=1 --nproc-per-node=4 --monitor-interval=1 --start-method=spawn "
        "--master-addr=localhost --master-port=PORT --node-rank=0 PYTHON"
    ),
    "user_script_bash": Verdict(f"{ALONE} --nproc-per-node=4 --no-python SHELL"),
    "user_script_bash, as a module": Verdict(f"{ALONE} --no-python --module SHELL", **REFUSED),
    "user_script_default_nproc": Verdict(f"{ALONE} --no-python SHELL", 1),
    "with_env_vars": Verdict("SHELL", env={**PET, "PET_MODULE": "0"}),
    "with_env_vars, as a module": Verdict("SHELL", env={**PET, "PET_MODULE": "1"}, **REFUSED),
    "nproc_auto": Verdict(f"{ALONE} --nproc-per-node=auto --no-python SHELL", None),
    "nproc_number": Verdict(f"{ALONE} --nproc-per-node=4 --no-python SHELL"),
    "nproc_unknown": Verdict(f"{ALONE} --nproc-per-node=unknown --no-python SHELL", **REFUSED),
    # The quotation marks are torch's own: no shell has taken them away.
    "elastic": Verdict(
        f"{ELASTIC} --rdzv-conf='join_timeout=5,last_call_timeout=1,timeout=5' --rdzv-id=71 "
        "--monitor-interval=1 --start-method=spawn PYTHON"
    ),
    "elastic_worker_raise_exception": Verdict(
        f"{ELASTIC} --rdzv-conf='join_timeout=5,last_call_timeout=1,timeout=5' --rdzv-id=71 "
        "--max-restarts=0 --start-method=spawn PYTHON --fail",
        *(0, 1, 1),
    ),
    "standalone": Verdict(
        "--nnodes=1 --nproc-per-node=4 --standalone --monitor-interval=1 --start-method=spawn "
        "PYTHON"
    ),
    "run_path": Verdict("--run-path --nnodes=1 --nproc-per-node=4 --start-method=spawn PYTHON"),
    "elastic_multiple_agents": Verdict(
        f"{ELASTIC} --rdzv_conf=timeout=5 --rdzv-id=71 --start-method=spawn PYTHON", 8, nodes=2
    ),
    "min_max_nodes_parse": Verdict("--nnodes=2:20:30 PYTHON", **REFUSED),
    "is_torchelastic_launched": Verdict("--run-path --nproc-per-node=1 LAUNCHED", 1),
    "logs_spec_defined": Verdict("--run-path --nproc-per-node=1 --logs_specs=default LAUNCHED", 1),
    "logs_spec_entrypoint_must_be_defined": Verdict(
        "--run-path --nproc-per-node=1 --logs_specs=DOESNOT_EXIST LAUNCHED", **REFUSED
    ),
    "init_method_tcp": Verdict(
        "--run-path --nnodes=1 --nproc-per-node=4 --master-addr=localhost --master-port=PORT "
        "MEETS tcp://localhost:PORT"
    ),
    "init_method_env": Verdict(
        "--run-path --nnodes=1 --nproc-per-node=4 --master-addr=localhost --master-port=PORT "
        "MEETS env://"
    ),
    "capture_logs_using_default_logs_specs": Verdict(
        f"{ALONE} --nproc-per-node=4 --redirect=3 --tee=3 --no-python SHELL",
        env=TEMPLATE,
        out="[rankN]: creating said-N\n",
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_a_case_of_torchs_own_test(launch, tmp_path, case):
    verdict = TABLE[case]
    names = {"SHELL": str(tmp_path / "program.sh")}
    for name, text in PROGRAMS.items():
        names[name] = script(tmp_path, text, f"{name.lower()}.py")
    (tmp_path / "program.sh").write_text(SHELL)
    (tmp_path / "program.sh").chmod(0o755)
    written = []
    for command, code in (("msrun", verdict.ours), ("torchrun", verdict.theirs)):
        port = str(free_port())
        words = [names.get(w, w.replace("PORT", port)) for w in verdict.line.split()]
        env = verdict.env | {"SENTINEL": "FOOBAR"}
        sides = [launch(command, words, env=env) for _ in range(verdict.nodes)]

        assert [side.wait() for side in sides] == [code] * verdict.nodes
        written.append(sides[0].written())
        expected = verdict.out and [verdict.out.replace("N", str(n)) for n in range(4)]
        assert [text for text in expected if text not in sides[0].out] == []
        if command == "msrun" and code == verdict.ours == 2:
            assert sides[0].err.startswith("error: ")
            assert "Traceback" not in sides[0].err

    ours, theirs = written
    assert ours == theirs
    assert verdict.workers in (None, len(ours))
