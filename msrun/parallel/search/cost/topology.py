"""What a cluster can do: rates of its devices, and of the links that a mesh axis runs over.

Users name a topology by a preset or a YAML file (`find_topology`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from msrun.errors import ConfigError, UsageError
from msrun.parallel.config_file import load_yaml
from msrun.units import quoted

GIB = 2**30
_FILE_SUFFIXES = (".yaml", ".yml", ".json")

CollectiveKind = Literal["gather", "scatter", "reduce", "move"]


class NetworkLevel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One level of the network.

    Args:
        bandwidth: Bytes a second that one device sends, and receives at the same time.
        latency: Seconds of one hop.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < math.inf:
            raise ValueError("bandwidth: must be above 0 bytes a second")
        if not 0 <= self.latency < math.inf:
            raise ValueError("latency: must be 0 or more seconds")


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What collectives of one kind took on the cluster.

    Args:
        kind: Which; `cost.estimate` has what each of them does.
        ranks: Of a group.
        across: Its ranks are on as many nodes; else on one.
        start: Seconds that it takes for an empty tensor.
        per_byte: Seconds more for each byte of the full tensor.
    """

    kind: CollectiveKind
    ranks: int
    across: bool = False
    start: float
    per_byte: float

    def __post_init__(self) -> None:
        if self.ranks < 2:  # noqa: PLR2004 - of one rank there is nothing to measure
            raise ValueError("ranks: must be 2 or more")
        if not 0 <= self.start < math.inf:
            raise ValueError("start: must be 0 or more seconds")
        if not 0 <= self.per_byte < math.inf:
            raise ValueError("per_byte: must be 0 or more seconds")


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster of equal nodes.

    Args:
        name: For reports.
        flops: Operations a second of one device, in the type that is trained in.
        efficiency: Share of `flops` that large matrix products reach.
        memory_bandwidth: Bytes a second of the device's memory.
        memory: Bytes of the device's memory.
        launch: Seconds to start one operator.
        collective: Seconds to start one collective.
        per_node: Devices of a node.
        inside: Links within a node.
        across: Links between nodes.
        overlap: Share of the traffic of parameters and their gradients that hides behind
            computation.
        measured: What `msrun calibrate` measured of collectives, which goes before the links.
    """

    name: str
    flops: float
    memory_bandwidth: float
    memory: int
    inside: NetworkLevel
    across: NetworkLevel
    per_node: int = 8
    efficiency: float = 0.6
    launch: float = 4e-6
    collective: float = 8e-6
    overlap: float = 0.0
    measured: tuple[Measured, ...] = ()

    def __post_init__(self) -> None:
        for field in ("flops", "memory_bandwidth", "memory", "per_node"):
            if not 0 < getattr(self, field) < math.inf:
                raise ValueError(f"{field}: must be above 0")
        if not 0 < self.efficiency <= 1:
            raise ValueError("efficiency: must be above 0, and 1 at most")
        if not 0 <= self.overlap < 1:
            raise ValueError("overlap: must be 0 or more, and below 1")
        for field in ("launch", "collective"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"{field}: must be 0 or more seconds")

    def wires(self, sizes: Sequence[int]) -> tuple[Wire, ...]:
        """Return what each axis of a mesh runs over; the last axis is the innermost."""
        wires: list[Wire] = []
        stride = 1
        for size in reversed(sizes):
            wires.append(self._wire(size, self._together(size, stride)))
            stride *= size
        return tuple(reversed(wires))

    def between(self, stage: int, other: int, ranks: int) -> NetworkLevel:
        """Return the links over which ranks of two stages, of `ranks` each, send to their peers.

        One pair on two nodes makes the others wait.
        """
        places = ((stage * ranks + at, other * ranks + at) for at in range(ranks))
        is_inside = all(self._node(one) == self._node(two) for one, two in places)
        return self.inside if is_inside else self.across

    def _node(self, position: int) -> int:
        """Return the node of a position of the mesh."""
        return position // self.per_node

    def _together(self, size: int, stride: int) -> int:
        """Return how many of `size` devices that are `stride` apart each of their nodes has."""
        return math.gcd(size, max(1, self.per_node // stride))

    def _wire(self, size: int, inside: int) -> Wire:
        """Return the links of `size` devices of which each of their nodes has `inside`.

        A ring that leaves a node does so through the adapters of all its members there, so
        between nodes each member has the bandwidth of as many.
        """
        if inside == size:
            return Wire(
                size=size,
                bandwidth=self.inside.bandwidth,
                start=self.collective,
                hop=self.inside.latency,
                measured=self._of(across=False),
            )
        return Wire(
            size=size,
            bandwidth=min(self.inside.bandwidth, inside * self.across.bandwidth),
            start=self.collective,
            hop=self.across.latency,
            measured=self._of(across=True) if inside == 1 else (),
        )

    def _of(self, *, across: bool) -> tuple[Measured, ...]:
        return tuple(one for one in self.measured if one.across is across)


class OrderedTopology(Topology, frozen=True, kw_only=True):
    """A cluster whose ranks have another order on the mesh than their numbers.

    Args:
        ranks: The rank at each position of the mesh; a stage has as many in a row as its own mesh.
    """

    ranks: tuple[int, ...]

    def _node(self, position: int) -> int:
        """Return the node of a position of the mesh."""
        return self.ranks[position] // self.per_node

    def _together(self, size: int, stride: int) -> int:
        """Return how many devices of a group of the axis its nodes have at least.

        Groups of one axis may have unlike links: all of them wait for the slowest.
        """
        nodes = [self._node(at) for at in range(len(self.ranks))]
        firsts = (at for at in range(len(nodes)) if at // stride % size == 0)
        groups = (nodes[first : first + size * stride : stride] for first in firsts)
        return min(min(Counter(group).values()) for group in groups)


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """What one mesh axis runs over.

    Args:
        size: Ranks of a group.
        bandwidth: Bytes a second of each.
        start: Seconds to start a collective.
        hop: Seconds of one hop.
        measured: Collectives over links like it.
    """

    size: int
    bandwidth: float
    start: float
    hop: float
    measured: tuple[Measured, ...] = ()


def _preset(name: str, numbers: tuple[float, ...], *, per_node: int = 8) -> Topology:
    flops, memory_bandwidth, memory, inside, across = numbers
    return Topology(
        name=name,
        flops=flops,
        memory_bandwidth=memory_bandwidth,
        memory=int(memory * GIB),
        per_node=per_node,
        inside=NetworkLevel(bandwidth=inside, latency=1e-6),
        across=NetworkLevel(bandwidth=across, latency=4e-6),
    )


# Operations a second (16-bit, dense), memory: bytes a second and GiB, bytes a second of links
# inside and across nodes, in one direction.  The vendors' data sheets; calibrate for more.
PRESETS: Mapping[str, Topology] = {
    "a100": _preset("a100", (312e12, 2.0e12, 80, 300e9, 25e9)),
    "h100": _preset("h100", (989e12, 3.35e12, 80, 450e9, 50e9)),
    "h200": _preset("h200", (989e12, 4.8e12, 141, 450e9, 50e9)),
    "ascend910": _preset("ascend910", (256e12, 1.2e12, 32, 90e9, 12.5e9)),
    "cpu": Topology(
        name="cpu",
        flops=5e10,
        memory_bandwidth=1e10,
        memory=16 * GIB,
        inside=NetworkLevel(bandwidth=1e9, latency=5e-5),
        across=NetworkLevel(bandwidth=1e9, latency=2e-4),
        efficiency=1.0,
        launch=1e-5,
        collective=1e-4,
    ),
}


def ordered(topology: Topology, ranks: Sequence[int]) -> Topology:
    """Return `topology` for a mesh with `ranks` at its positions; none have their own order."""
    if [*ranks] == [*range(len(ranks))]:
        return topology
    return OrderedTopology(**msgspec.structs.asdict(topology), ranks=tuple(ranks))


def parse_topology(tree: object) -> Topology:
    """Return the topology that `tree`, plain values as of YAML, says.

    A key `preset` names one of `PRESETS`, which the other keys change.

    Raises:
        ConfigError: An unknown key or preset, or a value that is none.
    """
    if not isinstance(tree, Mapping):
        raise ConfigError("topology: it is no mapping")
    given: dict[str, Any] = dict(tree)
    name = given.pop("preset", None)
    if name is not None:
        given = {**msgspec.to_builtins(preset(str(name))), **given}
    try:
        return msgspec.convert(given, Topology, strict=False)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        where = path.rstrip("`")
        raise ConfigError(f"topology{where}: {problem[:1].lower()}{problem[1:]}") from None


def preset(name: str) -> Topology:
    """Return the preset called `name`.

    Raises:
        ConfigError: There is none.
    """
    topology = PRESETS.get(name.lower())
    if topology is None:
        raise ConfigError(f"topology: {quoted(name)} is no preset (choose {', '.join(PRESETS)})")
    return topology


def find_topology(name: str) -> Topology:
    """Return the preset called `name`, or what the file of that name says.

    Raises:
        ConfigError: There is neither, or the file says something else.
    """
    path = Path(name)
    if path.suffix not in _FILE_SUFFIXES:
        return preset(name)
    try:
        tree = load_yaml(path)
    except UsageError as error:
        raise ConfigError(f"topology: {error.message}") from None
    return parse_topology(tree)
