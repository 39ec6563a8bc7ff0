"""Attention to a window of tokens, computed on parts of sequences."""

import pytest
import torch
import transformers
from ranks import run_warm
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import msrun
from msrun.errors import ModelError
from msrun.parallel.context.attention import Attention, by_heads
from msrun.parallel.context.documents import by_positions
from msrun.parallel.context.ring import around

pytestmark = pytest.mark.torch

TOKENS = 640  # of which several queries at a time are computed
SIZES = [[100, 400, 140], [639, 1]]
KINDS = {"all_to_all": by_heads, "ring": around}


def tensors():
    drawn = torch.Generator().manual_seed(1)
    heads = (4, 2, 2)
    return [
        torch.randn(2, count, TOKENS, 8, generator=drawn, dtype=torch.float64) for count in heads
    ]


def seen(distance, documents, *, is_causal):
    """Return for (samples, 1, queries, keys) which pairs attend."""
    at = torch.arange(TOKENS)
    back = at[:, None] - at
    pairs = (back.abs() <= distance) & ((back >= 0) if is_causal else True)
    pairs = pairs.expand(2, 1, TOKENS, TOKENS)
    if documents is None:
        return pairs
    numbers = documents.of_tokens
    return pairs & (numbers[:, None, :, None] == numbers[:, None, None])


def attended(kind, distance, is_causal, more):
    """Return the largest error of the output and of gradients on this rank's part."""
    with msrun.init({"mesh": {"cp": -1}, "mode": "manual"}) as rt:
        group = rt.mesh["cp"].get_group()
        ranks, rank = group.size(), group.rank()
        keys = documents = None
        whole = [x.clone().requires_grad_() for x in tensors()]
        if more == "documents":
            places = [torch.cat([torch.arange(n) for n in sizes]) for sizes in SIZES]
            documents = by_positions(torch.stack(places), 2)
        mask = seen(distance, documents, is_causal=is_causal)
        if more == "padding":
            real = torch.ones(2, 1, 1, TOKENS, dtype=torch.bool)
            real[0, ..., :70] = real[1, ..., 400:] = False
            mask = mask & real
            keys = real.chunk(ranks, -1)[rank]
        expected = functional.scaled_dot_product_attention(*whole, attn_mask=mask, enable_gqa=True)
        weights = torch.linspace(0.5, 1.5, expected.numel(), dtype=torch.float64)
        weights = weights.view_as(expected)
        (expected * weights).sum().backward()
        parts = [x.detach().chunk(ranks, 2)[rank].clone().requires_grad_() for x in whole]
        ask = Attention(
            group=group,
            is_causal=is_causal,
            scale=None,
            keys=keys,
            documents=documents,
            distance=distance,
        )
        found = KINDS[kind](ask, *parts)
        (found * weights.chunk(ranks, 2)[rank]).sum().backward()
        pairs = [
            (found, expected),
            *((one.grad, other.grad) for one, other in zip(parts, whole, strict=True)),
        ]
        return max((one - other.chunk(ranks, 2)[rank]).abs().max().item() for one, other in pairs)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_window_is_that_of_whole_sequences(kind, is_causal):
    for distance in (0, 3, 200, TOKENS - 2, TOKENS):
        for found in run_warm(attended, 2, kind, distance, is_causal, ""):
            assert found < 1e-12, distance


@pytest.mark.parametrize("more", ["padding", "documents"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_window_beside_padding_and_documents(kind, more):
    for distance in (3, 300):
        for found in run_warm(attended, 2, kind, distance, True, more):  # noqa: FBT003
            assert found < 1e-12, distance


class Pairs(TorchFunctionMode):
    """Counts the pairs of tokens that attention is computed of."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is functional.scaled_dot_product_attention:
            self.count += args[0].shape[2] * args[1].shape[2]
        return func(*args, **(kwargs or {}))


def pairs(distance):
    with msrun.init({"mesh": {"cp": -1}, "mode": "manual"}) as rt, Pairs() as found:
        group = rt.mesh["cp"].get_group()
        ask = Attention(group=group, is_causal=True, scale=None, keys=None, distance=distance)
        by_heads(ask, *(x.chunk(2, 2)[0] for x in tensors()))
    return found.count


def test_a_narrow_window_is_computed_of_few_pairs():
    assert run_warm(pairs, 2, None) == [TOKENS**2] * 2
    assert max(run_warm(pairs, 2, 10)) < TOKENS**2 / 2


def texts():
    words = torch.randint(1, 40, (4, 16), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(words)
    mask[0, 9:] = mask[3, :2] = 0
    return {
        "input_ids": words,
        "attention_mask": mask,
        "labels": words.masked_fill(mask == 0, -100),
    }


def model():
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(3)
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**sizes, sliding_window=6, pad_token_id=0)
    )


RULE = {"match": "*", "style": "context"}


def trained(config):
    """Return the losses of two steps."""
    with msrun.init(config) as rt:
        network = rt.shard(model())
        optimizer = rt.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
        return torch.stack([rt.step(network, optimizer, texts()) for _ in range(2)])


def of_own_mask():
    given = texts()
    given["attention_mask"] = torch.ones(4, 1, 16, 16, dtype=torch.bool).tril()
    with msrun.init({"mesh": {"cp": 2}, "plan": [RULE]}) as rt:
        network = rt.shard(model())
        optimizer = rt.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
        with pytest.raises(ModelError) as error:
            rt.step(network, optimizer, given)
        return error.value.message


def test_a_model_of_transformers_sees_its_windows_in_whole_texts():
    expected = run_warm(trained, 1, {})[0]
    for kind in KINDS:
        config = {"mesh": {"cp": 2}, "plan": [{**RULE, "kind": kind}]}
        for found in run_warm(trained, 2, config):
            torch.testing.assert_close(found, expected, rtol=0, atol=4e-6)


def test_windows_of_which_nothing_is_seen_are_refused():
    for said in run_warm(of_own_mask, 2):
        assert "sliding_attention, and made no mask of it" in said
