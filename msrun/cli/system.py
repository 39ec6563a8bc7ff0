"""The operating system, network, clock and jobs as verbs see them; tests pass a fake."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from msrun.backend import Launcher
    from msrun.fleet import FleetLauncher
    from msrun.job import JobSpec
    from msrun.processes.control_client import ControlClient
    from msrun.processes.control_file import Card
    from msrun.topology import Machine


class System(Protocol):
    """Everything a verb asks of the outside, besides the files that its words name."""

    def environment(self) -> Mapping[str, str]:
        """Return the variables that may hold options."""

    def read_machine(self, env: Mapping[str, str]) -> Machine:
        """Return what this node offers to workers with `env` on top of our environment."""

    def cpu_neighbours(self, share: str) -> Mapping[int, tuple[int, ...]]:
        """Return CPU -> CPUs of its `socket` or `core-complex`; none where nobody knows."""

    def count_devices(self, kind: str) -> int | None:
        """Return how many devices of a kind torch finds; None when it does not know the kind."""

    def load_launcher(self, name: str) -> Launcher:
        """Return the backend `name`; raises UsageError when there is none."""

    def open_fleet(self, name: str, texts: Mapping[str, str]) -> FleetLauncher:
        """Return the backend `name` that starts agents on other nodes, with its options."""

    def call_elsewhere(
        self, launcher: str, verb: str, words: Sequence[str], options: Mapping[str, str]
    ) -> int:
        """Carry out a verb where `launcher` runs the job, and return its exit code."""

    def token(self) -> str:
        """Return six hex digits that make a job id unique."""

    def resolve(self, host: str) -> tuple[str, ...]:
        """Return the numeric addresses of `host`, IPv4 first; none when it is unknown."""

    def is_own(self, address: str) -> bool:
        """Tell whether the numeric `address` is one of this machine's."""

    def address_to(self, address: str) -> str | None:
        """Return our address on the way to the numeric `address`, None when there is no way."""

    def own_addresses(self) -> tuple[str, ...]:
        """Return the addresses by which other machines may reach this one."""

    def reaches(self, address: str, port: int) -> bool:
        """Tell whether somebody listens on `port` of the numeric `address`."""

    def port_problem(self, host: str, port: int) -> str | None:
        """Return why nobody can listen on `port` of this machine, None when one can."""

    def device_addresses(self, numbers: Sequence[int]) -> Mapping[int, str]:
        """Return the addresses that Ascend devices of these physical numbers have of their own."""

    def is_terminal(self) -> bool:
        """Tell whether a person reads stdout."""

    def jobs(self) -> list[Card]:
        """Return this user's jobs on this machine, one for each launcher."""

    def clean(self) -> list[str]:
        """Remove what killed launchers of this user have left; return the names of their jobs."""

    def has_node(self, job: JobSpec) -> bool:
        """Tell whether another launcher of `job` runs on this machine."""

    def is_beside(self, job: JobSpec) -> bool:
        """Tell whether any node of a job of this name is on this machine."""

    def connect(self, card: Card, patience: float) -> ControlClient:
        """Return a connection to a job, whose answers may take `patience` seconds."""

    def now(self) -> float:
        """Return seconds of the monotonic clock."""

    def pause(self, seconds: float) -> None:
        """Let time pass."""


