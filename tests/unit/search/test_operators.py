"""What operators can be divided by, written as `label: inputs -> outputs`."""

from __future__ import annotations

import numpy as np
import pytest
from programs import TINY, Draft

from msrun.parallel.search.cost.cost import collective
from msrun.parallel.search.cost.redistribution import MoveKind
from msrun.parallel.search.graph.axis_placement import PR, RP, RR
from msrun.parallel.search.graph.operators import rule_of
from msrun.parallel.search.graph.rules import Site
from msrun.parallel.search.graph.views import dim_map
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.problem import Setting

WORDS = {RR: "R", RP: "r", PR: "P"}


def site(packet, out, *ins, attrs=None, slots=("a", "b", "c", "d"), outs=()):
    d = Draft()
    inputs = {slot: d.input(*shape) for slot, shape in zip(slots, ins, strict=False)}
    d.op(packet, out, *outs, attrs=attrs, **inputs)
    return Site(d.steps[0], d.done())


def choices(found):
    """Return the choices besides `R`; `r` is whole with a partial gradient, `P` a sum."""

    def word(codes):
        return " ".join(WORDS.get(code, str(code)) for code in codes)

    return [f"{c.name}: {word(c.ins)} -> {word(c.outs)}" for c in rule_of(found).choices[1:]]


ATTENTION = "scaled_dot_product_attention"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            site("linear", (4, 8, 6), (4, 8, 2), (6, 2), (6,)),
            ["b0: 0 r r -> 0", "b1: 1 r r -> 1", "k: 2 1 P -> P", "n: r 0 0 -> 2"],
        ),
        (
            site("addmm", (4, 6), (6,), (4, 2), (2, 6)),
            ["n: 0 r 1 -> 1", "m: r 0 r -> 0", "k: P 1 0 -> P"],
        ),
        (
            site("matmul", (3, 4, 6), (4, 2), (3, 2, 6)),
            ["m: 0 r -> 1", "k: 1 1 -> P", "b0: r 0 -> 0", "n: r 2 -> 2"],
        ),
        (
            site(ATTENTION, (2, 8, 4, 4), *[(2, 8, 4, 4)] * 3, attrs={"is_causal": True}),
            ["b0: 0 0 0 -> 0", "b1: 1 1 1 -> 1"],
        ),
        (
            site(ATTENTION, (2, 8, 4, 4), *[(2, 8, 4, 4)] * 3),
            ["b0: 0 0 0 -> 0", "b1: 1 1 1 -> 1", "s: 2 r r -> 2"],
        ),
        (site("add", (4, 6), (4, 6), (6,)), ["d0: 0 r -> 0", "d1: 1 0 -> 1", "P: P P -> P"]),
        (site("add", (4,), (4,)), ["d0: 0 -> 0"]),
        (site("mul", (4, 6), (4, 6), (4, 1)), ["d0: 0 0 -> 0", "d1: 1 r -> 1", "P: P r -> P"]),
        (site("gelu", (4, 6), (4, 6)), ["d0: 0 -> 0", "d1: 1 -> 1"]),
        (site("softmax", (4, 6), (4, 6), attrs={"dim": -1}), ["d0: 0 -> 0"]),
        (
            site("layer_norm", (4, 8, 6), (4, 8, 6), (6,), attrs={"normalized_shape": [6]}),
            ["d0: 0 r -> 0", "d1: 1 r -> 1"],
        ),
        (
            site("embedding", (4, 8, 6), (10, 6), (4, 8)),
            ["v: 0 r -> P", "h: 1 r -> 2", "b0: r 0 -> 0", "b1: r 1 -> 1"],
        ),
        (site("cross_entropy_loss", (), (4, 10), (4,)), ["b: 0 0 -> P"]),
        (
            site("cross_entropy_loss", (), (4, 10), (4,), (10,), slots=("x", "y", "weight")),
            [],
        ),
        (site("mse_loss", (), (4, 6), (4, 6)), ["d0: 0 0 -> P", "d1: 1 1 -> P"]),
        (
            site("conv2d", (4, 6, 8, 8), (4, 2, 8, 8), (6, 2, 3, 3), (6,)),
            ["b: 0 r r -> 0", "k: 1 1 P -> P", "n: r 0 0 -> 1"],
        ),
        (
            site("conv2d", (4, 6, 8, 8), (4, 6, 8, 8), (6, 1, 3, 3), attrs={"groups": 6}),
            ["g: 1 0 -> 1", "b: 0 r -> 0"],
        ),
        (
            site("conv_transpose2d", (4, 6, 8, 8), (4, 2, 4, 4), (2, 6, 2, 2)),
            ["b: 0 r -> 0", "k: 1 0 -> P", "n: r 1 -> 1"],
        ),
        (
            site("batch_norm", (4, 6, 8, 8), (4, 6, 8, 8), (6,), (6,), attrs={"training": True}),
            ["b: 0 r r -> 0", "c: 1 0 0 -> 1"],
        ),
        (site("max_pool2d", (4, 6, 2, 2), (4, 6, 4, 4)), ["d0: 0 -> 0", "d1: 1 -> 1"]),
        (
            site("sum", (4,), (4, 6), attrs={"dim": [1]}),
            ["d0: 0 -> 0", "d1: 1 -> P", "P: P -> P"],
        ),
        (site("amax", (4,), (4, 6), attrs={"dim": [1]}), ["d0: 0 -> 0"]),
        (site("cat", (4, 12), (4, 6), (4, 6), attrs={"dim": 1}), ["d0: 0 0 -> 0", "P: P P -> P"]),
        (
            site("chunk", (4, 3), (4, 6), attrs={"dim": 1}, outs=[(4, 3)]),
            ["d0: 0 -> 0 0", "P: P -> P P"],
        ),
        (site("select", (6,), (4, 6), attrs={"dim": 0}), ["d1: 1 -> 0", "P: P -> P"]),
        (
            site("expand", (3, 4, 6), (4, 1)),
            ["d1: 0 -> 1", "d0: r -> 0", "d2: r -> 2", "P: P -> P"],
        ),
        (site("mystery", (4, 6), (4, 6)), []),
    ],
    ids=lambda value: value.packet if isinstance(value, Site) else "",
)
def test_what_an_operator_can_be_divided_by(given, expected):
    assert choices(given) == expected


