"""Nodes, workers and the scheduler's address: what the options say together."""

from __future__ import annotations

from collections.abc import Mapping

from msrun import environ
from msrun.cli import options
from msrun.cli.capacity import capacity
from msrun.cli.parsers import WorkerWord
from msrun.cli.settings import Given, Settings, strongest
from msrun.cli.world import World
from msrun.errors import UsageError
from msrun.topology import DeviceKind, Machine

ONE_NODE = "this version forms one node"


def check_one_node(settings: Settings, environment: Mapping[str, str]) -> None:
    """Refuse what needs further nodes.

    Raises:
        UsageError: More than one node, or another rank than 0, is asked for, or another
            launcher started several copies of this one.
    """
    if copies := environ.copies(environment):
        variable, count = copies
        msg = f"environment {variable}={count}: {count} copies of msrun run, and {ONE_NODE}"
        raise UsageError(msg, hint="start one, such as by `srun --ntasks 1` or `mpirun -n 1`")
    nnodes = settings.get(options.NNODES)
    if nnodes and nnodes.value[1] > 1:
        msg = f"{nnodes.cite()} asks for more nodes than one, and {ONE_NODE} (choose 1)"
        raise UsageError(msg)
    node_rank = settings.get(options.NODE_RANK)
    if node_rank and node_rank.value > 0:
        msg = f"{node_rank.cite()} is no rank of the only node, and {ONE_NODE} (choose 0)"
        raise UsageError(msg)


def count_workers(settings: Settings, machine: Machine) -> Given[int]:
    """Return how many workers this node starts.

    Raises:
        UsageError: Options contradict each other, a device is missing, or the machine
            is too small.
    """
    given = settings.get(options.WORKERS_PER_NODE)
    each = Given(_default(machine)) if given is None else _counted(given, machine)
    total = settings.get(options.WORKER_NUM)
    if total and total.source.level > each.source.level:
        each = total
    elif total and total.source.level == each.source.level and total.value != each.value:
        msg = f"{total.cite()} is not 1 node times {each.cite()}, and {ONE_NODE}"
        raise UsageError(msg)
    most, limit = capacity(machine)
    if each.value > most:
        shown = each.cite() if each.text else f"--workers-per-node {each.value}"
        msg = f"{shown} is more than this machine can hold: at most {most}, limited by {limit}"
        raise UsageError(msg)
    return each


def count_ranks(settings: Settings, machine: Machine) -> int:
    """Return the workers of a job of any size, also one that this version cannot form.

    Raises:
        UsageError: Options contradict each other, or a device is missing.
    """
    total, nodes = settings.get(options.WORKER_NUM), settings.get(options.NNODES)
    given = settings.get(options.WORKERS_PER_NODE)
    if total and not (nodes and given):
        return total.value
    each = Given(_default(machine)) if given is None else _counted(given, machine)
    product = Given(each.value * (nodes.value[1] if nodes else 1), each.source, each.text)
    return (strongest(total, product) or product).value


def _default(machine: Machine) -> int:
    return len(machine.devices) or 1


def _counted(given: Given[int | WorkerWord], machine: Machine) -> Given[int]:
    """Return the number that torchrun's word stands for on `machine`."""
    kinds = {WorkerWord.GPU: DeviceKind.CUDA, WorkerWord.NPU: DeviceKind.NPU}
    match given.value:
        case int():
            count = given.value
        case WorkerWord.AUTO:
            count = len(machine.devices) or len(machine.cpus.cpus)
        case WorkerWord.CPU:
            count = len(machine.cpus.cpus)
        case WorkerWord.GPU | WorkerWord.NPU as word:
            count = sum(device.kind is kinds[word] for device in machine.devices)
            if not count:
                msg = (
                    f"{given.cite()} finds no {word.value.upper()} on this machine "
                    "(choose a number, auto or cpu)"
                )
                raise UsageError(msg)
    return Given(count, given.source, given.text)


def find_endpoint(settings: Settings, world: World) -> tuple[Given[str] | None, Given[int]]:
    """Return host (None when nobody names one) and port of the scheduler.

    Raises:
        UsageError: Options contradict each other, the host is not this machine, or
            the port is taken.
    """
    both = settings.get(options.RDZV_ENDPOINT)
    alone = settings.get(options.STANDALONE)
    if both and alone and alone.value:
        if both.source.level >= alone.source.level:
            msg = f"{both.cite()} contradicts --standalone, which takes a free port of this node"
            raise UsageError(msg)
        both = None
    host = strongest(
        settings.get(options.MASTER_ADDR),
        Given(both.value[0], both.source, both.text) if both else None,
    )
    port = strongest(
        settings.get(options.MASTER_PORT),
        Given(both.value[1], both.source, both.text)
        if both and both.value[1] is not None
        else None,
    ) or Given(0)
    if host:
        _check_local(host, world)
    if port.value:
        problem = world.port_problem(host.value if host else "127.0.0.1", port.value)
        if problem:
            msg = f"{port.cite()}: port {port.value} {problem}"
            raise UsageError(msg)
    return host, port


def _check_local(host: Given[str], world: World) -> None:
    is_local = world.is_local(host.value)
    if is_local is None:
        msg = f"{host.cite()}: the name resolver does not know {host.value}"
        raise UsageError(msg)
    if not is_local:
        msg = f"{host.cite()} is no address of this machine, and {ONE_NODE} (choose localhost)"
        raise UsageError(msg)


def find_join_timeout(settings: Settings) -> Given[float]:
    """Return the seconds in which all nodes must register."""
    conf = settings.get(options.RDZV_CONF)
    named = Given(conf.value, conf.source, conf.text) if conf and conf.value is not None else None
    timeout = strongest(settings.get(options.JOIN_TIMEOUT), named)
    return timeout or Given(options.JOIN_TIMEOUT.default or 0.0)
