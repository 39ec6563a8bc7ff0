"""The nodes that a batch system has given to a job, from its environment."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msrun.errors import UsageError
from msrun.hosts.hostlist import SLOTS_MAX, Host, expand
from msrun.units import shown

# The most telling first: devices of each node, devices of this one, tasks of each.
_GPUS = ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE")
_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
# `4`, or `a100:4`; `2(x3)` is 2 on each of three nodes.
_GPUS_FORM = re.compile(r"(?:[A-Za-z0-9_.-]+:)?([0-9]{1,9})")
_TASKS_FORM = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def slurm_hosts(env: Mapping[str, str], slots: int | None = None) -> tuple[Host, ...]:
    """Return the nodes of this job or step of Slurm, in Slurm's order.

    Args:
        env: The environment of a process in the allocation.
        slots: Slots of each node; None takes Slurm's GPUs of a node, else its tasks.

    Raises:
        UsageError: This is no allocation of Slurm, or a variable of it is not understood.
    """
    name = next((name for name in _NODES if env.get(name)), "")
    if not name:
        raise UsageError(
            f"environment {_NODES[1]} is not set: this is no allocation of Slurm",
            hint="run it inside of `salloc`, `sbatch` or `srun`",
        )
    try:
        names = expand(env[name])
    except UsageError as error:
        raise UsageError(f"environment {name}: {error.message}") from None
    counts = [slots] * len(names) if slots else _slots(env, len(names))
    return tuple(Host(name=name, slots=n) for name, n in zip(names, counts, strict=True))


def _slots(env: Mapping[str, str], nodes: int) -> list[int]:
    for name in _GPUS:
        if text := env.get(name):
            match = _GPUS_FORM.fullmatch(text)
            return [_count(name, text, match and match[1])] * nodes
    for name in _TASKS:
        if text := env.get(name):
            counts: list[int] = []
            for part in text.split(","):
                match = _TASKS_FORM.fullmatch(part)
                times = min(int(match[2] or 1), nodes) if match else 1
                counts += [_count(name, text, match and match[1])] * times
            if len(counts) != nodes:
                raise UsageError(
                    f"environment {name}={shown(text)} is about {len(counts)} nodes of {nodes}"
                )
            return counts
    raise UsageError("Slurm does not say how many GPUs or tasks a node has", hint="give --slots")


def _count(name: str, text: str, number: str | None) -> int:
    if not number or not 1 <= int(number) <= SLOTS_MAX:
        raise UsageError(
            f"environment {name}={shown(text)} does not give each node 1 to {SLOTS_MAX} slots",
            hint="give --slots",
        )
    return int(number)
