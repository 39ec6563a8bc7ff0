"""`python -P -m launchers.remote`: the first program of ours on a node that a launcher reaches.

It takes its order, either from the environment or from two lines on standard input, checks
that this node is like the launcher's, and runs msrun as told.  The agent ends with the
launcher: when standard input ends, or else when the process that started this one ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

from msgspec.structs import replace

from msrun import environ
from msrun.errors import ExitCode, UsageError
from msrun.fleet import (
    ORDER_BYTES_MAX,
    NodeInstructions,
    Report,
    agent_words,
    parse_order,
    render_report,
)
from msrun.identity import find_master, read_identity
from msrun.supervise import network
from msrun.supervise.process import die_with_parent
from msrun.units import shown
from msrun.version import __version__

_SECRET_CHARS_MAX = 256
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent of this node and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except UsageError as error:
        print(_complaint(error), file=sys.stderr, flush=True)  # noqa: T201 - there is no console yet
        return error.exit_code


def _complaint(error: UsageError) -> str:
    return f"error: node {socket.gethostname()}: {error.render().removeprefix('error: ')}"


def _run(words: Sequence[str]) -> int:
    secret, text = environ.take_order()
    launcher = os.pidfd_open(os.getppid())
    if not text:
        launcher = sys.stdin.fileno()
        secret, text = _read_line(_SECRET_CHARS_MAX), _read_line(ORDER_BYTES_MAX)
    order = parse_order(text)
    try:
        node_rank, order = _prepare(words, order)
    except UsageError as error:
        reason = _complaint(error)
        _report(Report(node=-1, code=error.exit_code, is_last=True, reason=reason))
        return error.exit_code
    has_scheduler = order.nnodes == 1 or _is_here(order.master_addr)
    own = order.own_env[node_rank] if order.own_env else {}
    env = {**environ.without_options(), **order.env, **own}
    _report(Report(node=node_rank))
    command = [sys.executable, "-P", "-m", "msrun", *agent_words(order, node_rank, hold(secret))]
    start = functools.partial(die_with_parent, os.getpid(), signal.SIGTERM)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env=env,
        preexec_fn=start,  # noqa: PLW1509 - this process has one thread
    ) as agent:
        code = _wait(agent, launcher)
    _report(Report(node=node_rank, code=code, is_last=has_scheduler))
    return 0 if order.hides_code else code


def _prepare(words: Sequence[str], order: NodeInstructions) -> tuple[int, NodeInstructions]:
    """Return this node's rank, and `order` as it is here, in whose directory we are then."""
    check_versions(order.versions, read_versions(order.versions))
    node_rank, order = _place(words, order)
    try:
        os.chdir(order.cwd)
    except OSError as error:
        raise UsageError(f"directory {shown(order.cwd)}: {error.strerror}") from None
    table = order.env.get(environ.RANK_TABLE_FILE)
    if table and not os.access(table, os.R_OK):
        msg = f"rank table {shown(table)} cannot be read here"
        raise UsageError(msg, hint="it must be at the same path on every node")
    return node_rank, order


def _report(report: Report) -> None:
    """Tell the launcher, in one write so that nothing comes between; it may be gone."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), render_report(report))


def _place(words: Sequence[str], order: NodeInstructions) -> tuple[int, NodeInstructions]:
    """Return this node's rank, and `order` with the scheduler's address."""
    if words:
        return _node_rank(words), order
    env = environ.current()
    identity = read_identity(env)
    if identity.world_size != order.nnodes:
        count = f"{identity.source} started {identity.world_size} agents"
        raise UsageError(f"{count} for {order.nnodes} nodes")
    if order.hosts:
        return find_host(order.hosts, identity.rank, socket.gethostname(), _is_here), order
    if order.nnodes > 1 and not order.master_addr:
        host, port = find_master(env, identity)
        order = replace(order, master_addr=host, master_port=order.master_port or port)
    return identity.rank, order


def find_host(hosts: Sequence[str], guess: int, own: str, is_here: Callable[[str], bool]) -> int:
    """Return which of `hosts` this node is.

    Args:
        hosts: Names or addresses.
        guess: Which one it would be if the launcher had kept their order.
        own: This node's own name.
        is_here: Tells whether a name is this node, which may take its time.

    Raises:
        UsageError: It is none of them.
    """
    short = own.partition(".")[0]
    alike = [i for i, host in enumerate(hosts) if host == own or host.partition(".")[0] == short]
    if len(alike) == 1:
        return alike[0]
    candidates: list[int] = [guess, *alike, *range(len(hosts))]
    for number in candidates:
        if number < len(hosts) and is_here(hosts[number]):
            return number
    shown_hosts = shown(", ".join(hosts))
    raise UsageError(f"it is none of the hosts {shown_hosts}", hint="name it as its hostname says")


def _is_here(host: str) -> bool:
    return any(network.is_own(address) for address in network.resolve(host))


def _node_rank(words: Sequence[str]) -> int:
    match list(words):
        case ["--node-rank", number] if number.isdecimal():
            return int(number)
    raise UsageError(f"{shown(' '.join(words))} is not understood (choose --node-rank N)")


def read_versions(names: Mapping[str, str]) -> dict[str, str]:
    """Return the versions that this node has of the programs in `names`."""
    own = {"msrun": __version__, "python": platform.python_version()}
    return {name: own.get(name) or _installed(name) for name in names}


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def check_versions(wanted: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Refuse a node on which a program is not the launcher's.

    Raises:
        UsageError: A version differs.
    """
    for name, version in wanted.items():
        if found[name] != version:
            msg = f"{name} is {shown(found[name])} here and {shown(version)} at the launcher"
            raise UsageError(msg, hint=f"this node runs {sys.executable}")


def _read_line(most: int) -> str:
    line = sys.stdin.buffer.readline(most + 1)
    if not line.endswith(b"\n"):
        raise UsageError("standard input has no order of a launcher")
    return line.decode(errors="replace").strip()


def hold(secret: str) -> str:
    """Return the name of a private file with `secret` that lives as long as this process."""
    # In memory alone: an mpirun that stops a job kills this process before it can remove a file.
    descriptor = os.memfd_create("msrun-secret")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, secret.encode())
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _wait(agent: subprocess.Popen[bytes], launcher: int) -> int:
    """Return the agent's exit code; end it when the launcher, or what it writes, has ended."""
    for signum in _FORWARDED:
        signal.signal(signum, lambda signum, _: agent.send_signal(signum))
    end = os.pidfd_open(agent.pid)
    ready, _, _ = select.select([end, launcher], [], [])
    if end not in ready:
        agent.send_signal(signal.SIGTERM)
    code = agent.wait()
    # What an agent was killed by is its node's affair: to the job, the node is lost.
    return ExitCode.NODE_LOST if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
