"""A real ssh server for tests, on this machine or on the hosts of a lab.

On this machine there is neither daemon nor port: the client starts the server for each
connection, as inetd would, and both talk through pipes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hosts import Host

SSHD = "/usr/sbin/sshd"
MISSING = "needs sshd and ssh" if not Path(SSHD).exists() or not shutil.which("ssh") else ""

_PATIENCE = 30.0
_SERVER = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PidFile none
"""
_CLIENT = """\
Host *
  IdentityFile {folder}/key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
_HERE = """\
Host nowhere
  ProxyCommand false
Host *
  ProxyCommand {start}
"""
# Where sshd locks itself in until somebody logs in.
_START = f"mkdir -p /run/sshd && exec {SSHD} -f {{folder}}/sshd_config -E {{folder}}/sshd.log"


def write_config(folder: Path) -> Path:
    """Make keys and configurations in `folder`, which is new, and return the client's."""
    start = shlex.join(["sh", "-c", f"{_START.format(folder=folder)} -i"])
    return _write(folder, _HERE.format(start=start))


def serve(folder: Path, *hosts: Host) -> dict[str, str]:
    """Run sshd on hosts of a lab, and return the variables with which `ssh` reaches them.

    Args:
        folder: Where all files are; it is made.
        hosts: Who is served; the servers end with them.
    """
    client = _write(folder)
    (folder / "bin").mkdir()
    program = folder / "bin/ssh"
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {client} "$@"\n')
    program.chmod(0o755)
    for host in hosts:
        host.popen(["sh", "-c", f"{_START.format(folder=folder)} -D"])
    deadline = time.monotonic() + _PATIENCE
    while not all(map(_listens, hosts)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"sshd did not come up\n{(folder / 'sshd.log').read_text()}")
        time.sleep(0.01)
    return {"PATH": f"{folder}/bin:{os.environ['PATH']}"}


def _write(folder: Path, more: str = "") -> Path:
    folder.mkdir()
    for name in ("host_key", "key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name],
            check=True,
            timeout=30,
        )
    (folder / "sshd_config").write_text(_SERVER.format(folder=folder))
    client = folder / "config"
    client.write_text(more + _CLIENT.format(folder=folder))
    return client


def _listens(host: Host) -> bool:
    """Whether something waits at port 22 of `host`, as the kernel lists it."""
    return ":0016 00000000:0000 0A" in Path(f"/proc/{host.pid}/net/tcp").read_text()
