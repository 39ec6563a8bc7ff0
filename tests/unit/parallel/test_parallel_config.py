"""Every mistake in a parallel configuration is one sentence with the key's path."""

import json
from datetime import date

import pytest

from msrun.errors import UsageError
from msrun.parallel.config import ParallelConfig
from msrun.parallel.config_file import parse_config, read_config, render_config
from msrun.parallel.layout import resolve
from msrun.parallel.notation.mesh_layout import MeshLayout
from msrun.parallel.settings.plan_rules import PlanRule

NO_SIZE = (
    "parallel.memory: '-1' is no size (choose such as 4GiB, 512MiB, 64kB or a number of bytes)"
)
NO_TEXT = "parallel: '\\ud800' holds half a character, which is no text"
COLWISE = {"match": "*.up", "style": "colwise"}


def devices(**changes):
    """Return a rule in MindSpore's `Layout` notation, with `changes`."""
    layout = {"device_matrix": [2, 2], "alias_name": ["a", "b"], "params": {"weight": ["a", "b"]}}
    return {"match": "*", "layout": layout | changes}


def test_nothing_is_plain_data_parallel():
    config = read_config(None)

    assert config == ParallelConfig()
    assert resolve(config, 8) == MeshLayout({"dp": 8})


@pytest.mark.parametrize("tree", [{"parallel": {"accumulate": 2}}, {"accumulate": 2}])
def test_a_mapping_may_stand_under_one_key(tree):
    assert read_config(tree).accumulate == 2


