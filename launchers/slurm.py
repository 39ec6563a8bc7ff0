"""Slurm: a batch script that starts one agent a node, submitted and followed to its end.

The script makes the job's secret on the first node of the job, so it stands in no file and
no request to Slurm's controller; srun hands it to the agents in their environment.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from msrun import environ
from msrun.errors import ExitCode, MsrunError, UsageError, signal_exit_code
from msrun.fleet import (
    VARIABLE_BYTES_MAX,
    Fleet,
    FleetPlan,
    StartCommand,
    check_options,
    make_order,
    render_order,
)
from msrun.processes.batch import follow
from msrun.processes.fleet import run_fleet
from msrun.units import parse_duration, shown

SCRIPT = "job.sbatch"
_SECONDS = 60.0
_FIELD = re.compile(r"(?:^|\s)(JobState|ExitCode)=(\S+)")
_COMMENT = re.compile(r"^\s*Comment=(.*)$", re.MULTILINE)
# In the comment of a job whose agents have told that it ended well.
_ENDED_WELL = "msrun:ended-well"
_LIMIT = re.compile(
    r"(?:[0-9]{1,9}-)?[0-9]{1,9}(?::[0-9]{1,2}){0,2}|unlimited|infinite|", re.IGNORECASE
)
_EXIT_CODE = re.compile(r"([0-9]{1,3}):([0-9]{1,3})")
# State of a job that has ended -> our code, where Slurm has none of the program's.
_CODES = {
    "COMPLETED": ExitCode.OK,
    "FAILED": ExitCode.NODE_LOST,
    "NODE_FAIL": ExitCode.NODE_LOST,
    "BOOT_FAIL": ExitCode.NODE_LOST,
    "CANCELLED": signal_exit_code(signal.SIGTERM),
    "TIMEOUT": signal_exit_code(signal.SIGTERM),
    "DEADLINE": signal_exit_code(signal.SIGTERM),
    "PREEMPTED": signal_exit_code(signal.SIGTERM),
    "OUT_OF_MEMORY": signal_exit_code(signal.SIGKILL),
}


class SlurmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What sbatch is asked for beside the nodes; None and empty leave it to Slurm.

    Args:
        partition: Partition.
        time: Limit as Slurm writes it, such as `1:00:00`, or a duration such as `1h30m`.
        account: Who pays.
        gpus_per_node: GPUs of each node, as Slurm writes them.
        cpus_per_node: CPUs of each node, which are all that its workers get.
        signal_seconds: Seconds before the limit at which the agents get SIGTERM.
        requeue: Whether Slurm may start the job again after a preemption or a lost node.
        output: File of the job's console; `%j` is the job's number.
        more: Further options of sbatch, such as `--exclusive`.
    """

    partition: str = ""
    time: str = ""
    account: str = ""
    gpus_per_node: str = ""
    cpus_per_node: int | None = None
    signal_seconds: int | None = None
    requeue: bool | None = None
    output: str = ""
    more: tuple[str, ...] = ()


def open_launcher(options: Mapping[str, str]) -> SlurmLauncher:
    """Return the backend.

    Args:
        options: Fields of `SlurmOptions` by their names with dashes, `sbatch-args` for `more`,
            and `detach`, which is `true` or `false`.

    Raises:
        UsageError: There is another option, or a value is none that it takes.
    """
    names = {field.replace("_", "-"): field for field in SlurmOptions.__struct_fields__}
    names = {"sbatch-args": "more", "detach": "detach", **names}
    del names["more"]
    check_options("slurm", options, names)
    given: dict[str, object] = {names[name]: text for name, text in options.items()}
    detach = given.pop("detach", "false") == "true"
    given["more"] = shlex.split(str(given.get("more", "")))
    try:
        return SlurmLauncher(msgspec.convert(given, SlurmOptions, strict=False), detach=detach)
    except msgspec.ValidationError as error:
        raise UsageError(f"--launcher slurm: {error}") from None


class SlurmLauncher:
    """Submits the job to Slurm and follows it.

    Args:
        options: What Slurm is asked for.
        detach: Return as soon as Slurm has the job.
    """

    def __init__(self, options: SlurmOptions | None = None, *, detach: bool = False) -> None:
        self._options = options or SlurmOptions()
        self._detach = detach

    def plan(self, fleet: Fleet) -> FleetPlan:
        """Return what `submit` would do.

        Raises:
            UsageError: Hosts are given, or the order is too long for a variable.
        """
        if fleet.hosts:
            raise UsageError(
                "--launcher slurm takes the nodes that Slurm gives",
                hint="leave --hostfile out, or give --nodelist to sbatch",
            )
        order = render_order(replace(make_order(fleet), hides_code=True))
        if len(order) > VARIABLE_BYTES_MAX:
            raise UsageError(
                f"the job's words are {len(order)} bytes (at most {VARIABLE_BYTES_MAX} by Slurm)",
                hint="give a file for --config and --parallel",
            )
        script = render_script(fleet, self._options, order)
        argv = ("sbatch", "--parsable")
        return FleetPlan(
            fleet=fleet,
            commands=(StartCommand(node="", argv=argv, order=script),),
            files={SCRIPT: script},
        )

    def submit(self, plan: FleetPlan, secret: bytes) -> int:
        """Submit the script and return the job's exit code, 0 when detached."""
        del secret  # The script makes its own.
        number = _sbatch(plan)
        print(number)  # noqa: T201 - the result that scripts take
        if self._detach:
            return ExitCode.OK
        return follow(lambda: parse_end(read_state(number)), lambda: cancel(number))


