"""A real ssh server for tests, without a daemon and without a port.

The client starts it for each connection, as inetd would, and both talk through pipes.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
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
  ProxyCommand {start}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


def write_config(folder: Path, into: Mapping[str, Sequence[str]] | None = None) -> Path:
    """Make keys and configurations in `folder` and return the client's.

    Args:
        folder: Where; it is made.
        into: Host of a lab -> the words that run a command there.
    """
    folder.mkdir()
    for name in ("host_key", "key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name],
            check=True,
            timeout=30,
        )
    (folder / "sshd_config").write_text(_SERVER.format(folder=folder))
    # Where sshd locks itself in until somebody logs in.
    start = f"mkdir -p /run/sshd && exec {SSHD} -i -f {folder}/sshd_config -E {folder}/sshd.log"
    lab = [
        f"Host {name}\n  ProxyCommand {shlex.join([*words, 'sh', '-c', start])}\n"
        for name, words in (into or {}).items()
    ]
    here = shlex.join(["sh", "-c", start])
    client = folder / "config"
    client.write_text("".join(lab) + _CLIENT.format(folder=folder, start=here))
    return client