def test_a_file_is_yaml(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("parallel:\n  mesh: {dp: -1, tp: 2}\n  plan: [{match: '*', style: rowwise}]\n")

    assert read_config(path).plan == [PlanRule(match="*", style="rowwise")]


def test_text_for_numbers_as_in_a_job_file():
    assert parse_config({"mesh": {"dp": "2"}, "optimizer": {"zero": "3"}}) == parse_config(
        {"mesh": {"dp": 2}, "optimizer": {"zero": 3}}
    )


def test_rendering_reads_back():
    config = parse_config(
        {
            "mesh": {"pp": 2, "dp": -1, "tp": 2},
            "plan": [{"match": "*.x", "params": {"weight": ["tp", None]}, "in": [None, "tp"]}],
            "optimizer": {"zero": 2, "threshold": "64KiB"},
            "pipeline": {"stages": {"a": 0, "b": [1, 0]}, "microbatches": 4},
            "checkpoint": {"dir": "ckpt", "async": True},
        }
    )

    assert read_config(parse_config(json.loads(render_config(config)))) == config


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ([1], "parallel: [1] is no mapping"),
        (
            {date(2020, 1, 1): {}},
            "parallel: '{datetime.date(2020, 1, 1): {}}': expected str",
        ),
        ({"mesh": {("dp",): 2}}, "parallel.mesh: \"{('dp',): 2}\": expected str, got array"),
        ({"mode": "\ud800"}, NO_TEXT),
        ({"mseh": 1}, "parallel.mseh: is no key (did you mean mesh?)"),
        ({"optimizer": {"zer": 1}}, "parallel.optimizer.zer: is no key (did you mean zero?)"),
        ({"mesh": {"dp": "x"}}, 'parallel.mesh: {"dp": "x"}: expected int, got str'),
        ({"mesh": {1: 2}}, 'parallel.mesh: {"1": 2}: expected str, got int'),
        ({"mesh": {"d p": 2}}, "parallel.mesh: 'd p' is no name of an axis (choose such as tp)"),
        ({"optimizer": {"zero": 4}}, "parallel.optimizer.zero: 4 is not known (choose 0, 1, 2, 3)"),
        (
            {"optimizer": {"threshold": "1MiB"}},
            "parallel.optimizer.threshold: needs zero 1, 2 or 3",
        ),
        (
            {"optimizer": {"zero": 1, "threshold": "64KB"}},
            (
                "parallel.optimizer.threshold: '64KB' is no size (choose such as 4GiB, 512MiB, "
                "64kB or a number of bytes)"
            ),
        ),
        (
            {"optimizer": {"zero": 1, "shard_size": 0}},
            "parallel.optimizer.shard_size: 0 must be -1 or at least 1",
        ),
        ({"reduce": {"op": "max"}}, "parallel.reduce.op: 'max' is not known (choose mean, sum)"),
        (
            {"reduce": {"fuse": [2, 1]}},
            "parallel.reduce.fuse: [2, 1] must be ascending indices from 1",
        ),
        ({"reduce": {"fuse": 0}}, "parallel.reduce.fuse: 0 must be at least 1 byte"),
        (
            {"optimizer": {"zero": 1}, "reduce": {"fuse": "1MiB"}},
            "parallel.reduce: fuse applies to parameters below optimizer.threshold, which is 0",
        ),
        ({"accumulate": 0}, "parallel.accumulate: 0 must be at least 1"),
        ({"seed": -1}, "parallel.seed: -1 must be at least 0"),
        ({"plan": [COLWISE, {"style": "colwise"}]}, "parallel.plan[1].match: is missing"),
        (
            {"plan": [{"match": "*", "style": "colwis"}]},
            (
                "parallel.plan[0].style: 'colwis' is not known "
                "(choose colwise, rowwise, sequence, embedding, vocab, experts, context, 2d, 2.5d, "
                "3d)"
            ),
        ),
        (
            {"plan": [{"match": "*"}]},
            (
                "parallel.plan[0].style: or strategy, layout, rows, or params, in and out must be "
                "given"
            ),
        ),
        (
            {"plan": [COLWISE, {"match": "*", "strategy": []}]},
            "parallel.plan[1].strategy (): a module takes one entry, and Linear or Embedding two",
        ),
        (
            {"plan": [{"match": "*", "strategy": [[2, 0]]}]},
            "parallel.plan[0].strategy ((2, 0),): 0 is no number of parts",
        ),
        (
            {"plan": [{"match": "*", "strategy": [[1], [2]]}]},
            (
                "parallel.plan[0].strategy ((1,), (2,)) is for no Linear (input 1 is nk, which "
                "takes other than 1 numbers) and no Embedding (input 0 is vd, which takes other "
                "than 1 numbers)"
            ),
        ),
        (
            {"plan": [devices(params={})]},
            "parallel.plan[0].layout.params: or in or out must be given",
        ),
        (
            {"plan": [devices(device_matrix=[2, 2, 2])]},
            "parallel.plan[0].layout.device_matrix has 3 axes and alias_name 2",
        ),
        (
            {"plan": [devices(device_matrix=[2, 0])]},
            "parallel.plan[0].layout.device_matrix (2, 0): 0 is no number of devices",
        ),
        (
            {"plan": [devices(alias_name=["a", "a"])]},
            "parallel.plan[0].layout.alias_name ('a', 'a'): 'a' stands there twice",
        ),
        (
            {"plan": [devices(rank_list=[0, 1])]},
            "parallel.plan[0].layout.rank_list has 2 ranks and device_matrix 4",
        ),
        (
            {"plan": [devices(params={"weight": ["None", ["b", "c"]]})]},
            "parallel.plan[0].layout.params.weight: alias 'c' is not in alias_name (a, b)",
        ),
        (
            {"plan": [devices(**{"in": ["a", ["b", "a"]]})]},
            "parallel.plan[0].layout.in: alias 'a' cuts two dims, or one dim twice",
        ),
        (
            {"plan": [devices(out=["a", 3])]},
            "parallel.plan[0].layout.out[1]: 3: expected str | array | null, got int",
        ),
        (
            {"plan": [COLWISE | {"out": [None]}]},
            "parallel.plan[0].style: cannot be combined with params",
        ),
        (
            {"plan": [{"match": "*", "out": [None], "axis": "tp"}]},
            "parallel.plan[0].axis: belongs to a style",
        ),
        ({"plan": ""}, "parallel.plan: '' names no file"),
        (
            {"mode": "data", "plan": "strategy.json"},
            "parallel.plan: mode data has none (choose semi_auto)",
        ),
        (
            {"mode": "data", "plan": [COLWISE]},
            "parallel.plan: mode data has none (choose semi_auto)",
        ),
        (
            {"mesh": "auto"},
            "parallel.mesh: auto belongs to mode auto",
        ),
        ({"mesh": "best"}, "parallel.mesh: 'best' is not known (choose auto)"),
        (
            {"mode": "auto", "mesh": "auto", "accumulate": 2},
            "parallel.accumulate: mesh auto finds the number of micro-batches",
        ),
        (
            {"mode": "auto", "mesh": "auto", "plan": [COLWISE]},
            "parallel.plan: its rules name axes, which mesh auto finds (name the mesh)",
        ),
        (
            {"mode": "auto", "plan": [{"match": "*", "style": "context"}]},
            "parallel.plan[0].style: context: mode auto plans whole sequences (choose semi_auto)",
        ),
        ({"search": "exact"}, "parallel.search: belongs to mode auto"),
        (
            {"mode": "auto", "dropout": "exact"},
            "parallel.dropout: mode auto has masks of its own, not those of torch (choose local)",
        ),
        ({"memory": "1GiB"}, "parallel.memory: belongs to mode auto"),
        (
            {"mode": "auto", "plan": "plan.json", "memory": "1GiB"},
            "parallel.memory: plan.json is a plan already, so nothing is searched",
        ),
        (
            {"mode": "auto", "batch_norm": "local"},
            "parallel.batch_norm: mode auto has none: the search decides",
        ),
        (
            {
                "mode": "auto",
                "mesh": "auto",
                "pipeline": {"stages": "auto", "microbatches": 2},
            },
            "parallel.pipeline: mode auto has none: the search decides",
        ),
        ({"mode": "auto", "memory": "-1"}, NO_SIZE),
        ({"ps": {}}, "parallel.ps: parameter servers are the key servers"),
        (
            {"cost": {}},
            "parallel.cost: costs come from the topology (a preset, or a file of msrun calibrate)",
        ),
        (
            {"pipeline": {"stages": "auto", "microbatches": 0}},
            "parallel.pipeline.microbatches: 0 must be at least 1",
        ),
        (
            {"checkpoint": {"dir": "x", "keep": -1}},
            "parallel.checkpoint.keep: -1 must be at least 0",
        ),
    ],
)
def test_a_mistake_is_one_sentence(tree, sentence):
    with pytest.raises(UsageError) as caught:
        parse_config(tree)

    assert caught.value.message == sentence


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "{path} cannot be read: No such file or directory"),
        (b"a: 2001-13-40", "{path}: month must be in 1..12"),
        (b"a: &x [1]\nb: *x", "{path}: aliases (*name) are not used here: write the value out"),
        (b"a: [", "{path}, line 1: expected the node content, but found '<stream end>'"),
        (b"#" * ((1 << 20) + 1), "{path} is larger than 1 MiB"),
        (
            b"a: !!python/name:os.system",
            "{path}, line 1: could not determine a constructor for the ",
        ),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, content, sentence):
    path = tmp_path / "p.yaml"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(UsageError) as caught:
        read_config(path)

    assert caught.value.message.startswith(sentence.format(path=path))


