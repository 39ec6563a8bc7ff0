"""The parallel configuration as data: one class for each section, one field for each key.

A section checks its own values when it is made.  `config_file` reads sections from YAML, and
`layout` checks everything that depends on the number of ranks.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from msrun.parallel.settings.copies import copies_problem
from msrun.parallel.settings.float8 import Float8, float8_problem
from msrun.parallel.settings.grids import GRID_AXES
from msrun.parallel.settings.host import Offload, offload_problem, overlap_problem
from msrun.parallel.settings.images import check_data, image_axes
from msrun.parallel.settings.plan_rules import Dims, PlanRule
from msrun.parallel.settings.section import ConfigSection
from msrun.parallel.settings.section import at_least as _at_least
from msrun.parallel.settings.section import given as _given
from msrun.parallel.settings.section import size as _size
from msrun.parallel.settings.servers import ServerParameters
from msrun.parallel.settings.steps import Checkpoint, Compile, Verify

ROOT = "parallel"
REST = -1

# Axes with a meaning of their own; every other name is for the operator plan.
DATA_AXIS = "dp"
PIPELINE_AXIS = "pp"
# The axis that plans that ship take where the mesh has several.
TENSOR_AXIS = "tp"

# Axes over which ranks exchange parts of one sample in the forward of a module.
_EXCHANGING_AXES = ("ep", "cp")

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


class Optimizer(ConfigSection, frozen=True, kw_only=True):
    """Optimizer parallel (ZeRO): shards parameters and optimizer state over the axis `dp`.

    Every key but `zero` needs `zero` 1, 2 or 3.

    Args:
        zero: Level.  0 shards nothing; 1 shards optimizer state, and parameters between steps;
            2 also gradients between micro-batches; 3 also parameters between forward and backward.
        shard_size: Ranks that share one copy of the model, a divisor of `dp`; -1 is all of them.
            A smaller number is hybrid sharding: fewer ranks take part in each gather, and each
            rank holds more.
        threshold: Parameters of fewer bytes stay replicated, as a number or text such as `64KiB`;
            0 shards all.
        modules: Patterns of modules whose parameters are gathered together.  An empty list takes
            each member of a `ModuleList` or `Sequential`, or each child of the model if it has
            none.
        dtype: Type of gathered parameters and of the computation; None keeps the type of the
            parameters.
        offload: Whether sharded parameters and optimizer state stay in host memory.  One rank, with
            an axis `dp` of 1, keeps all of them there.  `overlap` also has the next forward of
            `rt.step` begin while they are updated.
    """

    zero: Literal[0, 1, 2, 3] = 0
    shard_size: int = REST
    threshold: int | str = 0
    modules: list[str] = []
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    offload: bool | Literal["overlap"] = False

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "threshold", _size(self, "threshold"))
        if self.shard_size != REST and self.shard_size < 1:
            raise ValueError(f"shard_size: {self.shard_size} must be -1 or at least 1")
        if self.zero == 0:
            for name in _given(self):
                raise ValueError(f"{name}: needs zero 1, 2 or 3")


class Pipeline(ConfigSection, frozen=True, kw_only=True):
    """Pipeline parallel: cuts the model into stages over the axis `pp`.

    Args:
        stages: Module pattern -> stage from 0, in execution order.  Schedules with several
            segments a rank take `[stage, segment]`.  `auto` balances the stages by parameters, or
            by the work of one batch if `rt.shard` gets a `sample`.
        microbatches: Number of micro-batches that a local batch is split into, at least 1.
        schedule: Order of forwards and backwards.  `gpipe` and `1f1b` have one segment a rank,
            the others several; `interleaved_zb`, `zbv` and `dualpipev` also compute gradients of
            weights separately, to fill the waits.
    """

    stages: dict[str, int | tuple[int, int]] | Literal["auto"]
    microbatches: int
    schedule: Schedule = "1f1b"

    def __post_init__(self) -> None:
        _at_least(self, "microbatches", 1)


class Reduce(ConfigSection, frozen=True, kw_only=True):
    """Reduction of gradients over the axis `dp`.

    Args:
        op: `mean` averages gradients over ranks, as torch does; `sum` adds them, as MindSpore does
            by default.
        dtype: Type in which gradients are sent; None keeps their own.
        fuse: Size of a bucket in bytes, as a number or text such as `25MiB`; or `module` for one
            bucket a module; or the ascending indices, from 1, of the parameters at which a new
            bucket begins.  With `zero` it applies to the parameters that `threshold` leaves
            replicated.
        exclude: Patterns of parameters whose gradients are not reduced: each rank keeps its own.
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
    """Recomputation: modules that run forward again in the backward pass, to save memory.

    Args:
        modules: Patterns of modules that save only their inputs.
        save: Results that these modules save all the same: `comm` those of collectives, `matmul`
            those of matrix products.  An empty list saves none.
    """

    modules: list[str]
    save: list[Literal["comm", "matmul"]] = []


