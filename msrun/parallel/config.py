"""The parallel configuration: what it can say, each section checked by itself.

`config_file` reads it.  What depends on the number of ranks is checked in `layout`.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from msrun.errors import UsageError
from msrun.units import parse_size

ROOT = "parallel"
REST = -1

# Axes with a meaning of their own; every other name is for the operator plan.
DATA_AXIS = "dp"
PIPELINE_AXIS = "pp"

# Stands in a list of dims for as many as there are beside the others, none of them cut.
UNSHARDED_DIMS = "..."

Dim = str | list[str] | None
Dims = list[Dim]
Style = Literal["colwise", "rowwise", "sequence", "embedding", "vocab"]
Schedule = Literal[
    "gpipe", "1f1b", "interleaved", "looped_bfs", "interleaved_zb", "zbv", "dualpipev"
]

Search = Literal[
    "exact",
    "recursive",
    "propagation",
    "dynamic_programming",
    "recursive_programming",
    "sharding_propagation",
]

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ConfigSection(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One mapping of the file; unknown keys are refused."""


def _size(section: ConfigSection, name: str) -> int:
    value = getattr(section, name)
    if isinstance(value, int):
        _at_least(section, name, 0)
        return value
    try:
        return parse_size(value)
    except UsageError as error:
        raise ValueError(f"{name}: {error.message}") from None


def _given(section: ConfigSection) -> list[str]:
    """Return the keys of `section` that do not have their defaults, in order."""
    return list(msgspec.to_builtins(section))


def _at_least(section: ConfigSection, name: str, least: int) -> None:
    value = getattr(section, name)
    if value < least:
        raise ValueError(f"{name}: {value} must be at least {least}")


class LayoutRule(ConfigSection, frozen=True, kw_only=True):
    """A rule in MindSpore's `Layout` notation, with aliases of its own for the devices.

    Args:
        device_matrix: Sizes of the aliases, the slowest-varying first.
        alias_name: The aliases.
        rank_list: Order of the ranks; None is theirs.
        params: Parameter -> aliases of each dim.
        inputs: Of the first positional input.  Key `in`.
        out: Of the output.
    """

    device_matrix: list[int]
    alias_name: list[str]
    rank_list: list[int] | None = None
    params: dict[str, Dims] = {}
    inputs: Dims | None = msgspec.field(default=None, name="in")
    out: Dims | None = None

    def __post_init__(self) -> None:
        if not self.params and self.inputs is None and self.out is None:
            raise ValueError("params: or in or out must be given")


class PlanRule(ConfigSection, frozen=True, kw_only=True):
    """How the modules that `match` names compute, at operator level.

    Args:
        match: Pattern of module names, such as `layers.*.up`; `*` also crosses dots.
        style: A common pattern by name instead of `params`, `in` and `out`.
        axis: Mesh axis of `style`; None takes the only one there is.
        strategy: The same in MindSpore's notation: parts of each dim of each input.
        out_strategy: With `strategy`, parts of each dim of the output.
        layout: The same in MindSpore's `Layout` notation.
        params: Parameter name -> axis names of each of its dims.
        inputs: Axis names of each dim of the first positional input.  Key `in`.
        out: Axis names of each dim of the output.
    """

    match: str
    style: Style | None = None
    axis: str | None = None
    strategy: list[list[int]] | None = None
    out_strategy: list[list[int]] | None = None
    layout: LayoutRule | None = None
    params: dict[str, Dims] = {}
    inputs: Dims | None = msgspec.field(default=None, name="in")
    out: Dims | None = None

    def __post_init__(self) -> None:
        forms = {
            "style": self.style is not None,
            "strategy": self.strategy is not None,
            "layout": self.layout is not None,
            "params": bool(self.params) or self.inputs is not None or self.out is not None,
        }
        given = [name for name, is_given in forms.items() if is_given]
        if not given:
            raise ValueError("style: or strategy, layout, or params, in and out must be given")
        if len(given) > 1:
            raise ValueError(f"{given[0]}: stands instead of {given[1]}")
        if self.axis and not self.style:
            raise ValueError("axis: belongs to a style")
        if self.out_strategy and not self.strategy:
            raise ValueError("out_strategy: belongs to a strategy")


