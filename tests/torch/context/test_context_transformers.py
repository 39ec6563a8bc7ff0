"""Style `context` with models of transformers, which make positions, masks and labels."""

import warnings

import pytest
import torch
from ranks import run_warm

import msrun
from msrun.errors import ModelError
from msrun.parallel.local import full_tensor

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options))


def gpt2():
    sizes = {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **dropout, bos_token_id=1, eos_token_id=1)
    )


def checkpointed():
    model = llama()
    model.activation_checkpointing_enable()
    return model


def mistral(window=6):
    """Return a model whose layers all have the window."""
    config = transformers.MistralConfig(**SIZES, sliding_window=window)
    return transformers.MistralForCausalLM(config)


def gemma():
    """Return a model whose layers see all tokens and a window in turns."""
    config = transformers.Gemma3TextConfig(
        **SIZES,
        head_dim=4,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
        attn_logit_softcapping=None,
    )
    model = transformers.Gemma3ForCausalLM(config)
    model.activation_checkpointing_enable()
    return model


def modern_bert():
    """Return a model whose layers see tokens nearby on both sides, and all of them, in turns."""
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    config = transformers.ModernBertConfig(
        **sizes,
        local_attention=6,
        layer_types=["sliding_attention", "full_attention"],
        cls_token_id=1,
        sep_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="sdpa",
    )
    # torch says so of a unit of ZeRO 3 whose output somebody might write.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    return transformers.ModernBertForMaskedLM(config)


MODELS = {
    "Llama": llama,
    "GPT-2": gpt2,
    "Llama, checkpointed": checkpointed,
    "Mistral": mistral,
    "Gemma 3, checkpointed": gemma,
    "ModernBERT": modern_bert,
}
RULE = {"match": "*", "style": "context"}
CONFIGS = {
    "cp 2": (2, {"mesh": {"cp": 2}, "plan": [RULE]}),
    "ring, cp 4": (4, {"mesh": {"cp": 4}, "plan": [{**RULE, "kind": "ring"}]}),
    "dp 2, cp 2, zero 3": (
        4,
        {"mesh": {"dp": 2, "cp": 2}, "plan": [RULE], "optimizer": {"zero": 3}},
    ),
    "cp 2, tp 2": (4, {"mesh": {"cp": 2, "tp": 2}, "plan": ["auto_tp", RULE]}),
}


ACCUMULATED = {
    "ring, accumulate 2": (
        2,
        {**CONFIGS["cp 2"][1], "accumulate": 2, "plan": [{**RULE, "kind": "ring"}]},
    )
}


