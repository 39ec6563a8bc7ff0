"""A real Slurm of one controller and some nodes on this machine, in one directory.

All daemons run in the foreground as our children, on ports that the kernel chose, without
munge; cgroups and accounting stay untouched.  Needs root, as whom slurmd runs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol")
MISSING = next(
    (f"needs {name}" for name in PROGRAMS if not shutil.which(name, path="/usr/sbin:/usr/bin")),
    "",
)
_PATIENCE = 30.0

_CONFIG = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def cluster(folder: Path, nodes: int = 1) -> Iterator[dict[str, str]]:
    """Run Slurm in `folder` and yield the variables by which clients find it."""
    folder.mkdir()
    config = folder / "slurm.conf"
    config.write_text(_config(folder, nodes))
    env = {**os.environ, "SLURM_CONF": str(config)}
    daemons = [_start(folder, env, "slurmctld", "-D", "-i", "-f", str(config))]
    try:
        daemons += (
            _start(folder, env, "slurmd", "-D", "-N", f"n{i}", "-f", str(config))
            for i in range(nodes)
        )
        _await_nodes(env, nodes, daemons, folder)
        yield {"SLURM_CONF": str(config)}
    finally:
        for daemon in reversed(daemons):
            _stop(daemon)
        _kill_left_over(folder)


def _config(folder: Path, nodes: int) -> str:
    host = socket.gethostname().partition(".")[0]
    controller, *ports = _free_ports(nodes + 1)
    for name in ("state", *(f"tmp.n{i}" for i in range(nodes))):
        (folder / name).mkdir()
    lines = [
        f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN"
        for i, port in enumerate(ports)
    ]
    return _CONFIG.format(host=host, port=controller, folder=folder, nodes="\n".join(lines))


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _start(folder: Path, env: dict[str, str], program: str, *words: str) -> subprocess.Popen[bytes]:
    with (folder / f"{program}.out").open("ab") as out:
        return subprocess.Popen(
            [f"/usr/sbin/{program}", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=env,
            start_new_session=True,
        )


def _await_nodes(
    env: dict[str, str], nodes: int, daemons: list[subprocess.Popen[bytes]], folder: Path
) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        command = ["sinfo", "-h", "-t", "idle", "-o", "%D"]
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, timeout=30, check=False
        )
        if done.stdout.split() == [str(nodes)]:
            return
        if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in daemons):
            logs = [path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log")]
            raise RuntimeError("Slurm did not come up\n" + "\n".join(logs))
        time.sleep(0.1)


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _kill_left_over(folder: Path) -> None:
    """End slurmstepd, which outlives slurmd by design, where it is ours."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                is_step = (entry / "comm").read_text().startswith("slurmstepd")
                if is_step and str(folder).encode() in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
