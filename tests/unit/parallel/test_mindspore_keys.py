"""MindSpore's words in a configuration: each becomes ours, or is refused with our name for it."""

import pytest

from msrun.errors import UsageError
from msrun.parallel.config_file import parse_config, read_translations
from msrun.parallel.layout import resolve
from msrun.parallel.notation.mindspore_keys import KEYS
from msrun.parallel.plans.module_shape import ModuleShape
from msrun.parallel.tensor.plan import plan_modules

PIPELINE = {"pipeline": {"stages": "auto", "microbatches": 4}}
CHECKPOINT = {"checkpoint": {"dir": "ckpt"}}
ZERO = {"enable_parallel_optimizer": True}


def fusion(**rule):
    return {"comm_fusion": {"openstate": True, "allreduce": rule}}


def optimizer(**settings):
    return {**ZERO, "parallel_optimizer_config": settings}


COLUMNS = {"mesh": {"tp": 2}, "plan": [{"match": "up", "style": "colwise"}]}
SAME = [
    ({"parallel_mode": "stand_alone"}, {"mode": "stand_alone"}),
    ({"parallel_mode": "data_parallel"}, {"mode": "data"}),
    ({"parallel_mode": "hybrid_parallel"}, {"mode": "manual"}),
    ({"parallel_mode": "semi_auto_parallel"}, {"mode": "semi_auto"}),
    ({"mode": "semi_auto_parallel"}, {"mode": "semi_auto"}),
    (
        {"parallel_mode": "auto_parallel", "search_mode": "recursive_programming"},
        {"mode": "auto", "search": "recursive_programming"},
    ),
    (
        {"parallel_mode": "auto_parallel", "auto_parallel_search_mode": "sharding_propagation"},
        {"mode": "auto", "search": "sharding_propagation"},
    ),
    (
        {"parallel_mode": "sharding_propagation"},
        {"mode": "auto", "search": "sharding_propagation"},
    ),
    ({"gradients_mean": True}, {"reduce": {"op": "mean"}}),
    ({"gradients_mean": False}, {"reduce": {"op": "sum"}}),
    ({"gradient_fp32_sync": True}, {"reduce": {"dtype": "float32"}}),
    ({"force_fp32_communication": False}, {}),
    ({"parameter_broadcast": True, "loss_repeated_mean": True}, {}),
    ({"full_batch": False, "dataset_strategy": "data_parallel"}, {}),
    ({"full_batch": True, "mesh": {"tp": 2}}, {"mesh": {"tp": 2}}),
    ({"grad_accumulation_step": 4}, {"accumulate": 4}),
    ({"pipeline_stages": 2, **PIPELINE}, {"mesh": {"pp": 2, "dp": -1}, **PIPELINE}),
    ({"pipeline_stages": 1}, {}),
    (
        {
            "pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "1f1b"},
            **PIPELINE,
        },
        {"pipeline": {**PIPELINE["pipeline"], "schedule": "interleaved"}},
    ),
    (
        {"auto_pipeline": True, "pipeline": {"microbatches": 4}},
        PIPELINE,
    ),
    (fusion(mode="auto", config=None), {"reduce": {"fuse": "64MiB"}}),
    (fusion(mode="size", config=32), {"reduce": {"fuse": "32MiB"}}),
    (fusion(mode="index", config=[2, 4]), {"reduce": {"fuse": [2, 4]}}),
    ({"comm_fusion": {"openstate": False}}, {"reduce": {"fuse": 1}}),
    ({"all_reduce_fusion_config": [20, 35]}, {"reduce": {"fuse": [20, 35]}}),
    (ZERO, {"optimizer": {"zero": 1, "threshold": "64KiB"}}),
    ({"enable_parallel_optimizer": False}, {}),
    (
        optimizer(gradient_accumulation_shard=True, parallel_optimizer_threshold=24),
        {"optimizer": {"zero": 2, "threshold": "24KiB"}},
    ),
    (
        optimizer(optimizer_level="level3", optimizer_weight_shard_size=2),
        {"optimizer": {"zero": 3, "shard_size": 2, "threshold": "64KiB"}},
    ),
    (
        {**ZERO, "parallel_optimizer_threshold": 8, "optimizer_weight_shard_size": -1},
        {"optimizer": {"zero": 1, "threshold": "8KiB", "shard_size": -1}},
    ),
    ({"strategy_ckpt_load_file": "a.json"}, {"plan": "a.json"}),
    ({"load_param_strategy_file": "a.json"}, {"plan": "a.json"}),
    ({"load_operator_strategy_file": "a.json"}, {"plan": "a.json"}),
    (
        {"save_param_strategy_file": "b.json", **CHECKPOINT},
        {"checkpoint": {"dir": "ckpt", "strategy": "b.json"}},
    ),
    (
        {"save_operator_strategy_file": "b.json", **CHECKPOINT},
        {"checkpoint": {"dir": "ckpt", "strategy": "b.json"}},
    ),
    ({"disable_strategy_file_only_for_trainable_params": True}, {}),
    ({"enable_gradients_mean": True}, {"reduce": {"op": "mean"}}),
    ({"enable_fp32_communication": True}, {"reduce": {"dtype": "float32"}}),
    ({"disable_gradient_fp32_sync": True, "disable_loss_repeated_mean": False}, {}),
    ({"pipeline_result_broadcast": True}, {}),
    (
        {"hsdp": {"shard_size": 2, "optimizer_level": "level3"}},
        {"optimizer": {"zero": 3, "threshold": "64KiB", "shard_size": 2}},
    ),
    ({"hsdp": {}}, {"optimizer": {"zero": 1, "threshold": "64KiB", "shard_size": -1}}),
    (
        {"pipeline": {"stages": 2, "interleave": True, "microbatches": 4}},
        {
            "mesh": {"pp": 2, "dp": -1},
            "pipeline": {**PIPELINE["pipeline"], "schedule": "interleaved"},
        },
    ),
    (
        {"pipeline_config": {"pipeline_scheduler": "zero_bubble_v"}, **PIPELINE},
        {"pipeline": {**PIPELINE["pipeline"], "schedule": "zbv"}},
    ),
    ({"dump_local_norm": False, "group_ckpt_save_file": "", "transformer_opt": None}, {}),
    ({"interleave_num": 2, **COLUMNS}, {"copies": 2, **COLUMNS}),
    ({"micro_batch_interleaved": 2, **COLUMNS}, {"copies": 2, **COLUMNS}),
    (
        {
            "strategy_ckpt_config": {"save_file": "b.json", "only_trainable_params": False},
            **CHECKPOINT,
        },
        {"checkpoint": {"dir": "ckpt", "strategy": "b.json"}},
    ),
    (
        {"strategy_ckpt_save_file": "b.json", **CHECKPOINT},
        {"checkpoint": {"dir": "ckpt", "strategy": "b.json"}},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours"), SAME)
def test_words_of_mindspore_are_ours(theirs, ours):
    assert parse_config(theirs) == parse_config(ours)


REFUSED = [
    ({"device_num": 8}, "device_num: msrun --worker-num says how many ranks there are"),
    ({"global_rank": 1}, "global_rank: msrun --worker-num says how many ranks there are"),
    ({"enable_alltoall": True}, "enable_alltoall: the search picks all-to-all itself"),
    ({"communi_parallel_mode": "x"}, "communi_parallel_mode: torch chooses the streams"),
    ({"group_ckpt_save_file": "x"}, "group_ckpt_save_file: checkpoint.dir holds the layout"),
    ({"dump_local_norm": True}, "dump_local_norm: rt.clip_grad_norm_ returns the norm"),
    ({"dump_local_norm_path": "x"}, "dump_local_norm_path: rt.clip_grad_norm_ returns the norm"),
    ({"dump_device_local_norm": True}, "dump_device_local_norm: rt.clip_grad_norm_ returns"),
    ({"print_local_norm": True}, "print_local_norm: rt.clip_grad_norm_ returns the norm"),
    ({"enable_device_local_norm": True}, "enable_device_local_norm: rt.clip_grad_norm_ returns"),
    ({"set_group_ckpt_save_file": "x"}, "set_group_ckpt_save_file: checkpoint.dir holds"),
    ({"no_init_parameters_in_compile": True}, "no_init_parameters_in_compile: rt.init_on_meta"),
    ({"transformer_opt": "x.json"}, "transformer_opt: collectives overlap with the backward"),
    ({"disable_loss_repeated_mean": True}, "disable_loss_repeated_mean: work that ranks repeat"),
    ({"hsdp": {"level": 1}}, "hsdp: level is no key of it (choose shard_size, threshold, optim"),
    ({"hsdp": {"optimizer_level": 1}}, "hsdp: optimizer_level 1 is not known (level1, level2"),
    ({"pipeline": {"stages": 2}}, "pipeline.microbatches: is missing"),
    (
        {"pipeline": {"stages": 2, "scheduler": "seqpipe"}},
        "pipeline: pipeline_scheduler seqpipe is not known: pipeline.schedule has gpipe",
    ),
    ({"parallel_mode": "auto"}, "parallel_mode: auto is not known (choose data_parallel, "),
    ({"parallel_mode": ["auto"]}, "parallel_mode: [auto] is not known (choose data_parallel, "),
    (
        {"parallel_mode": "data_parallel", "mode": "auto"},
        "parallel_mode: is mode: data, which is given as auto, too",
    ),
    ({"gradients_mean": 1}, "gradients_mean: 1 is neither true nor false"),
    (
        {"gradients_mean": True, "reduce": {"op": "sum"}},
        "reduce.op: mean, which is given as sum, too",
    ),
    ({"gradients_mean": True, "reduce": 3}, "gradients_mean: is reduce.op, and reduce is 3"),
    ({"parameter_broadcast": False}, "parameter_broadcast: false: rt.shard gives all ranks"),
    ({"loss_repeated_mean": False}, "loss_repeated_mean: false: work that ranks repeat"),
    ({"full_batch": True}, "full_batch: true: rt.loader(dataset, batch_size) divides batches"),
    ({"dataset_strategy": "full_batch"}, "dataset_strategy: true: rt.loader(dataset, "),
    ({"dataset_strategy": [[2, 1]]}, "dataset_strategy: [[2, 1]]: rt.loader(dataset, "),
    ({"pipeline_stages": 2}, "pipeline_stages: 2 stages need parallel.pipeline"),
    ({"pipeline_stages": "2"}, "pipeline_stages: 2 is no whole number"),
    (
        {"pipeline_stages": 2, "mesh": {"pp": 4}, **PIPELINE},
        "pipeline_stages: 2 is mesh.pp, which is 4",
    ),
    (
        {"pipeline_stages": 2, "mesh": "auto", **PIPELINE},
        "pipeline_stages: is mesh.pp, and mesh is auto",
    ),
    (
        {"pipeline_config": {"pipeline_scheduler": "seqpipe"}},
        "pipeline_config: pipeline_scheduler seqpipe is not known: pipeline.schedule has gpipe",
    ),
    ({"pipeline_config": {"a": 1}}, "pipeline_config: a is no key of it (choose pipeline_inter"),
    ({"comm_fusion": 3}, "comm_fusion: 3 is no mapping"),
    ({"comm_fusion": {"allgather": {}}}, "comm_fusion: allgather: optimizer.modules says what"),
    (fusion(mode="all"), "comm_fusion: allreduce mode all is not known (auto, size or index)"),
    (fusion(mode="index", config=3), "comm_fusion: 3 is no list of indices"),
    (optimizer(optimizer_level="level4"), "parallel_optimizer_config: optimizer_level level4 is "),
    (
        {"parallel_optimizer_config": {"optimizer_level": "level2"}},
        "parallel_optimizer_config: needs enable_parallel_optimizer: true, or optimizer.zero",
    ),
    (
        {"parallel_optimizer_threshold": 3},
        "parallel_optimizer_threshold: needs enable_parallel_optimizer: true, or optimizer.zero",
    ),
    (
        {"enable_parallel_optimizer": False, "optimizer": {"zero": 1}},
        "enable_parallel_optimizer: false is optimizer.zero: 0, and a level is given, too",
    ),
    (
        optimizer(gradient_accumulation_shard=True, optimizer_level="level1"),
        "parallel_optimizer_config: gradient_accumulation_shard true is level2, not ",
    ),
    (
        {"strategy_ckpt_save_file": "x.json"},
        "strategy_ckpt_save_file: is checkpoint.strategy, which needs checkpoint.dir",
    ),
    (
        {"strategy_ckpt_config": {"only_trainable_params": True}},
        "strategy_ckpt_config: only_trainable_params: checkpoint.strategy names every parameter",
    ),
]


@pytest.mark.parametrize(("tree", "sentence"), REFUSED)
def test_a_word_without_a_counterpart_is_refused_with_ours(tree, sentence):
    with pytest.raises(UsageError) as caught:
        parse_config(tree)
    assert caught.value.message.startswith("parallel.")
    assert sentence in caught.value.message


def test_every_word_is_tested():
    named = {key for tree, _ in (*SAME, *REFUSED) for key in tree}

    assert named >= KEYS


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ({"in": [None, "dp"]}, "in: dp divides the batch, which is dim 0, and not dim 1"),
        ({"strategy": [[1, 8], [1, 8]]}, "strategy: weight would be sharded over dp, which "),
        (
            {"layout": {"device_matrix": [2, 4], "alias_name": ["a", "b"],
                        "params": {"weight": ["a", "b"]}}},
            "layout: weight would be sharded over dp, which divides the batch",
        ),
        (
            {"layout": {"device_matrix": [8, 2], "alias_name": ["a", "interleaved_parallel"],
                        "params": {"weight": ["None", "interleaved_parallel"]}}},
            "layout.params.weight: interleaved_parallel cuts inputs and outputs, not parameters",
        ),
        (
            {"layout": {"device_matrix": [8, 2], "alias_name": ["a", "interleaved_parallel"],
                        "out": ["interleaved_parallel", "None"]}},
            "layout.out: interleaved_parallel cuts dim 0, and of `in` none",
        ),
        (
            {"layout": {"device_matrix": [8, 2], "alias_name": ["a", "interleaved_parallel"],
                        "in": ["None", "interleaved_parallel"]}},
            "layout.in: interleaved_parallel cuts dim 1 of 2, over which Linear computes",
        ),
        (
            {"layout": {"device_matrix": [8, 2], "alias_name": ["a", "interleaved_parallel"],
                        "in": ["None", ["interleaved_parallel", "a"]]}},
            "layout.in: interleaved_parallel is the last alias of its dim: it cuts inside",
        ),
    ],
)  # fmt: skip
def test_dp_is_the_batch_and_pieces_are_of_samples(rule, sentence):
    def planned():
        config = parse_config({"mesh": {"dp": 2, "tp": 4}, "plan": [{"match": "fc", **rule}]})
        linear = ModuleShape(kind="Linear", base="Linear", params={"weight": (8, 8)})
        return plan_modules(config.plan, resolve(config, 8), {"fc": linear})

    with pytest.raises(UsageError) as caught:
        planned()
    assert caught.value.message.startswith(f"parallel.plan[0].{sentence}")


def test_what_became_of_each_word():
    assert read_translations(
        {"parallel": {"mode": "semi_auto_parallel", "full_batch": False, **ZERO}}
    ) == [
        ("mode: semi_auto_parallel", "mode: semi_auto"),
        ("full_batch: false", "as it is here anyway"),
        (
            "enable_parallel_optimizer: true",
            "optimizer.zero: 1, optimizer.threshold: 64KiB",
        ),
    ]
    assert read_translations({"mode": "semi_auto"}) == []