def batch(*, is_padded):
    """Return texts whose labels are the words, and the mask of their padding."""
    words = torch.randint(1, 40, (4, 16), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(words)
    if is_padded:
        mask[0, 9:] = mask[3, :2] = 0
    labels = words.masked_fill(mask == 0, -100)
    labels[1, :12] = -100
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


def trained(config, name, *, is_padded):
    with msrun.init(config) as rt:
        torch.manual_seed(3)
        model = rt.shard(MODELS[name]().double())
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        ranks, rank = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
        whole = batch(is_padded=is_padded)
        part = {key: tensor.tensor_split(ranks)[rank] for key, tensor in whole.items()}
        losses = [rt.step(model, optimizer, part) for _ in range(3)]
        weights = {key: full_tensor(p.detach()) for key, p in model.named_parameters()}
        return torch.stack(losses), weights


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_parts_of_texts_equal_whole_texts(name, is_padded):
    def learn(ranks, config):
        return run_warm(_learn, ranks, config, name, is_padded)

    losses, weights = learn(1, {})[0]
    for ranks, config in CONFIGS.values():
        for found, others in learn(ranks, config):
            # transformers computes the loss in float32, which AdamW would magnify.
            torch.testing.assert_close(found, losses, rtol=0, atol=4e-6)
            for key, weight in weights.items():
                torch.testing.assert_close(others[key], weight, rtol=0, atol=1e-6)


def _learn(config, name, is_padded):
    return trained(config, name, is_padded=is_padded)


def packed():
    """Return texts of several documents each, also across the parts of ranks."""
    found = batch(is_padded=False)
    del found["attention_mask"]
    lengths = [[5, 4, 7], [16], [1, 14, 1], [8, 8]]
    found["position_ids"] = torch.stack(
        [torch.cat([torch.arange(size) for size in sizes]) for sizes in lengths]
    )
    return found


def learned(config, name, texts, uses_cache):
    """Return losses and weights after steps on the same texts."""
    with msrun.init(config) as rt:
        torch.manual_seed(3)
        ranks, rank = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
        given = {key: tensor for key, tensor in texts.items() if tensor is not None}
        part = {key: tensor.tensor_split(ranks)[rank] for key, tensor in given.items()}
        part["use_cache"] = uses_cache
        sample = part if "pipeline" in config else None
        model = rt.shard(MODELS[name]().double(), sample=sample)
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        losses = [rt.step(model, optimizer, part) for _ in range(3)]
        weights = {key: full_tensor(p.detach()) for key, p in model.named_parameters()}
        return torch.stack(losses), weights


@pytest.mark.parametrize("uses_cache", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Llama, checkpointed", "Mistral"])
def test_parts_of_packed_documents_equal_whole_texts(name, uses_cache):
    losses, weights = run_warm(learned, 1, {}, name, packed(), uses_cache)[0]
    others, _ = run_warm(learned, 1, {}, name, packed() | {"position_ids": None}, uses_cache)[0]
    # With a cache transformers looks for no documents; checkpointed layers have none.
    has_documents = not uses_cache or "checkpointed" in name
    assert bool((losses - others).abs().max() > 1e-4) is has_documents
    for ranks, config in (CONFIGS | ACCUMULATED).values():
        for found, after in run_warm(learned, ranks, config, name, packed(), uses_cache):
            torch.testing.assert_close(found, losses, rtol=0, atol=4e-6)
            for key, weight in weights.items():
                torch.testing.assert_close(after[key], weight, rtol=0, atol=1e-6)


def staged(schedule="1f1b", microbatches=2, rule=RULE, **more):
    return {
        "mesh": {"pp": 2, "cp": 2},
        "plan": [rule],
        "pipeline": {"stages": "auto", "schedule": schedule, "microbatches": microbatches},
        **more,
    }


LAYERS = {"recompute": {"modules": ["model.layers.*"]}}
STAGED = {
    "Llama": [(4, staged()), (4, staged("zbv", 4, optimizer={"zero": 1}, **LAYERS))],
    "GPT-2": [(4, staged("gpipe", 4, {**RULE, "kind": "ring"}))],
    "Mistral": [(4, staged("gpipe", 4, {**RULE, "kind": "ring"})), (4, staged())],
    "Gemma 3, checkpointed": [(4, staged())],
    "Llama, checkpointed": [
        (4, staged("interleaved", 4, {**RULE, "kind": "ring"})),
        (8, staged(mesh={"pp": 2, "cp": 2, "tp": 2}, plan=["auto_tp", RULE])),
    ],
}
TEXTS = {
    "whole": batch(is_padded=False),
    "padded": batch(is_padded=True),
    "packed": packed(),
}


@pytest.mark.parametrize("uses_cache", [False])
@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("name", STAGED)
def test_stages_with_parts_of_texts_equal_whole_texts(name, kind, uses_cache):
    given = name, TEXTS[kind], uses_cache
    losses, weights = run_warm(learned, 1, {}, *given)[0]
    tables = ("transformer.wte.weight", "model.embed_tokens.weight")
    tied = next((weights[table] for table in tables if table in weights), None)
    for ranks, config in STAGED[name]:
        names = set()
        for found, after in run_warm(learned, ranks, config, *given):
            # Stages add losses up in the type of what they send.
            torch.testing.assert_close(found.double(), losses.double(), rtol=0, atol=4e-6)
            names |= set(after)
            for key, weight in after.items():
                whole = weights.get(key, tied)
                torch.testing.assert_close(weight, whole, rtol=0, atol=1e-6)
        assert names >= set(weights)


def in_turns(config):
    """Return the losses of steps on texts of each kind, in one model."""
    with msrun.init(config) as rt:
        torch.manual_seed(3)
        texts = [TEXTS[kind] | {"use_cache": False} for kind in ("padded", "packed", "whole")]
        model = rt.shard(llama().double(), sample=texts[0] if "pipeline" in config else None)
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        return torch.stack([rt.step(model, optimizer, one) for one in texts * 2])


def test_padding_and_documents_end_with_their_batch():
    losses = run_warm(in_turns, 1, {})[0].double()
    for config in (staged(), staged("gpipe", 4, {**RULE, "kind": "ring"})):
        for found in run_warm(in_turns, 4, config):
            torch.testing.assert_close(found.double(), losses, rtol=0, atol=4e-6)


def saved(config):
    """Return the bytes that a step on documents keeps for its backward pass, beside weights."""
    kept = {}
    with msrun.init(config) as rt:
        model = rt.shard(llama())
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def keep(x):
            if (storage := x.untyped_storage()).data_ptr() not in own:
                kept[storage.data_ptr()] = storage  # alive, so that no other takes its place
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            rt.step(model, optimizer, packed() | {"use_cache": False})
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("kind", ["all_to_all", "ring"])
def test_activations_of_documents_fall_with_the_number_of_ranks(kind):
    alone = run_warm(saved, 1, {})[0]
    config = {"mesh": {"cp": 2}, "plan": [{**RULE, "kind": kind}]}
    assert max(run_warm(saved, 2, config)) <= 1.15 * alone / 2


def chunked():
    model = mistral()
    model.config.layer_types = ["chunked_attention", "full_attention"]
    return model


def stretched():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return llama(rope_parameters=rope)


REFUSED = {
    "chunked_attention": chunked,
    "attn_implementation 'eager'": lambda: llama(attn_implementation="eager"),
    "rope_type 'dynamic'": stretched,
    "dropout 0.1 of attention weights": lambda: llama(attention_dropout=0.1),
}


def refusals():
    found = {}
    with msrun.init({"mesh": {"cp": 2}, "plan": [RULE]}) as rt:
        for words, make in REFUSED.items():
            model = rt.shard(make())
            optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            with pytest.raises(ModelError) as error:
                rt.step(model, optimizer, batch(is_padded=False))
            found[words] = error.value.message
    return found


def test_what_follows_the_length_that_a_rank_sees_is_refused():
    for found in run_warm(refusals, 2):
        assert {words: said for words, said in found.items() if words not in said} == {}
