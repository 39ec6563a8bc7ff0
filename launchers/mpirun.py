"""mpirun of Open MPI, MPICH or Intel MPI: one agent a node, and from there on our cluster.

None of them is trusted with the job's end: Open MPI 5 returns 0 when a node is lost, MPICH
kills the rest of a job without asking.  So the agents end with 0 and tell the code
themselves.  Order and secret are in their environment, which every mpirun hands on.
"""

from __future__ import annotations

import enum
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping

from msgspec.structs import replace

from msrun import environ
from msrun.errors import UsageError
from msrun.fleet import (
    VARIABLE_BYTES_MAX,
    Fleet,
    FleetPlan,
    StartCommand,
    check_options,
    make_order,
    render_order,
)
from msrun.hosts.hostlist import Host
from msrun.processes.fleet import run_fleet
from msrun.units import shown

_SECONDS = 30.0


class Flavour(enum.Enum):
    """Whose mpirun it is."""

    OPEN_MPI_4 = "Open MPI 4"
    OPEN_MPI_5 = "Open MPI 5"
    MPICH = "MPICH"
    INTEL = "Intel MPI"


_OPEN_MPI = re.compile(r"\((?:OpenRTE|Open MPI|PRRTE)\) ([0-9]+)\.")


def parse_flavour(printed: str, program: str) -> Flavour:
    """Return whose mpirun printed this for `--version`.

    Raises:
        UsageError: It is none that we know how to talk to.
    """
    if match := _OPEN_MPI.search(printed):
        return Flavour.OPEN_MPI_4 if int(match[1]) <= 4 else Flavour.OPEN_MPI_5  # noqa: PLR2004
    if "Intel(R) MPI Library" in printed:
        return Flavour.INTEL
    if "HYDRA build details" in printed:
        return Flavour.MPICH
    first = printed.strip().partition("\n")[0]
    choices = ", ".join(flavour.value for flavour in Flavour)
    raise UsageError(
        f"--mpirun {program} says {shown(first or 'nothing')} for --version, "
        f"which is none of {choices}"
    )


def ask_flavour(program: str) -> Flavour:
    """Return whose mpirun `program` is.

    Raises:
        UsageError: It cannot be run, or is none that we know.
    """
    if shutil.which(program) is None:
        raise UsageError(f"--mpirun {program} is not there", hint="give its path")
    try:
        done = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--mpirun {program} cannot be asked for its version: {error}") from None
    return parse_flavour(done.stdout.decode(errors="replace"), program)


def open_launcher(options: Mapping[str, str]) -> MpirunLauncher:
    """Return the backend for the mpirun that is there.

    Args:
        options: `mpirun`, its name or path, and `mpirun-args`, further words for it.

    Raises:
        UsageError: There is another option, or no mpirun that we know.
    """
    check_options("mpirun", options, ("mpirun", "mpirun-args"))
    program = options.get("mpirun", "mpirun")
    return MpirunLauncher(
        program,
        ask_flavour(program),
        options=tuple(shlex.split(options.get("mpirun-args", ""))),
        is_root=os.geteuid() == 0,
    )


