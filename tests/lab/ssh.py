"""A real ssh server for tests, without a daemon and without a port.

The client starts it for each connection, as inetd would, and both talk through pipes.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SSHD = "/usr/sbin/sshd"
MISSING = "needs sshd and ssh" if not Path(SSHD).exists() or not shutil.which("ssh") else ""

_SERVER = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PidFile none
"""
_CLIENT = """\
Host nowhere
  ProxyCommand false
Host *
  ProxyCommand {sshd} -i -f {folder}/sshd_config -E {folder}/sshd.log
  IdentityFile {folder}/key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


def write_config(folder: Path) -> Path:
    """Make keys and configurations in `folder` and return the client's."""
    folder.mkdir()
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd locks itself in until somebody logs in
    for name in ("host_key", "key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name],
            check=True,
            timeout=30,
        )
    (folder / "sshd_config").write_text(_SERVER.format(folder=folder))
    client = folder / "config"
    client.write_text(_CLIENT.format(folder=folder, sshd=SSHD))
    return client