class RealSystem:
    """This machine and the processes on it.

    Each method imports what it needs, so that `--help` and `plan` load no more than they use.
    """

    def environment(self) -> Mapping[str, str]:
        """Return the variables that may hold options."""
        from msrun import environ
        from msrun.identity import step_options

        env = environ.options_environment()
        return {**step_options(env), **env}

    def read_machine(self, env: Mapping[str, str]) -> Machine:
        """Return what this node offers to workers with `env` on top of our environment."""
        from msrun import environ
        from msrun.supervise.machine import read_machine

        return read_machine({**environ.current(), **env})

    def cpu_neighbours(self, share: str) -> Mapping[int, tuple[int, ...]]:
        """Read sysfs."""
        from msrun.supervise.machine import read_neighbours

        return read_neighbours(os.sched_getaffinity(0), share=share)

    def count_devices(self, kind: str) -> int | None:
        """Ask a short-lived process, since torch is slow to load and may open the devices."""
        from msrun import environ
        from msrun.processes import accelerators

        return accelerators.count(kind, environ.current())

    def load_launcher(self, name: str) -> Launcher:
        """Return the backend `name`."""
        from msrun import backend

        return backend.load(name)

    def open_fleet(self, name: str, texts: Mapping[str, str]) -> FleetLauncher:
        """Return the backend `name` that starts agents on other nodes, with its options."""
        from msrun import backend

        return backend.open_fleet(name, texts)

    def call_elsewhere(
        self, launcher: str, verb: str, words: Sequence[str], options: Mapping[str, str]
    ) -> int:
        """Have the backend do it."""
        from msrun import backend

        return backend.call_elsewhere(launcher, verb, words, options)

    def token(self) -> str:
        """Return six hex digits."""
        return os.urandom(3).hex()

    def resolve(self, host: str) -> tuple[str, ...]:
        """Ask the name resolver."""
        from msrun.supervise import network

        return network.resolve(host)

    def is_own(self, address: str) -> bool:
        """Ask the kernel."""
        from msrun.supervise import network

        return network.is_own(address)

    def address_to(self, address: str) -> str | None:
        """Ask the kernel's routes; nothing is sent."""
        from msrun.supervise import network

        return network.address_to(address)

    def own_addresses(self) -> tuple[str, ...]:
        """Return the addresses of all interfaces but loopback."""
        from msrun.supervise import network

        return network.own_addresses()

    def reaches(self, address: str, port: int) -> bool:
        """Connect, and say nothing."""
        from msrun.supervise import network

        return network.reaches(address, port)

    def port_problem(self, host: str, port: int) -> str | None:
        """Try to have `port` for a moment; say who has it when that does not work."""
        name = "127.0.0.1" if host == socket.gethostname() else host
        endpoints = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        codes = [_bind(family, address) for family, _, _, _, address in endpoints]
        if errno.EADDRINUSE in codes:
            return f"is in use{_holder(port)}"
        if errno.EACCES in codes:
            return "may not be used by this user (choose 1024 to 65535)"
        if all(codes):
            return f"of {name} cannot be used: {os.strerror(codes[0])}"
        return None

    def device_addresses(self, numbers: Sequence[int]) -> Mapping[int, str]:
        """Read /etc/hccn.conf, else ask hccn_tool."""
        from pathlib import Path

        from msrun.supervise.hccn import ask_hccn_tool, read_device_ips

        return read_device_ips(Path("/"), numbers, ask_hccn_tool)

    def is_terminal(self) -> bool:
        """Tell whether a person reads stdout."""
        import sys

        return sys.stdout.isatty()

    def jobs(self) -> list[Card]:
        """Look into the private directories."""
        from msrun.processes import control_file

        return control_file.jobs()

    def clean(self) -> list[str]:
        """Remove private directories whose lock nobody holds."""
        from msrun.processes import run_dir

        return run_dir.clean()

    def has_node(self, job: JobSpec) -> bool:
        """Look into the private directories."""
        from msrun.processes import control_file

        return control_file.has_node(job)

    def is_beside(self, job: JobSpec) -> bool:
        """Look into the private directories."""
        from msrun.processes import control_file

        return control_file.is_beside(job)

    def connect(self, card: Card, patience: float) -> ControlClient:
        """Connect to the scheduler of `card`."""
        from msrun.processes.control_client import ControlClient

        return ControlClient(card, patience)

    def now(self) -> float:
        """Read the clock."""
        from msrun.transport.loop import Loop

        return Loop.now()

    def pause(self, seconds: float) -> None:
        """Wait."""
        from msrun.transport.loop import pause

        pause(seconds)


def _bind(family: int, address: tuple[object, ...]) -> int:
    """Return the error number of taking `address` for a moment, 0 when that works."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # Connections that linger from an earlier job do not occupy the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0


def _holder(port: int) -> str:
    """Return ` by pid 42 (python)`, or nothing when this user cannot see who listens."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            is_listening = connection.status == psutil.CONN_LISTEN and connection.pid
            if is_listening and connection.laddr and connection.laddr.port == port:
                return f" by pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        pass
    return ""
