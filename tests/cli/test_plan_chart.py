"""The picture of a plan: `REWRITE=1 pytest tests/cli/test_picture.py` writes it anew."""

from __future__ import annotations

import os
from pathlib import Path
from xml.etree import ElementTree as ET

from msgspec.structs import replace

from msrun.cli.render.plan_chart import picture
from msrun.parallel.search.plan.plan import Operator, SavedPlan

GOLDEN = Path(__file__).parents[1] / "golden/plan.svg"
GIB = 2.0**30


def operator(module, op, *outs):
    return Operator(module=module, op=op, divided=[], ins=[], outs=[list(outs)] if outs else [])


def block(number, *, cut):
    """Return what one block does."""
    where = f"blocks.{number}"
    return {
        f"up_{number}": operator(f"{where}.up", "linear", "S(0)", cut),
        f"add_{number}": operator(where, "add", "S(0)", "R"),
        f"again_{number}": operator(where, "add", "S(0)", "P"),
    }


PLAN = SavedPlan(
    version=2,
    model="a<b>&c.py:make",
    program="",
    topology="a100",
    world=16,
    mesh={"dp": 4, "tp": 2},
    stages=2,
    microbatches=4,
    batch=64,
    recompute=True,
    seconds=2.0,
    costs={"computation": 1.5, "all-reduce over tp, activations": 0.5},
    memory=48 * GIB,
    gap=0.015,
    limit=64 * GIB,
    stage_memory={"first": 48 * GIB, "last": 32 * GIB},
    params={
        "tokens.weight": ["R, state cut", "S(4)"],
        **{f"blocks.{n}.up.weight": ["R", "S(0)" if n < 3 else "R"] for n in range(4)},
        "blocks.1.experts.0.weight": ["S(1)", "R"],
        "blocks.3.experts.0.weight": ["S(1)", "R"],
    },
    operators={
        "tokens": operator("tokens", "embedding", "S(0)", "R"),
        **{k: v for n in range(4) for k, v in block(n, cut="S(2)" if n < 3 else "R").items()},
        "loss": operator("", "mse_loss", "P", "R"),
        "check": operator("", "nothing"),
    },
)


def texts(plan):
    root = ET.XML(picture(plan))
    return [node.text for node in root.iter() if node.tag.endswith("text")]


def test_a_plan_is_drawn_the_same_to_the_byte():
    if os.environ.get("REWRITE"):
        GOLDEN.write_text(picture(PLAN))
    assert GOLDEN.read_text() == picture(PLAN)


def test_all_of_a_plan_is_said():
    shown = texts(PLAN)
    assert shown == [
        "a<b>&c.py:make",
        "16 ranks (a100) as pp 2 x dp 4 x tp 2; batch 64 in 4 micro-batches, recompute",
        "step: 2 s predicted, at most 1.50% slower than the best on this mesh",
        *("computation", "1.5 s  75.0%"),
        *("all-reduce over tp, activations", "0.5 s  25.0%"),
        "memory of a rank: 48 GiB of 64 GiB that it has",
        *("first stage", "48 GiB", "last stage", "32 GiB"),
        "parameters, blocks from left to right",
        *("dp 4", "tp 2"),
        *("tokens.weight", "R, state cut", "S(4)"),
        *("blocks.*.up.weight", "R", "S(0)", "R"),
        *("blocks.*.experts.0.weight", "S(1)", "S(1)", "R", "R"),
        "what operators make, blocks from left to right",
        *("dp 4", "tp 2"),
        *("tokens: embedding", "S(0)", "R"),
        *("blocks.*.up: linear", "S(0)", "S(2)", "R"),
        *("blocks.*: add", "S(0)", "R"),
        *("blocks.*: add 2", "S(0)", "P"),
        *("mse_loss", "P", "R"),
        "placements",
        *("cut by dim 0, and so on", "S(0)", "whole", "R"),
        *("whole; gradient and optimizer state cut", "R, state cut", "a pending sum", "P"),
    ]


def test_without_stages_and_limit_there_is_one_bar():
    shown = texts(replace(PLAN, stages=1, stage_memory={}, limit=None, gap=None))
    at = shown.index("memory of a rank: 48 GiB")
    assert shown[at + 1 : at + 3] == ["each rank", "48 GiB"]
    assert "step: 2 s predicted" in shown


def test_bars_reach_as_far_as_what_they_show():
    root = ET.XML(picture(PLAN))
    bars = [float(one.get("width")) for one in root.iter() if one.get("fill") == "#0072b2"]
    assert [round(bar / bars[0], 2) for bar in bars] == [1.0, 0.33, 1.0, 0.67]
    (x,) = {float(one.get("x1")) for one in root.iter() if one.tag.endswith("line")}
    left = min(float(one.get("x")) for one in root.iter() if one.get("fill") == "#0072b2")
    assert round((x - left) * 48 / 64 - bars[2], 1) == 0.0


def test_what_would_be_endless_is_cut():
    names = {f"p{'x' * 90}{n}.weight": ["R", "R"] for n in range(250)}
    shown = texts(replace(PLAN, params=names))
    assert "and 50 more rows, which `--json` has" in shown
    assert max(map(len, shown[4:])) < 80


def test_control_characters_are_named():
    assert "a\\x1b.py:make" in texts(replace(PLAN, model="a\x1b.py:make"))


def test_inputs_and_outputs_that_rules_name(msrun, here):
    inputs = "{hidden: [dp, null, [tp, sp]], mask: null, 2: ['...']}"
    rule = f"{{match: '*.attn', in: {inputs}, out: [[null, tp], null]}}"
    (here / "p.yaml").write_text(f"mesh: {{dp: 2, tp: 2, sp: 2}}\nplan:\n- {rule}\n")
    out = msrun("plan --parallel p.yaml --worker-num 8").out
    rows = [" ".join(line.split()) for line in out.splitlines()]

    assert rows[rows.index("inputs and outputs of modules:") :] == [
        "inputs and outputs of modules:",
        "modules tensor axes",
        "*.attn in.hidden [dp, null, [tp, sp]]",
        "*.attn in[2] [...]",
        "*.attn out[0] [null, tp]",
    ]
