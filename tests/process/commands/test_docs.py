"""Every command of docs/backends.md does what it is shown for, where its programs are."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import slurm

from ranktable import Inventory, InventoryDevice, build_table, render_table

pytestmark = pytest.mark.process

HOME = Path(__file__).parents[3]
PAGE = (HOME / "docs/backends.md").read_text()
PROGRAM = r"(?:msrun|mpirun|srun|RANK_TABLE_FILE=\S+ RANK_ID=\S+ python) "
INLINE = re.compile(rf"`({PROGRAM}[^`]+)`")
BLOCK = re.compile(rf"^    ({PROGRAM}.*)$", re.MULTILINE)
COMMANDS = [text for text in BLOCK.findall(PAGE) + INLINE.findall(PAGE) if text != "msrun plan"]
TABLES = [text for text in COMMANDS if text.startswith("msrun ranktable") and "--job" not in text]
OF_A_JOB = [text for text in COMMANDS if text.startswith("msrun ranktable") and "--job" in text]
JOBS = [text for text in COMMANDS if text.startswith("msrun -")]
RANKS = [text for text in COMMANDS if text.startswith(("mpirun", "srun", "RANK_TABLE_FILE"))]
WHO = """
import os
from msrun.identity import read_identity
who = read_identity(os.environ)
os.write(1, f"rank {who.rank} of {who.world_size}\\n".encode())
"""
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def run(folder, command, **variables):
    """Run `command` in a shell, with our msrun and Python first on PATH."""
    return subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith(("MSRUN_", "PET_"))},
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(HOME),
            "PYTHON": sys.executable,
            "XDG_RUNTIME_DIR": str(folder / "run"),
            **variables,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.fixture
def folder(tmp_path):
    """A directory with all files that the page names."""
    for name in ("bin", "run"):
        (tmp_path / name).mkdir(mode=0o700)
    for name, words in {"python": "", "msrun": "-m msrun"}.items():
        (tmp_path / "bin" / name).write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n'
        )
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "scripts").symlink_to(HOME / "scripts")
    (tmp_path / "train.py").write_text(WHO)
    (tmp_path / "hosts").write_text("node0 slots=2\nnode1 slots=2\n")
    here = os.uname().nodename
    for i, (name, host) in enumerate({"hccl": here, "t": here, "a": "a", "b": "b"}.items()):
        devices = [
            InventoryDevice(device_id=n, device_ip=f"192.1.{i}.{n + 1}", super_device_id=8 * i + n)
            for n in range(8)
        ]
        server = Inventory(server_id=host, devices=tuple(devices))
        (tmp_path / f"{name}.json").write_text(render_table(build_table([server])))
    return tmp_path


def test_all_kinds_of_commands_are_found():
    kinds = (TABLES, OF_A_JOB, JOBS, RANKS)

    assert all(kinds)
    assert len(COMMANDS) == sum(map(len, kinds))


@pytest.mark.parametrize("command", TABLES)
def test_a_command_for_rank_tables(folder, command):
    step = {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_TASKS_PER_NODE": "2(x2)"}
    hosts = step if "--slurm" in command else {}

    done = run(folder, command, **hosts)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", OF_A_JOB)
def test_a_command_about_a_job(folder, command):
    words = shlex.split(command, comments=True)
    job = words[words.index("--job") + 1]

    done = run(folder, f"msrun --job-id {job} --tail all --no-python {command}")

    assert done.returncode == 0, done.stderr
    assert '"server_list"' in done.stdout


@pytest.mark.parametrize("command", JOBS)
def test_a_job_is_planned(folder, command):
    if "mpirun" in command and not shutil.which("mpirun"):
        pytest.skip("needs mpirun")
    done = run(folder, command.replace("msrun", "msrun plan", 1).replace("node0", "localhost"))

    assert done.returncode == 0, done.stderr


@pytest.mark.few(3)
@pytest.mark.parametrize("command", RANKS)
def test_ranks_that_others_start(folder, command):
    program = next(word for word in shlex.split(command) if "=" not in word)
    if program != "python" and not shutil.which(program):
        pytest.skip(f"needs {program}")
    if program != "srun":
        check(run(folder, command, **OPEN_MPI), command)
        return
    if os.geteuid() != 0 or slurm.MISSING:
        pytest.skip(slurm.MISSING or "needs root, as whom slurmd runs")
    with slurm.cluster(folder / "slurm") as env:
        check(run(folder, command, **env), command)


def check(done, command):
    """Each rank has said who it is; the agents of msrun keep that in their logs."""
    assert done.returncode == 0, done.stderr
    if "msrun train.py" in command:
        return
    count = re.search(r"-n (\d+)", command)
    size = int(count[1]) if count else 1
    expected = [f"rank {rank} of {size}" for rank in range(size)]
    if "RANK_ID" in command:
        expected = ["rank 3 of 8"]
    assert sorted(done.stdout.splitlines()) == sorted(expected)