@pytest.mark.parametrize(
    ("tree", "world_size", "sentence"),
    [
        ({"mesh": {"dp": 3}}, 8, "parallel.mesh: dp 3 is not world_size 8"),
        (
            {"mesh": {"dp": -1, "tp": 3}, "plan": [COLWISE]},
            8,
            "parallel.mesh: tp 3 does not divide world_size 8",
        ),
        (
            {"mesh": {"dp": -1, "tp": -1}},
            8,
            "parallel.mesh: only one axis can be -1, not dp and tp",
        ),
        ({"mesh": {"dp": 0}}, 8, "parallel.mesh.dp: 0 must be -1 or at least 1"),
        (
            {"mode": "stand_alone"},
            2,
            "parallel.mode: stand_alone is for one worker, and world_size is 2",
        ),
        (
            {"mesh": {"dp": 4, "tp": 2}, "mode": "data"},
            8,
            "parallel.mode: data has no axis tp (choose dp)",
        ),
        (
            {"mesh": {"dp": 4, "tp": 2}},
            8,
            "parallel.mesh.tp: no rule of parallel.plan uses this axis",
        ),
        ({"mesh": {"dp": 4, "pp": 2}}, 8, "parallel.mesh.pp: 2 stages need parallel.pipeline"),
        (
            {
                "mesh": {"dp": 4, "pp": 2},
                "mode": "auto",
                "pipeline": {"stages": {"*": 0}, "microbatches": 2},
            },
            8,
            "parallel.pipeline.stages: mode auto cuts by itself (choose auto)",
        ),
        (
            {"pipeline": {"stages": "auto", "microbatches": 2}},
            8,
            "parallel.pipeline: the mesh has no axis pp",
        ),
        (
            {
                "mesh": {"pp": 2, "dp": -1},
                "accumulate": 2,
                "pipeline": {"stages": "auto", "microbatches": 2},
            },
            8,
            "parallel.accumulate: 2 with a pipeline: raise parallel.pipeline.microbatches instead",
        ),
        (
            {"optimizer": {"zero": 1, "shard_size": 3}},
            8,
            "parallel.optimizer.shard_size: 3 does not divide dp 8",
        ),
        (
            {"mesh": {"tp": 2}, "plan": [COLWISE], "optimizer": {"zero": 1, "dtype": "bfloat16"}},
            2,
            "parallel.optimizer.dtype: needs several data-parallel ranks, and dp is 1",
        ),
        (
            {
                "mesh": {"dp": 2, "x": 2, "y": 2, "z": 1},
                "plan": [{"match": "*", "out": [["x", "y", "z"]]}],
                "optimizer": {"zero": 1},
            },
            8,
            (
                "parallel.optimizer.zero: 1 beside a plan over 3 axes (x, y, z): "
                "zero can shard what a plan shards over at most 2"
            ),
        ),
        (
            {"plan": "s.json", "checkpoint": {"dir": "c", "strategy": "s.json"}},
            8,
            "parallel.checkpoint.strategy: 's.json' is what parallel.plan reads",
        ),
        (
            {"mesh": {"dp": 4, "tp": 2}, "plan": [{"match": "*", "out": [None, "tq"]}]},
            8,
            "parallel.plan[0].out: axis 'tq' is not in mesh (dp, tp)",
        ),
        (
            {"mesh": {"dp": 4, "tp": 2}, "plan": [{"match": "*", "params": {"w": [["tp", "tp"]]}}]},
            8,
            "parallel.plan[0].params.w: axis 'tp' stands there twice",
        ),
        (
            {"mesh": {"dp": 4, "t": 2}, "plan": [{"match": "*", "out": ["t", "dp"]}]},
            8,
            "parallel.plan[0].out: dp divides the batch, which is dim 0, and not dim 1",
        ),
        (
            {"mesh": {"dp": 2, "x": 4}, "plan": [COLWISE, devices(device_matrix=[4, 4])]},
            8,
            (
                "parallel.plan[1].layout.device_matrix (4, 4) has 16 devices, and mesh (x 4) has 4 "
                "ranks"
            ),
        ),
        (
            {"plan": [devices()]},
            8,
            (
                "parallel.plan[0].layout.device_matrix (2, 2) has 4 devices, and the mesh has no "
                "axis that a plan may divide over"
            ),
        ),
        (
            {"mesh": {"x": 4, "y": 2}, "plan": [devices(device_matrix=[2, 4])]},
            8,
            (
                "parallel.plan[0].layout.device_matrix (2, 4): no axes from x on make the 2 parts "
                "of a in mesh (x 4, y 2)"
            ),
        ),
        (
            {"mesh": {"b": 2, "a": 2}, "plan": [devices()]},
            4,
            "parallel.plan[0].layout.device_matrix (2, 2): alias a stands for mesh axis b",
        ),
        (
            {"mesh": {"dp": 2, "x": 2, "y": 2}, "plan": [devices(rank_list=[1, 0, 2, 3])]},
            8,
            (
                "parallel.plan[0].layout.rank_list [1, 0, 2, 3]: no order of the axes in mesh "
                "(x 2, y 2) gives these ranks"
            ),
        ),
        (
            {"mesh": {"x": 4}, "plan": [{"match": "*", "strategy": [[2, 4]]}]},
            4,
            "parallel.plan[0].strategy ((2, 4),): 8 parts in all, and mesh (x 4) has 4 ranks",
        ),
        (
            {"mesh": {"x": 4}, "plan": [{"match": "*", "strategy": [[2, 1], [1, 1]]}]},
            4,
            (
                "parallel.plan[0].strategy ((2, 1), (1, 1)): no axes from x on make the 2 parts "
                "of dim 0 of input 0 in mesh (x 4)"
            ),
        ),
        (
            {"mesh": {"x": 4}, "plan": [{"match": "*", "strategy": [[4, 1], [2, 1]]}]},
            4,
            (
                "parallel.plan[0].strategy ((4, 1), (2, 1)): 8 parts in all, and mesh (x 4) has 4 "
                "ranks"
            ),
        ),
        (
            {
                "mesh": {"x": 4},
                "plan": [{"match": "*", "strategy": [[4]], "out_strategy": [[2]]}],
            },
            4,
            "parallel.plan[0].out_strategy ((2,),): the inputs give ((4,),)",
        ),
        (
            {"plan": [COLWISE]},
            8,
            (
                "parallel.plan: style colwise of '*.up' needs an axis (choose one in the mesh "
                "besides dp and pp)"
            ),
        ),
        (
            {"mesh": {"x": 4, "y": 2}, "plan": [COLWISE]},
            8,
            "parallel.plan: style colwise of '*.up' needs an axis (choose x, y)",
        ),
        (
            {"optimizer": {"zero": 2, "dtype": "bfloat16", "threshold": "1KiB"}},
            2,
            (
                "parallel.optimizer.threshold: 1024 leaves parameters replicated and in their "
                "own type, and parallel.optimizer.dtype computes in bfloat16"
            ),
        ),
        (
            {"optimizer": {"zero": 3, "dtype": "float16"}, "reduce": {"exclude": ["*.bias", "a"]}},
            2,
            (
                "parallel.reduce.exclude: *.bias, a leaves parameters replicated and in their "
                "own type, and parallel.optimizer.dtype computes in float16"
            ),
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_one_sentence(tree, world_size, sentence):
    with pytest.raises(UsageError) as caught:
        resolve(parse_config(tree), world_size)

    assert caught.value.message == sentence
