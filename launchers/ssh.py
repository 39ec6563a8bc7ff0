"""ssh: one agent on each host of a list, started at the same time from this machine.

The order and the secret go to standard input, so that no process list, shell history or
log has them, and the end of this process is the end of every agent: their input ends.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from msrun.errors import UsageError
from msrun.fleet import (
    Fleet,
    FleetPlan,
    StartCommand,
    check_options,
    make_order,
    order_of_node,
    render_order,
)
from msrun.hosts.hostlist import Host
from msrun.processes.fleet import run_fleet

# No question may wait for an answer, and a host that is silent for 15 s is gone.
_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": "15",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    "ForwardX11": "no",
    "ClearAllForwardings": "yes",
}


def open_launcher(options: Mapping[str, str]) -> SshLauncher:
    """Return the backend; `options` may have `ssh`, the client and its own options.

    Raises:
        UsageError: There is another option.
    """
    check_options("ssh", options, ("ssh",))
    return SshLauncher(tuple(shlex.split(options.get("ssh", "ssh"))))


class SshLauncher:
    """Starts agents over ssh and returns what they agree on.

    Args:
        client: ssh and options that go before ours.
    """

    def __init__(self, client: tuple[str, ...] = ("ssh",)) -> None:
        self._client = client

    def plan(self, fleet: Fleet) -> FleetPlan:
        """Return what `submit` would do.

        Raises:
            UsageError: There are no hosts.
        """
        if not fleet.hosts:
            raise UsageError("--launcher ssh needs the hosts", hint="give --hostfile FILE")
        order = make_order(fleet)
        return FleetPlan(
            fleet=fleet,
            commands=tuple(
                StartCommand(
                    node=host.name,
                    argv=(*self._client, *_words(fleet, host, node_rank)),
                    order=render_order(order_of_node(order, node_rank)),
                )
                for node_rank, host in enumerate(fleet.hosts)
            ),
        )

    def submit(self, plan: FleetPlan, secret: bytes) -> int:
        """Run the agents to their end and return the job's exit code."""
        return run_fleet(plan.commands, secret)


def _words(fleet: Fleet, host: Host, node_rank: int) -> tuple[str, ...]:
    options = [word for key, value in _OPTIONS.items() for word in ("-o", f"{key}={value}")]
    port = ["-p", str(host.port)] if host.port else []
    user = ["-l", host.user] if host.user else []
    # The other side is a shell, whichever; nothing but this line is for it to understand.
    agent = [fleet.python, "-P", "-m", "launchers.remote", "--node-rank", str(node_rank)]
    line = f"exec {shlex.join(agent)}"
    return ("-T", "-e", "none", *options, *port, *user, "--", host.name, line)
