"""How many nodes and workers a job has, and how long it waits for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msrun import environ
from msrun.cli.job.capacity import capacity
from msrun.cli.options import catalog as options
from msrun.cli.options.option import Option
from msrun.cli.options.parsers import TorchDevice, WorkerWord, choose, span
from msrun.cli.options.peers import MONITOR_INTERVAL, RDZV_BACKEND
from msrun.cli.options.settings import Given, Settings, strongest
from msrun.cli.system import System
from msrun.errors import UsageError
from msrun.topology import DeviceKind, Machine
from msrun.units import counted

# Words of torchrun alone.
_TORCHRUNS_OWN: tuple[Option[object], ...] = (
    *(options.STANDALONE, options.RDZV_ENDPOINT, options.RDZV_ID, options.RDZV_CONF),
    *(RDZV_BACKEND, MONITOR_INTERVAL),
)
_TORCHRUNS_GRACE = 30.0

Workers = int | WorkerWord | TorchDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How many nodes and workers a job has.

    Args:
        nnodes: Fewest and most nodes.
        workers: Workers of this node.
        total: Workers of all nodes, None without --worker-num.
        world_size: Workers of all nodes, as far as the options determine them; None where the
            other nodes decide.
    """

    nnodes: Given[tuple[int, int]]
    workers: Given[int]
    total: Given[int] | None
    world_size: int | None

    @property
    def is_alone(self) -> bool:
        """Whether this node is the whole job."""
        return self.nnodes.value[1] == 1

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may come and go."""
        return self.total is None and self.nnodes.value[0] < self.nnodes.value[1]


def count(settings: Settings, machine: Machine, system: System) -> Size:
    """Return the size of the job.

    Raises:
        UsageError: Options contradict each other, a device is missing, the machine is too
            small, or another launcher started more copies of this one than there are nodes.
    """
    given = settings.get(options.WORKERS_PER_NODE)
    each = None if given is None else _counted(given, machine, system)
    nnodes = _nodes(settings, each)
    if nnodes.value[1] == 1:
        workers = _workers_alone(settings, each or Given(_default(machine)))
        size = Size(nnodes=nnodes, workers=workers, total=None, world_size=workers.value)
    else:
        total = settings.get(options.WORKER_NUM)
        workers = each or _share(total, nnodes) or Given(_default(machine))
        _check_total(total, nnodes, workers)
        size = Size(
            nnodes=nnodes,
            workers=workers,
            total=total,
            world_size=total.value if total else _product(nnodes, given),
        )
    _check_capacity(size.workers, size.nnodes.value[1], machine)
    _check_node_rank(settings, size)
    _check_copies(size, system.environment())
    return size


def _product(nnodes: Given[tuple[int, int]], each: Given[Workers] | None) -> int | None:
    """Return the workers of nodes that are all told the same number, None where they are not."""
    fewest, most = nnodes.value
    if fewest < most or each is None or not isinstance(each.value, int):
        return None
    return most * each.value


def _nodes(settings: Settings, each: Given[int] | None) -> Given[tuple[int, int]]:
    """Return the fewest and the most nodes; MindSpore's total alone leaves them open."""
    nnodes, alone = settings.get(options.NNODES), settings.get(options.STANDALONE)
    if alone and alone.value:
        if nnodes is None or nnodes.value[1] == 1:
            return nnodes or Given((1, 1))
        if nnodes.source.level >= alone.source.level:
            raise UsageError(f"{nnodes.cite()} contradicts --standalone, which is this node alone")
        return Given((1, 1), alone.source, alone.text)
    total = settings.get(options.WORKER_NUM)
    if nnodes is None and total and each and each.value < total.value:
        is_part = each.source.level >= total.source.level
        nnodes = Given((1, total.value), total.source, total.text) if is_part else None
    return nnodes or Given((1, 1))


def _workers_alone(settings: Settings, each: Given[int]) -> Given[int]:
    total = settings.get(options.WORKER_NUM)
    if total and total.source.level > each.source.level:
        return total
    if total and total.source.level == each.source.level and total.value != each.value:
        raise UsageError(f"{total.cite()} is not 1 node times {each.cite()}")
    return each


def _share(total: Given[int] | None, nnodes: Given[tuple[int, int]]) -> Given[int] | None:
    """Return one node's share of `total`, as MindSpore divides it; None of unknown numbers."""
    fewest, most = nnodes.value
    if total is None or fewest < most:
        return None
    each, rest = divmod(total.value, most)
    if rest or not each:
        raise UsageError(
            f"{total.cite()} cannot be shared equally by {nnodes.cite()}",
            hint="give --workers-per-node on each node",
        )
    return Given(each, total.source, total.text)


def _check_total(
    total: Given[int] | None, nnodes: Given[tuple[int, int]], workers: Given[int]
) -> None:
    """Refuse a total that this node and one worker on each other node exceed."""
    fewest = nnodes.value[0]
    if total and total.value < workers.value + fewest - 1:
        raise UsageError(
            f"{total.cite()} is too few for {counted(fewest, 'node')}, of which this one starts "
            f"{workers.value}"
        )