def test_statistics_of_a_batch_are_summed_where_it_is_divided():
    x, width = (64, 16, 8, 8), (16,)
    d = Draft()
    h = d.op("conv2d", x, input=d.input(*x), weight=d.param(16, 16, 3, 3))
    d.op("batch_norm", x, input=h, weight=d.param(*width), attrs={"training": True})
    problem = build(d.done(d.loss("batch_norm_1")), Setting(sizes=(4,), topology=TINY, rounds=3))
    node = next(node for node in problem.nodes if node.name == "batch_norm_1")
    whole, by_sample, by_channel = node.seconds
    statistics = (
        3 * 2 * sum(collective(MoveKind.REDUCE, TINY.wires((4,))[0]) * np.array([1, 8 * 16]))
    )
    assert by_sample == pytest.approx(by_channel + statistics, rel=1e-9)
    assert by_sample < whole


def test_few_heads_of_keys_bound_how_far_heads_are_divided():
    shapes = [(2, 8, 4, 4), (2, 2, 4, 4), (2, 2, 4, 4)]
    rule = rule_of(site(ATTENTION, (2, 8, 4, 4), *shapes, attrs={"is_causal": True}))
    assert {choice.name: choice.size for choice in rule.choices} == {"R": 0, "b0": 2, "b1": 2}


@pytest.mark.parametrize(
    ("given", "dims"),
    [
        (site("view", (4, 8, 2, 3), (4, 8, 6)), {0: (0, 4), 1: (1, 8), 2: (2, 2)}),
        (site("reshape", (4, 8, 6), (4, 8, 2, 3)), {0: (0, 4), 1: (1, 8), 2: (2, 2)}),
        (site("view", (32, 6), (4, 8, 6)), {0: (0, 4), 1: (2, 6)}),
        (site("unsqueeze", (4, 1, 6), (4, 6)), {0: (0, 4), 2: (1, 6)}),
        (
            site("permute", (6, 4, 8), (4, 8, 6), attrs={"dims": [2, 0, 1]}),
            {0: (2, 6), 1: (0, 4), 2: (1, 8)},
        ),
        (site("transpose", (4, 6), (6, 4), attrs={"dim0": 0, "dim1": 1}), {0: (1, 4), 1: (0, 6)}),
        (site("t", (6, 4), (4, 6)), {0: (1, 6), 1: (0, 4)}),
    ],
    ids=lambda value: value.packet if isinstance(value, Site) else "",
)
def test_which_dim_of_a_view_is_which(given, dims):
    assert dim_map(given).dims == dims


def test_views_of_views_are_one():
    heads = dim_map(site("view", (4, 8, 2, 3), (4, 8, 6)))
    turned = dim_map(site("transpose", (4, 2, 8, 3), (4, 8, 2, 3), attrs={"dim0": 1, "dim1": 2}))
    assert turned.after(heads).dims == {0: (0, 4), 1: (2, 2), 2: (1, 8)}
