"""The rank table as values: one model for file versions 1.0 and 1.2.

Attributes carry the names of the file's fields.  The values do not check
themselves: `ranktable.check` reports all mistakes of a table at once, each with its
JSON path.
"""

import enum
from dataclasses import dataclass

Extra = tuple[tuple[str, str], ...]
"""Fields unknown to this model: (key, value as compact JSON), sorted by key."""

_PROBLEMS_SHOWN = 20


class Version(enum.Enum):
    """File versions this package reads and writes."""

    V1_0 = "1.0"
    V1_2 = "1.2"


class TableStatus(enum.Enum):
    """Whether the writer of the file is done with it."""

    COMPLETED = "completed"
    INITIALIZING = "initializing"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDevice:
    """One device, which is one rank.

    Args:
        device_id: Physical index on its server.
        rank_id: Global rank.
        device_ip: Address of the device's own network port, several joined by commas;
            None when the file has no such field, empty when HCCL is to read it as unset.
        super_device_id: Identity inside its super pod; version 1.2.
        device_port: TCP port of the device's network port.
        backup_device_ip: Address of the other die of the same NPU.
        backup_device_port: TCP port there.
        host_port: TCP port on the host, distinct for each device of a server.
        device_logical_id: Index under which a container sees the device.
        extra: Fields unknown to this model.
    """

    device_id: int
    rank_id: int
    device_ip: str | None = None
    super_device_id: int | None = None
    device_port: int | None = None
    backup_device_ip: str | None = None
    backup_device_port: int | None = None
    host_port: int | None = None
    device_logical_id: int | None = None
    extra: Extra = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One node with its devices, in the file's order.

    Args:
        server_id: Unique name; by habit the host's address, but any text is allowed.
        device: Its devices; their ranks are one block, in any order.
        host_ip: Address of the host.
        server_ip: Address of the pod, or of the host in a cross-cluster table.
        container_ip: Address of the container.
        pod_ip: Address of the pod; the one MindSpore's scheduler compares.
        hardware_type: Product name.
        host_nic_ip: An address, or the literal "reserve" that hccl_tools writes.
        extra: Fields unknown to this model.
    """

    server_id: str
    device: tuple[TableDevice, ...]
    host_ip: str | None = None
    server_ip: str | None = None
    container_ip: str | None = None
    pod_ip: str | None = None
    hardware_type: str | None = None
    host_nic_ip: str | None = None
    extra: Extra = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperPod:
    """Servers joined by one device fabric; version 1.2.

    Args:
        super_pod_id: The fabric's own number, or any text that splits it into logical pods.
        server_list: Ids of its servers.
        extra: Fields unknown to this model.
    """

    super_pod_id: str
    server_list: tuple[str, ...]
    extra: Extra = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """A whole file.

    Args:
        version: Version of the file's form.
        server_list: Servers in the file's order; the field `server_count` is its length.
        super_pod_list: Super pods; empty when HCCL is to treat the servers as stand-alone.
        status: Only a completed table may be used; the other is still being written.
        extra: Fields unknown to this model.
    """

    version: Version
    server_list: tuple[Server, ...]
    super_pod_list: tuple[SuperPod, ...] = ()
    status: TableStatus = TableStatus.COMPLETED
    extra: Extra = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(server.device) for server in self.server_list)

    def by_rank(self) -> tuple[tuple[Server, TableDevice], ...]:
        """Return each device with its server, lowest rank first: in a sound table, index = rank."""
        pairs = [(server, device) for server in self.server_list for device in server.device]
        return tuple(sorted(pairs, key=lambda pair: pair[1].rank_id))


@dataclass(frozen=True, slots=True)
class TableProblem:
    """One thing wrong with a table.

    Args:
        path: JSON path such as `server_list[1].device[3].rank_id`; empty for the whole file.
        message: What is wrong, with the value, then the limit or the choices.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class RankTableError(ValueError):
    """A rank table that cannot be used; `str` gives the first problems, one a line.

    Args:
        problems: All that is wrong; at least one.
    """

    def __init__(self, problems: tuple[TableProblem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        lines = [str(problem) for problem in self.problems[:_PROBLEMS_SHOWN]]
        hidden = len(self.problems) - len(lines)
        return "\n".join([*lines, f"and {hidden} more problems"] if hidden else lines)


class UnknownVersionError(RankTableError):
    """The file has a version this package does not read; HCCL itself may."""