class ParallelConfig(ConfigSection, frozen=True, kw_only=True):
    """How one model trains on many ranks.

    Args:
        mesh: Axis name -> size, the slowest-varying first.  One size may be -1: the ranks that are
            left.  The default has all ranks on `dp`.  `auto`, with mode auto, has the search choose
            the mesh.
        rank_list: The rank at each position of the mesh, in row-major order over its axes; an empty
            list is 0, 1 and so on, unless a `layout` of `plan` lists all ranks in another order.
        mode: Check of what the configuration may use.  `stand_alone` allows one rank, `data` only
            the axis `dp`, `semi_auto` everything; `manual` leaves axes beside `dp` to the script;
            `auto` searches the plan.  None allows what `semi_auto` does.
        search: With mode auto, the algorithm that searches the plan; None is `exact`.
        memory: With mode auto, bytes that a plan may use on a rank, as a number or text such as
            `32GiB`; None sets no limit.
        topology: With mode auto, the devices and links whose costs are minimised: the name of a
            preset, or a file of `msrun calibrate`; None takes the preset of the device.
        plan: Operator-level rules; the first rule that matches a module applies.  With mode auto,
            rules are wishes for parameters, inputs and outputs, which the plan keeps.  Among the
            rules, or in their place, `auto_tp` or the name of a family of models such as `llama`
            stands for rules that msrun makes from the model.  A path names a strategy file, or with
            mode auto a plan file.
        optimizer: Optimizer parallel (ZeRO).
        pipeline: Pipeline parallel; None runs without.
        recompute: Recomputation; None recomputes nothing.
        offload: Activations that wait in the memory of the host; None has none there.
        accumulate: Micro-batches that a step splits its local batch into, at least 1; gradients
            are reduced once a step.
        copies: Slices of a micro-batch, at least 1, that take turns in forward and backward, in a
            pipeline in each stage: one computes while a collective of `plan` runs for another.
        reduce: Reduction of gradients over data-parallel ranks.
        batch_norm: `sync` takes the statistics of batch norms over the global batch, `local` over
            each rank's own batch; then ranks may hold other values of any buffer, and the model's
            own code may mix the samples of each part.
        dropout: `local` has each data-parallel rank draw its own masks; `exact` gives the masks of
            one process, and each rank takes the time to draw those of the global batch.  Mode auto
            has masks of its own, which are equal on any number of ranks and not those of torch.
        data: Value of a batch -> axes that divide each of its dims, such as `[dp, null, h, w]` for
            images whose height and width the axes `h` and `w` divide: each rank computes a part of
            every image.  The keys are the values of a step in their order, or by their names.
        servers: Parameters that live on parameter servers; None has none.
        place: Pattern of modules -> `cpu`: embedding tables that stay in the memory of the host,
            with what the optimizer keeps of them; the rows of a batch travel to the device.
        checkpoint: Checkpoints; None writes only those that the script asks for by path.
        precision: `bf16` or `fp16` computes in that type what torch's autocast does, and with
            `zero` also gathers parameters in it; parameters and their gradients keep their own.
            `fp16` scales the loss.  None computes in the types of the model.
        float8: Modules whose linear layers multiply in eight bits; None has none.
        compile: Modules that `torch.compile` compiles, each for itself; None compiles none.
        seed: Seed of the generators of Python, numpy and torch, at least 0; None leaves them as
            they are.
        verify: First steps that rank 0 also computes as one process would, by their number or a
            mapping; a difference is an error.  `first_step` is 1, and 0 verifies nothing.
    """

    mesh: dict[str, int] | Literal["auto"] = msgspec.field(
        default_factory=lambda: {DATA_AXIS: REST}
    )
    rank_list: list[int] = []
    mode: Literal["stand_alone", "data", "semi_auto", "auto", "manual"] | None = None
    search: Search | None = None
    memory: int | str | None = None
    topology: str | None = None
    plan: list[PlanRule | str] | str = []
    optimizer: Optimizer = Optimizer()
    pipeline: Pipeline | None = None
    recompute: Recompute | None = None
    offload: Offload | None = None
    accumulate: int = 1
    copies: int = 1
    reduce: Reduce = Reduce()
    batch_norm: Literal["sync", "local"] = "sync"
    dropout: Literal["local", "exact"] = "local"
    data: dict[str, Dims] = {}
    servers: ServerParameters | None = None
    place: dict[str, Literal["cpu"]] = {}
    checkpoint: Checkpoint | None = None
    precision: Literal["bf16", "fp16"] | None = None
    float8: Float8 | None = None
    compile: Compile | None = None
    seed: int | None = None
    verify: int | Literal["first_step"] | Verify = 0

    def __post_init__(self) -> None:
        _at_least(self, "accumulate", 1)
        _at_least(self, "copies", 1)
        if self.copies > 1 and (problem := copies_problem(self)):
            raise ValueError(f"copies: {problem}")
        if self.offload and (problem := offload_problem(self)):
            raise ValueError(f"offload: {problem}")
        if self.float8 and (problem := float8_problem(self)):
            raise ValueError(f"float8: {problem}")
        if self.optimizer.offload == "overlap" and (problem := overlap_problem(self)):
            raise ValueError(f"optimizer: offload overlap: {problem}")
        self._check_verify()
        if self.seed is not None:
            _at_least(self, "seed", 0)
        self._check_plan()
        check_data(self.data)
        is_all_sharded = self.optimizer.zero and not self.optimizer.threshold
        if is_all_sharded and self.reduce.fuse != Reduce().fuse:
            raise ValueError(
                "reduce: fuse applies to parameters below optimizer.threshold, which is 0"
            )
        self._check_search()
        self._check_context()
        self._check_mesh()
        self._check_precision()
        self._check_servers()
        self._check_place()
        if self.mode == "auto" and self.dropout == "exact":
            raise ValueError(
                "dropout: mode auto has masks of its own, not those of torch (choose local)"
            )
        for key in ("plan", "pipeline"):
            if getattr(self, key) and self.mode in ("stand_alone", "data", "manual"):
                raise ValueError(f"{key}: mode {self.mode} has none (choose semi_auto)")

    @property
    def parts(self) -> int:
        """Parts of a local batch that a step computes, each with a loss of its own."""
        parts = self.pipeline.microbatches if self.pipeline else self.accumulate
        return parts * self.copies

    @property
    def verified(self) -> Verify:
        """What is verified, where something is."""
        return self.verify if isinstance(self.verify, Verify) else Verify(steps=self.verify)

    @property
    def decided(self) -> list[str]:
        """Keys with which the user has decided beside mode auto what a search would."""
        found = _given(self) if self.mode == "auto" else []
        return [key for key in ("optimizer", "recompute", "reduce") if key in found]

    def _check_verify(self) -> None:
        """Refuse to verify what one process does not compute."""
        if self.verify == "first_step":
            msgspec.structs.force_setattr(self, "verify", 1)
        if not isinstance(self.verify, Verify):
            _at_least(self, "verify", 0)
        others = {
            "mode manual divides work in the script, which one process cannot run": self.mode
            == "manual",
            "reduce.op sum gives gradients that one process does not have": self.reduce.op == "sum",
            "batch_norm local gives each rank statistics of its own": self.batch_norm == "local",
        }
        for sentence, is_so in others.items():
            if self.verify and is_so:
                raise ValueError(f"verify: {sentence}")

    def _check_precision(self) -> None:
        """Refuse what has types of its own, or is not composed."""
        for key in (key for key in ("precision", "float8", "compile") if getattr(self, key)):
            if self.mode == "auto":
                raise ValueError(
                    f"{key}: mode auto runs operators in the types of the model (choose semi_auto)"
                )
        mesh = {} if isinstance(self.mesh, str) else self.mesh
        exchanging = (*_EXCHANGING_AXES, *image_axes(self.data))
        axes = [axis for axis in exchanging if mesh.get(axis, 1) != 1]
        if self.float8 and axes:
            raise ValueError(f"float8: was not compared over the axis {axes[0]} (leave out one)")
        if self.precision and self.optimizer.dtype:
            raise ValueError(
                f"precision: {self.precision} chooses optimizer.dtype, which is "
                f"{self.optimizer.dtype} (leave out one of the two)"
            )
        if self.precision and self.verify:
            raise ValueError(
                f"verify: {self.precision} rounds differently in other layouts (leave out "
                "precision where steps are compared)"
            )

    def _check_servers(self) -> None:
        """Refuse what is not composed with parameter servers."""
        others = {
            "mode auto plans whole models": self.mode == "auto",
            "mode manual leaves the reduction to the script": self.mode == "manual",
            "every rank gives them the same parameters, and each stage of a pipeline has its own "
            "(leave out pipeline; ZeRO or a plan divides the rest)": self.pipeline is not None,
            "verify compares with one process, which has no servers": bool(self.verify),
            "precision: fp16 would send them gradients of a scaled loss (choose bf16)": (
                self.precision == "fp16"
            ),
        }
        for sentence, is_so in others.items():
            if self.servers and is_so:
                raise ValueError(f"servers: {sentence}")

    def _check_place(self) -> None:
        """Refuse what knows one device alone."""
        others = {
            "mode auto plans whole models": self.mode == "auto",
            "verify compares what is on the device": bool(self.verify),
            "precision fp16 looks at gradients on the device": self.precision == "fp16",
        }
        for sentence, is_so in others.items():
            if self.place and is_so:
                raise ValueError(f"place: {sentence} (leave out one of the two)")

    def _check_plan(self) -> None:
        """Refuse unknown names; the name of a plan alone becomes a list, so that text is a path."""
        if self.plan == "":
            raise ValueError("plan: '' names no file")
        if not any(isinstance(part, str) for part in self.plan):
            return
        # Runs without such names do not wait for the tables of all families.
        from msrun.parallel.plans.families import PLAN_NAMES, unknown_plan

        if isinstance(self.plan, str):
            if self.plan in PLAN_NAMES:
                msgspec.structs.force_setattr(self, "plan", [self.plan])
            elif _is_key(self.plan):  # no folder and no ending
                raise ValueError(f"plan: {unknown_plan(self.plan)}")
        for index, name in enumerate([] if isinstance(self.plan, str) else self.plan):
            if isinstance(name, str):
                if name not in PLAN_NAMES:
                    raise ValueError(f"plan[{index}]: {unknown_plan(name)}")
                if self.mode == "auto":
                    raise ValueError(
                        f"plan[{index}]: mode auto finds a plan, not {name} (choose semi_auto)"
                    )

    def _check_context(self) -> None:
        """Refuse several rules that divide the one sequence."""
        found = [index for index, rule in self._numbered_rules() if rule.style == "context"]
        if len(found) > 1:
            raise ValueError(f"plan[{found[1]}].style: context stands in plan[{found[0]}] already")

    def _numbered_rules(self) -> list[tuple[int, PlanRule]]:
        """Return the rules of the configuration and their places in `plan`."""
        rules = [] if isinstance(self.plan, str) else self.plan
        return [(index, rule) for index, rule in enumerate(rules) if isinstance(rule, PlanRule)]

    def _check_mesh(self) -> None:
        """Check the names of axes, or with `mesh: auto` refuse keys that the search decides."""
        if self.mesh != "auto":
            for name in self.mesh:
                if not _is_key(name):
                    raise ValueError(f"mesh: {name!r} is no name of an axis (choose such as tp)")
        elif self.mode != "auto":
            raise ValueError("mesh: auto belongs to mode auto")
        elif self.accumulate > 1:
            raise ValueError("accumulate: mesh auto finds the number of micro-batches")
        elif isinstance(self.plan, list) and self.plan:
            raise ValueError("plan: its rules name axes, which mesh auto finds (name the mesh)")

    def _check_search(self) -> None:
        """Refuse keys of the search in other modes, and in mode auto keys that it decides."""
        asked = [key for key in ("search", "memory", "topology") if getattr(self, key) is not None]
        if self.mode != "auto":
            if asked:
                raise ValueError(f"{asked[0]}: belongs to mode auto")
            return
        if asked and isinstance(self.plan, str):
            raise ValueError(f"{asked[0]}: {self.plan} is a plan already, so nothing is searched")
        for key in ("pipeline", "batch_norm"):
            if key in _given(self) and (key != "pipeline" or self.mesh == "auto"):
                raise ValueError(f"{key}: mode auto has none: the search decides")
        self._check_wishes()
        if self.memory is not None:
            msgspec.structs.force_setattr(self, "memory", _size(self, "memory"))

    def _check_wishes(self) -> None:
        """Refuse rules that are no wishes for layouts."""
        for index, rule in self._numbered_rules():
            if rule.style == "context":
                raise ValueError(
                    f"plan[{index}].style: context: mode auto plans whole sequences (choose "
                    "semi_auto)"
                )
            if rule.style in GRID_AXES or rule.rows is not None:
                key = f"style: {rule.style}" if rule.style else "rows"
                raise ValueError(
                    f"plan[{index}].{key}: mode auto finds layouts of whole products and even "
                    "tables (choose semi_auto)"
                )


def _is_key(name: str) -> bool:
    """Return whether `name` has letters, digits and underscores alone, and no digit first."""
    return name.isidentifier() and name.isascii()


def preloads(config: ParallelConfig) -> tuple[str, ...]:
    """Return the modules that a rank with `config` imports; a forkserver imports them once."""
    is_sharded = config.optimizer.zero > 0
    needed = {
        "torch.distributed.tensor": bool(config.plan) or is_sharded,
        "torch.distributed.fsdp": is_sharded,
        "torch.distributed.pipelining": config.pipeline is not None,
        "torch.distributed.checkpoint": config.checkpoint is not None,
        "msrun.parallel.servers.process": config.servers is not None,
        "msrun.parallel.servers.remote": config.servers is not None,
        "msrun.parallel.runtime": True,
        "msrun.parallel.preload": True,
    }
    return tuple(name for name, is_needed in needed.items() if is_needed)
