"""Sections on parameter servers."""

from __future__ import annotations

from msrun.parallel.settings.section import ConfigSection, at_least, given


class Staleness(ConfigSection, frozen=True, kw_only=True):
    """Training on parameter servers in which ranks do not wait for each other.

    Args:
        staleness: Steps that a rank may be ahead of the slowest one, at least 0; `.inf` is any
            number.
    """

    staleness: float

    def __post_init__(self) -> None:
        if not self.staleness >= 0:
            raise ValueError(f"staleness: {self.staleness} must be at least 0")


class ServerSnapshots(ConfigSection, frozen=True, kw_only=True):
    """Snapshots that parameter servers write, so that one that is killed goes on.

    Args:
        every: Steps from one to the next, at least 1.  Ranks keep the gradients of the steps since.
        dir: Directory for them; None is a private one of each node.
    """

    every: int = 100
    dir: str | None = None

    def __post_init__(self) -> None:
        at_least(self, "every", 1)


class ServerCache(ConfigSection, frozen=True, kw_only=True):
    """A cache of the rows of tables on each rank.

    Args:
        rows: Rows of each table that a rank keeps, with the optimizer's state of them; at least 1.
        prefetch: Fetch the rows of the next batch of `rt.loader` while this one computes.
    """

    rows: int
    prefetch: bool = True

    def __post_init__(self) -> None:
        at_least(self, "rows", 1)


class TableInit(ConfigSection, frozen=True, kw_only=True):
    """First rows of a table that is on the device `meta`: one of the three.

    Rows of `padding_idx` are zero.

    Args:
        normal: Standard deviation of a normal distribution around 0; at least 0.
        uniform: Bound of a uniform distribution, whose other bound is its negative; at least 0.
        constant: The value of all elements.
    """

    normal: float | None = None
    uniform: float | None = None
    constant: float | None = None

    def __post_init__(self) -> None:
        if len(given(self)) != 1:
            raise ValueError("a table has one initialization (choose normal, uniform or constant)")
        if self.normal is not None:
            at_least(self, "normal", 0)
        if self.uniform is not None:
            at_least(self, "uniform", 0)


class ServerParameters(ConfigSection, frozen=True, kw_only=True):
    """Parameters that live on parameter servers, which `msrun --server-num N` starts.

    Args:
        params: Patterns of these parameters; `rt.set_param_ps` marks others.  Of a table of
            `nn.Embedding` or `nn.EmbeddingBag` a rank has the rows of its batch alone; of others a
            copy that each step renews.
        sync: `true` adds the gradients of all ranks before each step, as one process would.  A
            mapping with `staleness` has servers step with each gradient that comes.
        init: Pattern of tables on the device `meta` -> their first rows, which servers make; the
            first pattern that matches counts.  Without one they are those of `reset_parameters`.
        cache: A cache of rows on each rank, with `sync: true`; None has none.
        snapshot: Snapshots of the servers.
        shared_memory: Whether ranks and servers of one node pass tensors in shared memory; `false`
            sends them over sockets, as between nodes.
        replicas: 1 has the next server keep a hot copy of what each server owns, so that one that
            is killed goes on at once.  For `sync: true`, and two servers or more.
    """

    params: list[str] = []
    sync: bool | Staleness = True
    init: dict[str, TableInit] = {}
    cache: ServerCache | None = None
    snapshot: ServerSnapshots = ServerSnapshots()
    shared_memory: bool = True
    replicas: int = 0

    def __post_init__(self) -> None:
        if self.sync is False:
            raise ValueError("sync: false sets no bound (choose true or {staleness: N})")
        if self.replicas not in (0, 1):
            raise ValueError(f"replicas: {self.replicas} (choose 0 or 1)")
        if self.replicas and self.staleness:
            raise ValueError("replicas: 1 needs sync: true, since copies do the same steps")
        if self.cache and self.staleness:
            raise ValueError(
                "cache: with a staleness nobody knows which rows are new (leave it out)"
            )

    @property
    def staleness(self) -> float:
        """Steps that a rank may be ahead of the slowest one."""
        return self.sync.staleness if isinstance(self.sync, Staleness) else 0.0
