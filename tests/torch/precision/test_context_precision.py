"""`precision` over the axis `cp`: parts of sequences round as whole ones do, and so do a ring."""

import functools

import pytest
import torch
from context_models import TOKENS, Block, Text, batches, build, loss_fn
from ranks import Counted, run_warm
from reduced import assert_as_near, learned, plain
from torch import nn
from torch.nn import functional as fn

import msrun
from msrun.parallel.context.attention import bytes_by_heads

pytestmark = [
    pytest.mark.torch,
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

RULE = {"match": "*", "style": "context"}
RING = {**RULE, "kind": "ring"}
TP = [
    {"match": "blocks.*.up", "style": "colwise"},
    {"match": "blocks.*.down", "style": "rowwise"},
]
CP = {"mesh": {"cp": 2}, "plan": [RULE]}
DP_CP = {"mesh": {"dp": 2, "cp": 2}}
CONFIGS = {
    "by heads": (2, CP),
    "ring": (2, {**CP, "plan": [RING]}),
    "ring, cp 4": (4, {"mesh": {"cp": 4}, "plan": [RING]}),
    "dp, by heads": (4, {**DP_CP, "plan": [RULE]}),
    "dp, ring, zero 3": (4, {**DP_CP, "plan": [RING], "optimizer": {"zero": 3}}),
    "by heads, zero 1, accumulate": (
        2,
        {**CP, "optimizer": {"zero": 1}, "accumulate": 2},
    ),
    "ring, recompute": (2, {**CP, "plan": [RING], "recompute": {"modules": ["blocks.?"]}}),
    "by heads, tp": (4, {"mesh": {"cp": 2, "tp": 2}, "plan": [*TP, RULE]}),
}
QUICK = ("by heads", "dp, ring, zero 3")


class ScaledBlock(Block):
    """Has queries in float32, beside values that autocast has made narrow."""

    def __init__(self, *options, **named):
        super().__init__(*options, **named)
        self.temperature = nn.Parameter(torch.ones(()))

    def attend(self, x, mask=None):
        samples, tokens, _ = x.shape
        parts = self.qkv(x).view(samples, tokens, self.heads + 2 * self.key_heads, -1)
        q, k, v = parts.split([self.heads, self.key_heads, self.key_heads], dim=2)
        q = q.float() * self.temperature
        y = fn.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in (q, k, v)),
            attn_mask=mask,
            is_causal=self.is_causal,
            enable_gqa=self.heads != self.key_heads,
        )
        return self.out(y.transpose(1, 2).reshape(samples, tokens, -1))


class ScaledText(Text):
    def __init__(self, heads=4, key_heads=2, *, is_causal=True):
        super().__init__(heads, key_heads, is_causal=is_causal)
        blocks = [ScaledBlock(heads, key_heads, is_causal=is_causal) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)


MODELS = {
    "text": Text,
    "scaled": ScaledText,
    "all see all": functools.partial(ScaledText, is_causal=False),
}


def on_ranks(config, name):
    return learned(config, build(MODELS[name]).float(), batches(), loss_fn)


@functools.cache
def alone(precision, name):
    return plain(precision, build(MODELS[name]).float(), batches(), loss_fn)


@functools.cache
def gathering(precision, name):
    """Return what ranks learn that have whole samples, and gather parameters in that type."""
    config = {"optimizer": {"zero": 3}, "precision": precision}
    return run_warm(on_ranks, 4, config, name)[0]


def check(precision, name, case):
    ranks, config = CONFIGS[case]
    for found in run_warm(on_ranks, ranks, {**config, "precision": precision}, name):
        others = [alone(precision, name)]
        if "optimizer" in config:
            others.append(gathering(precision, name))
        assert_as_near(found, alone(None, name), *others)


@pytest.mark.parametrize("case", QUICK)
def test_parts_of_sequences_round_as_one_process_does(case):
    check("bf16", "scaled", case)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", CONFIGS)
def test_parts_with_other_techniques_round_as_one_process_does(case, name, precision):
    check(precision, name, case)


def sent(config):
    """Return the bytes of collectives in a step."""
    with msrun.init(config) as rt:
        model = rt.shard(build(functools.partial(ScaledText, key_heads=1)).float())
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with Counted() as counted:
            rt.step(model, optimizer, loss_fn, *batches()[0])
        return dict(counted.bytes)


def test_queries_keys_and_values_travel_in_the_type_of_their_product():
    layers, passes, wide, narrow = 2, 2, 4, 2
    one = layers * passes * bytes_by_heads(((4, 4, TOKENS // 2, 4), 1), 2, 1)
    for precision, width in ((None, wide), ("bf16", narrow)):
        for found in run_warm(sent, 2, {**CP, "precision": precision}):
            assert found["all_to_all_single"] == width * one


@pytest.mark.slow
def test_keys_travel_around_a_ring_in_that_type_and_their_gradients_in_float32():
    layers, tensor = 2, 4 * (TOKENS // 2) * 4  # values of one head of keys
    for found in run_warm(sent, 2, {**CP, "plan": [RING], "precision": "bf16"}):
        # Once forward and once backward in two bytes, and gradients twice in four.
        assert found["send"] == layers * 2 * tensor * (2 * 2 + 2 * 4)
        assert found["all_to_all_single"] == layers * 2 * (4 + 1 + 1 + 4) * tensor * 2