class Optimizer(ConfigSection, frozen=True, kw_only=True):
    """Optimizer parallel (ZeRO) over the data-parallel axis.

    Args:
        zero: 0 nothing is sharded; 1 parameters outside the step and optimizer state; 2 also
            gradients between micro-batches; 3 also parameters between forward and backward.
        shard_size: Ranks that share one copy; -1 all.  Fewer means hybrid sharding.
        threshold: Parameters of fewer bytes stay whole.
        modules: Patterns of modules gathered as one; empty takes each repeated block.
        dtype: Type of gathered parameters and of the computation; None keeps theirs.
        offload: Shards and optimizer state stay in host memory.
    """

    zero: Literal[0, 1, 2, 3] = 0
    shard_size: int = REST
    threshold: int | str = 0
    modules: list[str] = []
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "threshold", _size(self, "threshold"))
        if self.shard_size != REST and self.shard_size < 1:
            raise ValueError(f"shard_size: {self.shard_size} must be -1 or at least 1")
        if self.zero == 0:
            for name in _given(self):
                raise ValueError(f"{name}: needs zero 1, 2 or 3")


class Pipeline(ConfigSection, frozen=True, kw_only=True):
    """Pipeline parallel over the axis `pp`.

    Args:
        stages: Module pattern -> stage, in execution order; with several segments a stage is
            `[stage, segment]`.  `auto` balances them.
        microbatches: Parts of one local batch.
        schedule: Order of forwards and backwards.
    """

    stages: dict[str, int | tuple[int, int]] | Literal["auto"]
    microbatches: int
    schedule: Schedule = "1f1b"

    def __post_init__(self) -> None:
        _at_least(self, "microbatches", 1)


class Reduce(ConfigSection, frozen=True, kw_only=True):
    """Reduction of gradients over the data-parallel axis.

    Args:
        op: `mean` as torch, or `sum` as MindSpore's default.
        dtype: Type on the wire; None keeps the gradients'.
        fuse: Bytes of a bucket, or ascending parameter indices at which a new one begins, or
            `module` for one of each module that has parameters of its own.
        exclude: Patterns of parameter names that are not reduced.
    """

    op: Literal["mean", "sum"] = "mean"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    fuse: int | str | list[int] = "25MiB"
    exclude: list[str] = []

    def __post_init__(self) -> None:
        if isinstance(self.fuse, list):
            if self.fuse != sorted(set(self.fuse)) or any(index < 1 for index in self.fuse):
                raise ValueError(f"fuse: {self.fuse} must be ascending indices from 1")
        elif self.fuse != "module":
            size = _size(self, "fuse")
            if size < 1:
                raise ValueError("fuse: 0 must be at least 1 byte")
            msgspec.structs.force_setattr(self, "fuse", size)


class Recompute(ConfigSection, frozen=True, kw_only=True):
    """Activations that are computed again in the backward pass.

    Args:
        modules: Patterns of modules that keep only their inputs.
        save: What is kept all the same: results of communication, of matrix products.
    """

    modules: list[str]
    save: list[Literal["comm", "matmul"]] = []


class Checkpoint(ConfigSection, frozen=True, kw_only=True):
    """Checkpoints of `rt.save` and `rt.resume`.

    Args:
        dir: Directory of all checkpoints.
        every: Steps between two automatic ones; 0 makes none.
        keep: Newest ones that stay; 0 keeps all.
        is_async: Write in the background.  Key `async`.
        strategy: File that takes the layout of every parameter; None writes none.
    """

    dir: str
    every: int = 0
    keep: int = 5
    is_async: bool = msgspec.field(default=False, name="async")
    strategy: str | None = None

    def __post_init__(self) -> None:
        _at_least(self, "every", 0)
        _at_least(self, "keep", 0)


