"""A real Slurm of one controller and some nodes, on this machine or on the hosts of a lab.

All files are in one directory.  All daemons run in the foreground as our children, on this
machine on ports that are free, without munge; cgroups and accounting stay untouched.
Needs root, as whom slurmd runs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ports import free_port

if TYPE_CHECKING:
    from hosts import Host

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol")
MISSING = next(
    (f"needs {name}" for name in PROGRAMS if not shutil.which(name, path="/usr/sbin:/usr/bin")),
    "",
)
_PATIENCE = 30.0

_CONFIG = """\
ClusterName=lab
SlurmctldHost={head.hostname}({head.address})
SlurmctldPort={head.port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdTimeout=300
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


class Place(NamedTuple):
    """Where a daemon runs.

    Attributes:
        name: What Slurm calls it.
        hostname: What the machine calls itself.
        address: IPv4 address.
        port: Where the daemon listens.
        enter: Words before a command that run it there.
    """

    name: str
    hostname: str
    address: str
    port: int
    enter: Sequence[str] = ()


def cluster(folder: Path, nodes: int = 1) -> contextlib.AbstractContextManager[dict[str, str]]:
    """Run Slurm on this machine; as `run`."""
    host = socket.gethostname().partition(".")[0]
    names = ("controller", *(f"n{i}" for i in range(nodes)))
    return run(folder, *(Place(name, host, "127.0.0.1", free_port()) for name in names))


def cluster_on(folder: Path, *hosts: Host) -> contextlib.AbstractContextManager[dict[str, str]]:
    """Run Slurm on hosts of a lab, whose first has the controller; as `run`."""
    return run(
        folder, *(Place(h.name, h.name, h.ipv4, 6817, h.enter(folder.parent)) for h in hosts)
    )


@contextlib.contextmanager
def run(folder: Path, head: Place, *nodes: Place) -> Iterator[dict[str, str]]:
    """Run the controller on `head` and a daemon for each of `nodes`, with all files in `folder`.

    Yields:
        The variables by which clients find it.
    """
    folder.mkdir()
    config = folder / "slurm.conf"
    config.write_text(_config(folder, head, nodes))
    # What the hosts of a lab have of cgroups is none, which version 1 is content with.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    env = {**os.environ, "SLURM_CONF": str(config)}
    daemons = [_start(folder, env, head, "slurmctld", "-D", "-i", "-f", str(config))]
    try:
        daemons += (
            _start(folder, env, node, "slurmd", "-D", "-N", node.name, "-f", str(config))
            for node in nodes
        )
        _await_nodes(env, head, len(nodes), daemons, folder)
        yield {"SLURM_CONF": str(config)}
    finally:
        for daemon in reversed(daemons):
            _stop(daemon)
        _kill_left_over(folder)


def _config(folder: Path, head: Place, nodes: Sequence[Place]) -> str:
    (folder / "state").mkdir()
    lines = []
    for node in nodes:
        (folder / f"tmp.{node.name}").mkdir()
        where = f"NodeHostname={node.hostname} NodeAddr={node.address} Port={node.port}"
        lines.append(f"NodeName={node.name} {where} CPUs=2 State=UNKNOWN")
    return _CONFIG.format(head=head, folder=folder, nodes="\n".join(lines))


def _start(
    folder: Path, env: dict[str, str], place: Place, program: str, *words: str
) -> subprocess.Popen[bytes]:
    with (folder / f"{program}.out").open("ab") as out:
        return subprocess.Popen(
            [*place.enter, f"/usr/sbin/{program}", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=env,
            start_new_session=True,
        )


def _await_nodes(
    env: dict[str, str],
    head: Place,
    nodes: int,
    daemons: list[subprocess.Popen[bytes]],
    folder: Path,
) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        command = [*head.enter, "sinfo", "-h", "-t", "idle", "-o", "%D"]
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