def _check_capacity(workers: Given[int], nnodes: int, machine: Machine) -> None:
    most, limit = capacity(machine, nnodes)
    if workers.value > most:
        cite = workers.cite() if workers.text else f"--workers-per-node {workers.value}"
        raise UsageError(
            f"{cite} is more than this machine can hold: at most {most}, limited by {limit}"
        )


def _check_node_rank(settings: Settings, size: Size) -> None:
    given, most = settings.get(options.NODE_RANK), size.nnodes.value[1]
    # On one node torchrun and MindSpore ignore it.
    if given and given.value >= most > 1:
        raise UsageError(
            f"{given.cite()} is no rank of {counted(most, 'node')} (choose {span(most)})"
        )


def _check_copies(size: Size, environment: Mapping[str, str]) -> None:
    """Refuse more copies of msrun than the job has nodes."""
    copies, most = environ.copies(environment), size.nnodes.value[1]
    if not copies or copies[1] <= most:
        return
    variable, number = copies
    hint = "start one on each node, such as by `srun --ntasks-per-node 1` or `mpirun -npernode 1`"
    if most == 1:
        hint = (
            "add --nnodes and --master-addr for one job of them all, or start one, such as by "
            "`srun --ntasks 1` or `mpirun -n 1`"
        )
    raise UsageError(
        f"environment {variable}={number}: {number} copies of msrun run for "
        f"{counted(most, 'node')}",
        hint=hint,
    )


def count_ranks(settings: Settings, machine: Machine, system: System) -> int:
    """Return the workers of a job of any size, whose nodes are all like this one.

    Raises:
        UsageError: Options contradict each other, or a device is missing.
    """
    total, nodes = settings.get(options.WORKER_NUM), settings.get(options.NNODES)
    given = settings.get(options.WORKERS_PER_NODE)
    if total and not (nodes and given):
        return total.value
    each = Given(_default(machine)) if given is None else _counted(given, machine, system)
    product = Given(each.value * (nodes.value[1] if nodes else 1), each.source, each.text)
    return (strongest(total, product) or product).value


def _default(machine: Machine) -> int:
    return len(machine.devices) or 1


def _counted(given: Given[Workers], machine: Machine, system: System) -> Given[int]:
    """Return the number that torchrun's word stands for on `machine`."""
    match given.value:
        case int() as count:
            pass
        case WorkerWord.AUTO:
            # Without devices of ours there may be others, such as those of ROCm.
            others = 0 if machine.devices else system.count_devices(WorkerWord.AUTO.value)
            count = len(machine.devices) or others or len(machine.cpus.cpus)
        case WorkerWord.CPU:
            count = len(machine.cpus.cpus)
        case WorkerWord.GPU:
            count = _devices(machine, DeviceKind.CUDA) or _asked(given, "cuda", system)
        case WorkerWord.NPU:
            count = _devices(machine, DeviceKind.NPU) or _asked(given, "npu", system)
        case TorchDevice(kind=kind):
            count = _asked(given, kind, system)
    return Given(count, given.source, given.text)


def _devices(machine: Machine, kind: DeviceKind) -> int:
    return sum(device.kind is kind for device in machine.devices)


def _asked(given: Given[Workers], kind: str, system: System) -> int:
    """Return the number of devices that torch finds, which must be above 0."""
    count = system.count_devices(kind)
    if count is None:
        known = [word.value for word in WorkerWord]
        choices = choose(("1 or more", *known, "a device of torch's such as xpu"))
        raise UsageError(f"{given.cite()} is no number of workers, nor a device ({choices})")
    if not count:
        raise UsageError(
            f"{given.cite()} finds no {given.text.upper()} on this machine "
            "(choose a number, auto or cpu)"
        )
    return count


def find_timeout(settings: Settings, option: Option[float]) -> Given[float] | None:
    """Return the seconds of `option`, which torchrun's --rdzv-conf may hold as well, if given."""
    conf = settings.get(options.RDZV_CONF)
    named = None
    if conf and option.name in conf.value.seconds:
        named = Given(conf.value.seconds[option.name], conf.source, conf.text)
    return strongest(settings.get(option), named)


def find_grace(settings: Settings) -> Given[float] | None:
    """Return the seconds that workers have to end, torchrun's where a word of the job is its own.

    None leaves them to the default.
    """
    theirs = [settings.get(option) for option in _TORCHRUNS_OWN]
    if (workers := settings.get(options.WORKERS_PER_NODE)) and _is_torchruns(workers):
        theirs.append(workers)
    given = settings.get(options.GRACE)
    first = next(filter(None, theirs), None)
    return given or (Given(_TORCHRUNS_GRACE, first.source, "30s") if first else None)


def _is_torchruns(given: Given[object]) -> bool:
    """Tell whether an option is spelled `--nproc-per-node`, or as a beginning or variable of it."""
    word = (given.source.key or given.source.place).lower()
    return word.removeprefix("--").removeprefix("pet_").startswith("np")