class ParallelConfig(ConfigSection, frozen=True, kw_only=True):
    """How one model trains on many ranks.

    Args:
        mesh: Axis name -> size, the slowest first; one may be -1, the rest; `auto` finds all.
        mode: What is allowed beside the mesh; None follows from the rest.
        search: With mode auto, how a plan is found; None is exact.
        memory: With mode auto, bytes that a plan may take on a rank; None is any.
        topology: With mode auto, what costs are of: a preset, or a file of `msrun calibrate`;
            None follows the device.
        plan: Operator-level rules; the first that matches a module counts.  With mode auto, wishes
            for parameters.  Or a file: how each parameter is divided, or a plan of mode auto.
        optimizer: Optimizer parallel.
        pipeline: Pipeline parallel; None without.
        recompute: Recomputation; None without.
        accumulate: Micro-batches of one step.
        reduce: Reduction of gradients.
        batch_norm: Statistics of batch norms over the whole batch, or each rank's own.
        dropout: Masks of data-parallel ranks: drawn by each for itself, or those of one process.
        checkpoint: Checkpoints; None leaves them to `rt.save(path)`.
        seed: Seed of all random generators; None leaves them as they are.
    """

    mesh: dict[str, int] | Literal["auto"] = msgspec.field(
        default_factory=lambda: {DATA_AXIS: REST}
    )
    mode: Literal["stand_alone", "data", "semi_auto", "auto", "manual"] | None = None
    search: Search | None = None
    memory: int | str | None = None
    topology: str | None = None
    plan: list[PlanRule] | str = []
    optimizer: Optimizer = Optimizer()
    pipeline: Pipeline | None = None
    recompute: Recompute | None = None
    accumulate: int = 1
    reduce: Reduce = Reduce()
    batch_norm: Literal["sync", "local"] = "sync"
    dropout: Literal["local", "exact"] = "local"
    checkpoint: Checkpoint | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        _at_least(self, "accumulate", 1)
        if self.seed is not None:
            _at_least(self, "seed", 0)
        if self.plan == "":
            raise ValueError("plan: '' names no file")
        is_all_sharded = self.optimizer.zero and not self.optimizer.threshold
        if is_all_sharded and self.reduce.fuse != Reduce().fuse:
            raise ValueError("reduce: fuse needs what optimizer.threshold leaves whole; it is 0")
        self._check_search()
        self._check_mesh()
        for key in ("plan", "pipeline"):
            if getattr(self, key) and self.mode in ("stand_alone", "data", "manual"):
                raise ValueError(f"{key}: mode {self.mode} has none (choose semi_auto)")

    def _check_mesh(self) -> None:
        """Check the names of axes, or what a mesh that is found leaves to say."""
        if self.mesh != "auto":
            for name in self.mesh:
                if not _KEY.fullmatch(name):
                    raise ValueError(f"mesh: {name!r} is no name of an axis (choose such as tp)")
        elif self.mode != "auto":
            raise ValueError("mesh: auto belongs to mode auto")
        elif self.accumulate > 1:
            raise ValueError("accumulate: mesh auto finds the number of micro-batches")
        elif isinstance(self.plan, list) and self.plan:
            raise ValueError("plan: its rules name axes, which mesh auto finds (name the mesh)")

    def _check_search(self) -> None:
        """Check what mode auto has, and what it has not."""
        asked = [key for key in ("search", "memory", "topology") if getattr(self, key) is not None]
        if self.mode != "auto":
            if asked:
                raise ValueError(f"{asked[0]}: belongs to mode auto")
            return
        if asked and isinstance(self.plan, str):
            raise ValueError(f"{asked[0]}: {self.plan} of plan is found already")
        for key in ("optimizer", "pipeline", "recompute", "reduce", "batch_norm"):
            if key in _given(self) and (key != "pipeline" or self.mesh == "auto"):
                raise ValueError(f"{key}: mode auto has none: the search decides")
        if self.memory is not None:
            msgspec.structs.force_setattr(self, "memory", _size(self, "memory"))


def preloads(config: ParallelConfig) -> tuple[str, ...]:
    """Return the modules that a rank with `config` will import, which a parent may do for all."""
    is_sharded = config.optimizer.zero > 0
    needed = {
        "torch.distributed.tensor": bool(config.plan) or is_sharded,
        "torch.distributed.fsdp": is_sharded,
        "torch.distributed.pipelining": config.pipeline is not None,
        "torch.distributed.checkpoint": config.checkpoint is not None,
        "msrun.parallel.runtime": True,
        "msrun.parallel.preload": True,
    }
    return tuple(name for name, is_needed in needed.items() if is_needed)