def render_limit(text: str) -> str:
    """Return a time limit as Slurm writes it; a form that Slurm reads stays as it is.

    Raises:
        UsageError: It is neither a limit of Slurm nor a duration.
    """
    if _LIMIT.fullmatch(text):
        return text
    try:
        seconds = parse_duration(text)
    except UsageError as error:
        hint = "of Slurm's forms, minutes, H:MM:SS and D-HH:MM:SS are read as well"
        raise UsageError(f"--time {error.message}", hint=hint) from None
    if math.isinf(seconds):
        return "UNLIMITED"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def render_script(fleet: Fleet, options: SlurmOptions, order: str) -> str:
    """Return the batch script; the shell expands no word of the user in it."""
    asked = {
        "job-name": fleet.job_id,
        "nodes": str(fleet.nnodes),
        "ntasks-per-node": "1",
        "partition": options.partition,
        "account": options.account,
        "time": render_limit(options.time),
        "gpus-per-node": options.gpus_per_node,
        "cpus-per-task": str(options.cpus_per_node or ""),
        "signal": "" if options.signal_seconds is None else f"TERM@{options.signal_seconds}",
        "output": options.output,
    }
    lines = [f"#SBATCH --{key}={_checked(key, value)}" for key, value in asked.items() if value]
    if options.requeue is not None:
        lines.append("#SBATCH --requeue" if options.requeue else "#SBATCH --no-requeue")
    if options.requeue:
        lines.append("#SBATCH --open-mode=append")  # The console of the first run stays.
    lines += [f"#SBATCH {_checked('sbatch option', word)}" for word in options.more]
    srun = "srun --ntasks-per-node=1 $cpus --cpu-bind=none --mpi=none --no-kill"
    agent, follower = (
        shlex.join([fleet.python, "-P", "-m", name])
        for name in ("launchers.remote", "launchers.slurm")
    )
    return "\n".join(
        [
            "#!/bin/sh",
            *lines,
            "set -u",
            f"export {environ.ORDER}={shlex.quote(order)}",
            "# The secret of this job, known to its agents alone.",
            f"{environ.SECRET}=$(od -An -v -N32 -tx1 /dev/urandom | tr -d ' \\n')",
            f"export {environ.SECRET}",
            # All CPUs of a node are the agent's to divide; a lost node is the agents' to judge.
            # Slurm 22.05 and later does not hand the number of CPUs on to srun by itself.
            "cpus=${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}",
            # Who follows the step ends it with the job's code, also where a node is lost.
            f"exec {follower} {srun} {agent}",
            "",
        ]
    )


def _checked(key: str, value: str) -> str:
    """Refuse a value that would end the line or split into several words."""
    if not value.isprintable() or any(mark in value for mark in " \"'\\#"):
        raise UsageError(
            f"{key} {shown(value)} cannot stand in a batch script",
            hint="it may have no spaces, quotes, backslashes or #",
        )
    return value


def _sbatch(plan: FleetPlan) -> str:
    command = plan.commands[0]
    try:
        done = subprocess.run(
            command.argv,
            input=command.order.encode(),
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise UsageError("--launcher slurm needs sbatch, which is not on PATH") from None
    except subprocess.TimeoutExpired:
        raise MsrunError(f"sbatch gave no answer within {_SECONDS:g}s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise UsageError(f"sbatch refused the job: {shown(said[-1] if said else 'no reason')}")
    return done.stdout.decode(errors="replace").strip().partition(";")[0]


def read_state(number: str) -> str:
    """Return the output of `scontrol show job`."""
    done = subprocess.run(
        ["scontrol", "show", "job", number],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_SECONDS,
        check=False,
    )
    return done.stdout.decode(errors="replace")


def parse_end(text: str) -> int | None:
    """Return the exit code in the output of `scontrol show job`; None while the job runs."""
    fields = dict(_FIELD.findall(text))
    state = fields.get("JobState", "")
    match = _EXIT_CODE.fullmatch(fields.get("ExitCode", ""))
    code, signum = (int(match[1]), int(match[2])) if match else (0, 0)
    if state == "COMPLETING" and (code or _ENDED_WELL in _comment(text)):
        return code  # The script has ended, and Slurm waits minutes for a node that is lost.
    if state not in _CODES:
        return None
    return code or (signal_exit_code(signum) if signum else _CODES[state])


def _comment(text: str) -> str:
    match = _COMMENT.search(text)
    return match[1].strip() if match else ""


def tell_good_end(number: str) -> None:
    """Add to the comment of a job that it ended well.

    While Slurm waits for a lost node, it shows the same of a job that ended with 0 and of one that
    is being cancelled.
    """
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        words = f"{_comment(read_state(number))} {_ENDED_WELL}".strip()
        subprocess.run(
            ["scontrol", "update", f"JobId={number}", f"Comment={words}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the words of a batch script that start its agents, and return the job's exit code."""
    command = StartCommand(node="", argv=tuple(sys.argv[1:] if argv is None else argv))
    try:
        code = run_fleet([command], b"")  # Order and secret are in the environment.
        if not code:
            tell_good_end(environ.current().get("SLURM_JOB_ID", ""))
        return code  # noqa: TRY300 - an error is a code as well
    except MsrunError as error:
        print(error.render(), file=sys.stderr)  # noqa: T201 - there is no console
        return error.exit_code


def cancel(number: str) -> None:
    """Have Slurm end a job."""
    subprocess.run(["scancel", number], stdin=subprocess.DEVNULL, timeout=_SECONDS, check=False)


if __name__ == "__main__":
    sys.exit(main())
