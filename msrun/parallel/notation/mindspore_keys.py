"""Keys and values of MindSpore's auto parallel context, translated to those of this configuration.

Each key of MindSpore becomes one or several of ours, or a sentence that names ours.  Nothing is
ignored: what has no effect here is refused unless it asks for what happens anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from msrun.errors import ConfigError
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS, REST, ROOT

Value = Any  # a plain value of YAML
Tree = dict[str, Any]

# MindSpore's modes and, of its newer interface, algorithms -> our mode and search.
_MODES: dict[str, dict[str, str]] = {
    "data_parallel": {"mode": "data"},
    "semi_auto_parallel": {"mode": "semi_auto"},
    "hybrid_parallel": {"mode": "manual"},
    "auto_parallel": {"mode": "auto"},
}
_NEW_MODES: dict[str, dict[str, str]] = {
    "stand_alone": {"mode": "stand_alone"},
    "semi_auto": {"mode": "semi_auto"},
    "sharding_propagation": {"mode": "auto", "search": "sharding_propagation"},
    "recursive_programming": {"mode": "auto", "search": "recursive_programming"},
    "dynamic_programming": {"mode": "auto", "search": "dynamic_programming"},
}
_LEVELS = {"level1": 1, "level2": 2, "level3": 3}
# MindSpore's default of `parallel_optimizer_threshold`, in KB, and its `auto` of a fusion, in MB.
_THRESHOLD, _FUSION = 64, 64
_BY_LOADER = "rt.loader(dataset, batch_size) divides batches over the axis dp"
_ONCE = "work that ranks repeat counts once (reduce.op is for dp alone)"
_RANKS = "msrun --worker-num says how many ranks there are, and each has its RANK"

_GROUPS = "checkpoint.dir holds the layout of all ranks, and needs no groups"
_NORM = "rt.clip_grad_norm_ returns the norm of the gradients"

_REFUSED = {
    "device_num": _RANKS,
    "global_rank": _RANKS,
    "enable_alltoall": "the search picks all-to-all itself where it is cheaper",
    "communi_parallel_mode": "torch chooses the streams of collectives",
}
# The same, unless they are off.
_REFUSED_IF_ON = {
    "group_ckpt_save_file": _GROUPS,
    "set_group_ckpt_save_file": _GROUPS,
    "dump_local_norm": _NORM,
    "dump_local_norm_path": _NORM,
    "dump_device_local_norm": _NORM,
    "print_local_norm": _NORM,
    "enable_device_local_norm": _NORM,
    "no_init_parameters_in_compile": "rt.init_on_meta makes a model without values",
    "transformer_opt": "collectives overlap with the backward pass anyway, and compile fuses",
}
_SCHEDULES = {"gpipe": "gpipe", "1f1b": "1f1b", "zero_bubble_v": "zbv"}
# Words of `AutoParallel.pipeline` beside `stages`.
_OF_PIPELINE = ("interleave", "scheduler", "output_broadcast")


def translate(tree: Mapping[str, Any]) -> tuple[Tree, list[tuple[str, str]]]:
    """Return `tree` in our keys, and which words of MindSpore became which of ours.

    Raises:
        ConfigError: A key has no counterpart, contradicts ours, or has a value that is none of its.
    """
    return _Translation(tree).run()


class _Translation:
    """One configuration on its way from MindSpore's keys to ours."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self._given = tree
        self._tree = {
            key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()
        }
        self._rows: list[tuple[str, str]] = []
        self._key, self._ours = "", list[str]()

    def run(self) -> tuple[Tree, list[tuple[str, str]]]:
        self._mode_value()
        self._manual_split()
        self._pipeline()
        for key, value in self._given.items():
            if key in _REFUSED:
                self._key = str(key)
                self._refuse(_REFUSED[key])
            if read := _READERS.get(key):
                self._key, self._ours = key, []
                del self._tree[key]
                read(self, value)
                self._note(value)
        return self._tree, self._rows

    def _note(self, value: Value) -> None:
        said = ", ".join(self._ours) or "as it is here anyway"
        self._rows.append((f"{self._key}: {_shown(value)}", said))

    def _pipeline(self) -> None:
        """Read the words of `AutoParallel.pipeline` under our key."""
        given = self._given.get("pipeline")
        if not isinstance(given, Mapping):
            return
        count = given.get("stages")
        is_count = isinstance(count, int)
        theirs = [*filter(given.__contains__, _OF_PIPELINE)]
        if not (is_count or theirs):
            return
        self._key, self._ours = "pipeline", []
        own = [key for key in given if key not in theirs and not (is_count and key == "stages")]
        self._tree["pipeline"] = {key: given[key] for key in own}
        if is_count:
            self.stages(count)
            self.put("pipeline.stages", "auto")
        if "scheduler" in theirs or "interleave" in theirs:
            self.schedule(given.get("scheduler", "1f1b"), given.get("interleave", False))
        self._flag(given.get("output_broadcast", False))  # all ranks have the outputs anyway
        self._note({key: given[key] for key in given if key not in own})

    def _mode_value(self) -> None:
        """Read MindSpore's name of a mode under our key."""
        mode = self._given.get("mode")
        if isinstance(mode, str) and mode in _MODES:
            self._tree["mode"] = _MODES[mode]["mode"]
            self._rows.append((f"mode: {mode}", f"mode: {self._tree['mode']}"))

    def _manual_split(self) -> None:
        """Read MindSpore's attribute of `Gather` in rules, where ours is `rows`."""
        rules = self._given.get("plan")
        for index, rule in enumerate(rules if isinstance(rules, list) else ()):
            if not isinstance(rule, Mapping) or "manual_split" not in rule:
                continue
            self._key = f"plan[{index}].manual_split"
            value = rule["manual_split"]
            if "rows" in rule:
                self._refuse("is rows, which the rule has too")
            if not isinstance(value, list | tuple) or not all(type(n) is int for n in value):
                self._refuse(f"{_shown(value)} is no list of numbers of rows")
            ours = {key: each for key, each in rule.items() if key != "manual_split"}
            self._tree["plan"] = [*self._tree["plan"]]
            self._tree["plan"][index] = {**ours, "rows": list(value)}
            said = f"plan[{index}].rows: {_shown(list(value))}"
            self._rows.append((f"{self._key}: {_shown(list(value))}", said))

    def put(self, path: str, value: Value) -> None:
        """Set our key at `path`, unless the configuration has it itself."""
        section, _, key = path.rpartition(".")
        target = self._tree
        if section:
            target = self._tree.setdefault(section, {})
            if not isinstance(target, dict):
                self._refuse(f"is {path}, and {section} is {_shown(target)}")
        if key in target and target[key] != value:
            self._refuse(
                f"is {path}: {_shown(value)}, which is given as {_shown(target[key])}, too"
            )
        target[key] = value
        self._ours.append(f"{path}: {_shown(value)}")

    def mode(self, value: Value) -> None:
        names = _MODES | _NEW_MODES
        if not isinstance(value, str) or value not in names:
            self._refuse(f"{_shown(value)} is not known (choose {', '.join(names)})")
        for key, ours in names[value].items():
            self.put(key, ours)

    def search(self, value: Value) -> None:
        self.put("search", value)

    def gradients_mean(self, value: Value) -> None:
        self.put("reduce.op", "mean" if self._flag(value) else "sum")

    def float32_sync(self, value: Value) -> None:
        if self._flag(value):
            self.put("reduce.dtype", "float32")

    def no_float32_sync(self, value: Value) -> None:
        self.float32_sync(not self._flag(value))

    def only_off(self, value: Value) -> None:
        if value not in (None, False, ""):
            self._refuse(_REFUSED_IF_ON[self._key])

    def any_flag(self, value: Value) -> None:
        self._flag(value)

    def hsdp(self, value: Value) -> None:
        """Read the arguments of `AutoParallel.hsdp`, which turns optimizer parallel on."""
        config = self._section(value, "shard_size", "threshold", "optimizer_level")
        level = config.get("optimizer_level", "level1")
        if not isinstance(level, str) or level not in _LEVELS:
            self._refuse(f"optimizer_level {_shown(level)} is not known ({', '.join(_LEVELS)})")
        self.put("optimizer.zero", _LEVELS[level])
        self.put("optimizer.threshold", f"{self._number(config.get('threshold', _THRESHOLD))}KiB")
        self.put("optimizer.shard_size", self._number(config.get("shard_size", -1)))

    def only_true(self, value: Value, sentence: str) -> None:
        """Take `value` if it is true, which is so here anyway."""
        if not self._flag(value):
            self._refuse(sentence)

    def accumulation(self, value: Value) -> None:
        self.put("accumulate", self._number(value))

    def copies(self, value: Value) -> None:
        self.put("copies", self._number(value))

    def full_batch(self, value: Value) -> None:
        mesh = self._tree.get("mesh")
        has_no_dp = isinstance(mesh, Mapping) and mesh.get(DATA_AXIS, 1) == 1
        if self._flag(value) and not has_no_dp:
            self._refuse(f"true: {_BY_LOADER} (leave dp out of mesh to give all ranks the same)")

    def dataset_strategy(self, value: Value) -> None:
        if value == "full_batch":
            self.full_batch(value=True)
        elif value != "data_parallel":
            self._refuse(
                f"{_shown(value)}: {_BY_LOADER}; `in` of a rule of plan shards an input further"
            )

    def stages(self, value: Value) -> None:
        count = self._number(value)
        mesh = self._tree.get("mesh", {DATA_AXIS: REST})
        if count == 1 and not (isinstance(mesh, Mapping) and mesh.get(PIPELINE_AXIS, 1) != 1):
            return
        if not isinstance(mesh, Mapping):
            self._refuse(f"is mesh.{PIPELINE_AXIS}, and mesh is {_shown(mesh)}")
        if mesh.get(PIPELINE_AXIS, count) != count:
            self._refuse(f"{count} is mesh.{PIPELINE_AXIS}, which is {mesh[PIPELINE_AXIS]}")
        if "pipeline" not in self._given and "pipeline_config" not in self._given:
            self._refuse(
                f"{count} stages need {ROOT}.pipeline (stages: auto and microbatches, which "
                "MindSpore's Pipeline takes as micro_size)"
            )
        # Stages are the slowest-varying axis, as in MindSpore.
        self._tree["mesh"] = {PIPELINE_AXIS: count, **mesh}
        self._ours.append(f"mesh.{PIPELINE_AXIS}: {count}")

    def pipeline_config(self, value: Value) -> None:
        config = self._section(value, "pipeline_interleave", "pipeline_scheduler")
        scheduler = config.get("pipeline_scheduler", "1f1b")
        self.schedule(scheduler, config.get("pipeline_interleave", False))

    def schedule(self, scheduler: Value, interleave: Value) -> None:
        """Set `pipeline.schedule` to what MindSpore's two words mean."""
        if not isinstance(scheduler, str) or scheduler not in _SCHEDULES:
            self._refuse(
                f"pipeline_scheduler {_shown(scheduler)} is not known: pipeline.schedule has "
                "gpipe, 1f1b, interleaved, looped_bfs, interleaved_zb, zbv and dualpipev"
            )
        schedule = _SCHEDULES[scheduler]
        if self._flag(interleave):
            schedule = {"gpipe": "looped_bfs", "1f1b": "interleaved"}.get(schedule, schedule)
        self.put("pipeline.schedule", schedule)

    def auto_pipeline(self, value: Value) -> None:
        if self._flag(value):
            self.put("pipeline.stages", "auto")

    def comm_fusion(self, value: Value) -> None:
        config = self._section(value, "openstate", "allreduce", "allgather", "reducescatter")
        for name in ("allgather", "reducescatter"):
            if name in config:
                self._refuse(f"{name}: optimizer.modules says what is gathered together")
        if not self._flag(config.get("openstate", True)):
            self.put("reduce.fuse", 1)
            return
        if "allreduce" not in config:
            return
        rule = self._section(config["allreduce"], "mode", "config")
        mode, size = rule.get("mode", "auto"), rule.get("config")
        match mode:
            case "auto":
                self.put("reduce.fuse", f"{_FUSION}MiB")
            case "size":
                self.put("reduce.fuse", f"{self._number(size)}MiB")
            case "index":
                self.fusion_indices(size)
            case _:
                self._refuse(f"allreduce mode {_shown(mode)} is not known (auto, size or index)")

    def fusion_indices(self, value: Value) -> None:
        if not isinstance(value, list):
            self._refuse(f"{_shown(value)} is no list of indices")
        self.put("reduce.fuse", value)

    def parallel_optimizer(self, value: Value) -> None:
        config = self._given.get("parallel_optimizer_config")
        is_level = isinstance(config, Mapping) and bool(
            {"optimizer_level", "gradient_accumulation_shard"} & set(config)
        )
        if not self._flag(value):
            zero = self._tree.get("optimizer", {})
            if is_level or (isinstance(zero, Mapping) and zero.get("zero")):
                self._refuse("false is optimizer.zero: 0, and a level is given, too")
            return
        optimizer = self._tree.get("optimizer", {})
        if not (isinstance(optimizer, Mapping) and "zero" in optimizer) and not is_level:
            self.put("optimizer.zero", 1)
        is_given = isinstance(config, Mapping) and "parallel_optimizer_threshold" in config
        is_given |= "parallel_optimizer_threshold" in self._given
        if not is_given and not (isinstance(optimizer, Mapping) and "threshold" in optimizer):
            self.put("optimizer.threshold", f"{_THRESHOLD}KiB")

    def optimizer_config(self, value: Value) -> None:
        config = self._section(
            value,
            "gradient_accumulation_shard",
            "parallel_optimizer_threshold",
            "optimizer_weight_shard_size",
            "optimizer_level",
        )
        level = config.get("optimizer_level")
        if level is not None and (not isinstance(level, str) or level not in _LEVELS):
            self._refuse(f"optimizer_level {_shown(level)} is not known ({', '.join(_LEVELS)})")
        if "gradient_accumulation_shard" in config:
            is_sharded = self._flag(config["gradient_accumulation_shard"])
            implied = "level2" if is_sharded else "level1"
            if is_sharded and level == "level1":
                self._refuse("gradient_accumulation_shard true is level2, not optimizer_level 1")
            level = level or implied
        if level is not None and self._is_on():
            self.put("optimizer.zero", _LEVELS[level])
        if "parallel_optimizer_threshold" in config:
            self.threshold(config["parallel_optimizer_threshold"])
        if "optimizer_weight_shard_size" in config:
            self.shard_size(config["optimizer_weight_shard_size"])

    def _is_on(self) -> bool:
        """Return whether optimizer parallel is on; refuse its settings if it is not."""
        optimizer = self._given.get("optimizer")
        is_ours = isinstance(optimizer, Mapping) and bool(optimizer.get("zero"))
        if not is_ours and self._given.get("enable_parallel_optimizer") is not True:
            self._refuse("needs enable_parallel_optimizer: true, or optimizer.zero")
        return True

    def threshold(self, value: Value) -> None:
        if self._is_on():
            self.put("optimizer.threshold", f"{self._number(value)}KiB")

    def shard_size(self, value: Value) -> None:
        if self._is_on():
            self.put("optimizer.shard_size", self._number(value))

    def load_strategy(self, value: Value) -> None:
        if value != "":
            self.put("plan", value)

    def save_strategy(self, value: Value) -> None:
        if value == "":
            return
        if "checkpoint" not in self._given:
            self._refuse("is checkpoint.strategy, which needs checkpoint.dir")
        self.put("checkpoint.strategy", value)

    def strategy_config(self, value: Value) -> None:
        config = self._section(value, "load_file", "save_file", "only_trainable_params")
        if self._flag(config.get("only_trainable_params", False)):
            self._refuse("only_trainable_params: checkpoint.strategy names every parameter")
        self.load_strategy(config.get("load_file", ""))
        self.save_strategy(config.get("save_file", ""))

    def _section(self, value: Value, *keys: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            self._refuse(f"{_shown(value)} is no mapping")
        for key in value:
            if key not in keys:
                self._refuse(f"{_shown(key)} is no key of it (choose {', '.join(keys)})")
        return value

    def _flag(self, value: Value) -> bool:
        if not isinstance(value, bool):
            self._refuse(f"{_shown(value)} is neither true nor false")
        return value

    def _number(self, value: Value) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            self._refuse(f"{_shown(value)} is no whole number")
        return value

    def _refuse(self, sentence: str) -> NoReturn:
        raise ConfigError(f"{ROOT}.{self._key}: {sentence}")


def _broadcast(self: _Translation, value: Value) -> None:
    self.only_true(value, "false: rt.shard gives all ranks the values of rank 0")


def _repeated(self: _Translation, value: Value) -> None:
    self.only_true(value, f"false: {_ONCE}")


def _not_repeated(self: _Translation, value: Value) -> None:
    if self._flag(value):
        self._refuse(_ONCE)


def _every_parameter(self: _Translation, value: Value) -> None:
    self.only_true(value, "false: checkpoint.strategy names every parameter")


_READERS: dict[str, Callable[[_Translation, Value], None]] = {
    "parallel_mode": _Translation.mode,
    "search_mode": _Translation.search,
    "auto_parallel_search_mode": _Translation.search,
    "gradients_mean": _Translation.gradients_mean,
    "gradient_fp32_sync": _Translation.float32_sync,
    "force_fp32_communication": _Translation.float32_sync,
    "parameter_broadcast": _broadcast,
    "loss_repeated_mean": _repeated,
    "grad_accumulation_step": _Translation.accumulation,
    # Of `MicroBatchInterleaved(network, interleave_num)`.
    "interleave_num": _Translation.copies,
    "micro_batch_interleaved": _Translation.copies,
    "full_batch": _Translation.full_batch,
    "dataset_strategy": _Translation.dataset_strategy,
    "pipeline_stages": _Translation.stages,
    "pipeline_config": _Translation.pipeline_config,
    "auto_pipeline": _Translation.auto_pipeline,
    "comm_fusion": _Translation.comm_fusion,
    "all_reduce_fusion_config": _Translation.fusion_indices,
    "enable_parallel_optimizer": _Translation.parallel_optimizer,
    "parallel_optimizer_config": _Translation.optimizer_config,
    "parallel_optimizer_threshold": _Translation.threshold,
    "optimizer_weight_shard_size": _Translation.shard_size,
    "strategy_ckpt_load_file": _Translation.load_strategy,
    "strategy_ckpt_save_file": _Translation.save_strategy,
    "strategy_ckpt_config": _Translation.strategy_config,
    # All ranks of a pipeline have its outputs outside of a step.
    "pipeline_result_broadcast": _Translation.any_flag,
    # Methods of `AutoParallel`, with their argument or true.
    "hsdp": _Translation.hsdp,
    "enable_gradients_mean": _Translation.gradients_mean,
    "enable_fp32_communication": _Translation.float32_sync,
    "disable_gradient_fp32_sync": _Translation.no_float32_sync,
    "disable_loss_repeated_mean": _not_repeated,
    "load_param_strategy_file": _Translation.load_strategy,
    "load_operator_strategy_file": _Translation.load_strategy,
    "save_param_strategy_file": _Translation.save_strategy,
    "save_operator_strategy_file": _Translation.save_strategy,
    "disable_strategy_file_only_for_trainable_params": _every_parameter,
    **dict.fromkeys(_REFUSED_IF_ON, _Translation.only_off),
}
# Every key that this module knows.
KEYS = frozenset([*_READERS, *_REFUSED])


def _shown(value: Value) -> str:
    """Return `value` as YAML shows it, shortened."""
    match value:
        case bool():
            return str(value).lower()
        case None:
            return "null"
        case Mapping():
            return f"{{{', '.join(f'{key}: {_shown(each)}' for key, each in value.items())}}}"[:100]
        case list():
            return f"[{', '.join(map(_shown, value))}]"[:100]
        case _:
            return str(value)[:60]