class MpirunLauncher:
    """Starts one agent a node through mpirun.

    Args:
        program: Name or path of mpirun.
        flavour: Whose it is.
        options: Further words for mpirun.
        is_root: Whether root runs it, which Open MPI wants to be told.
    """

    def __init__(
        self,
        program: str,
        flavour: Flavour,
        *,
        options: tuple[str, ...] = (),
        is_root: bool = False,
    ) -> None:
        self._program = program
        self._flavour = flavour
        self._options = options
        self._is_root = is_root

    def plan(self, fleet: Fleet) -> FleetPlan:
        """Return what `submit` would do.

        Raises:
            UsageError: The order is too long for a variable, or hosts need what mpirun cannot do.
        """
        for host in fleet.hosts:
            _check_host(host)
        if fleet.ranks:
            return self._plan_ranks(fleet)
        order = replace(make_order(fleet), hides_code=True)
        env = {environ.ORDER: render_order(order)}
        names = ",".join(host.name for host in fleet.hosts)
        for what, text in (("words", env[environ.ORDER]), ("hosts", names)):
            if len(text) > VARIABLE_BYTES_MAX:
                raise UsageError(
                    f"the job's {what} are {len(text)} bytes (at most {VARIABLE_BYTES_MAX}) "
                    "for mpirun",
                    hint="use --launcher ssh",
                )
        if self._flavour is Flavour.INTEL:
            env["I_MPI_PIN"] = "0"  # The agent divides all CPUs of its node.
        number = ("-n", str(fleet.nnodes))
        agent = (fleet.python, "-P", "-m", "launchers.remote")
        argv = (self._program, *self._flags(names), *number, *self._options, *agent)
        command = StartCommand(node="", argv=argv, env=env, has_secret=True)
        return FleetPlan(fleet=fleet, commands=(command,))

    def _plan_ranks(self, fleet: Fleet) -> FleetPlan:
        for host in fleet.hosts:
            if host.devices is not None:
                raise UsageError(
                    f"devices of host {host.name} are chosen, and mpirun tells its ranks of none",
                    hint="leave --ranks-by mpi out, or name hosts alone",
                )
        names = ",".join(f"{host.name}:{host.slots or 1}" for host in fleet.hosts)
        flags: tuple[str, ...] = ("-hosts", names) if names else ()
        slots = {host.slots or 1 for host in fleet.hosts}
        if self._flavour is Flavour.INTEL and len(slots) == 1:
            # A host with a number is not known as this one, and is reached through ssh alone.
            flags = ("-hosts", ",".join(host.name for host in fleet.hosts), "-ppn", str(*slots))
        if self._flavour in (Flavour.OPEN_MPI_4, Flavour.OPEN_MPI_5):
            root = ("--allow-run-as-root",) if self._is_root else ()
            hosts = ("--host", names) if names else ()
            variables = (word for name in fleet.env for word in ("-x", name))
            flags = (*root, *hosts, "--bind-to", "none", *variables)
        argv = (self._program, *flags, "-n", str(fleet.ranks), *self._options, *fleet.words)
        note = (
            "--ranks-by mpi: mpirun starts and ends the ranks, and its exit code is the job's; "
            "nothing is restarted, watched or logged"
        )
        return FleetPlan(
            fleet=fleet,
            commands=(StartCommand(node="", argv=argv, env=fleet.env),),
            notes=(note,),
        )

    def submit(self, plan: FleetPlan, secret: bytes) -> int:
        """Run the agents to their end and return the job's exit code; ranks take our place."""
        if plan.fleet.ranks:
            (command,) = plan.commands
            os.execvpe(command.argv[0], command.argv, {**environ.without_options(), **command.env})  # noqa: S606 - there is no shell
        return run_fleet(plan.commands, secret)

    def _flags(self, names: str) -> tuple[str, ...]:
        if self._flavour in (Flavour.MPICH, Flavour.INTEL):
            return (*(("-hosts", names) if names else ()), "-ppn", "1")
        root = ("--allow-run-as-root",) if self._is_root else ()
        # By the name alone: a value would stand in the list of processes.
        variables = ("-x", environ.ORDER, "-x", environ.SECRET)
        hosts = ("--host", names) if names else ()
        return (*root, *hosts, "--map-by", "ppr:1:node", "--bind-to", "none", *variables)


def _check_host(host: Host) -> None:
    """Refuse hosts that a host list of mpirun cannot express."""
    for field, value in (("user", host.user), ("port", host.port)):
        if value is not None:
            raise UsageError(
                f"host {host.name} has {field}={value}, which mpirun is not told",
                hint="say so in ~/.ssh/config, or use --launcher ssh",
            )
    if ":" in host.name:
        raise UsageError(
            f"host {host.name} is an IPv6 address, which mpirun's lists cannot have",
            hint="give its name, or use --launcher ssh",
        )
