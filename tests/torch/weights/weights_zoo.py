"""Small models of transformers, and the configurations that tests of their weights load them in."""

from __future__ import annotations

import functools

import torch

_TEXT = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "use_cache": False,
}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Name -> class, class of its configuration, its options.
KINDS = {
    "GPT-2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 40,
            "n_positions": 32,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "use_cache": False,
        },
    ),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", _TEXT),
    "Llama, tied": ("LlamaForCausalLM", "LlamaConfig", {**_TEXT, "tie_word_embeddings": True}),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_TEXT, "num_local_experts": 2}),
    "BERT": ("BertForMaskedLM", "BertConfig", {**_TEXT, **_STILL}),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 40,
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            "use_cache": False,
            "tie_word_embeddings": True,
        },
    ),
    "ViT": (
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
            "num_labels": 8,
            **_STILL,
        },
    ),
    "Mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {
            "vocab_size": 40,
            "hidden_size": 16,
            "state_size": 4,
            "num_hidden_layers": 2,
            "use_cache": False,
            "pad_token_id": 0,
        },
    ),
}
LAYOUTS = {
    "dp 2": (2, {}),
    "zero 1": (2, {"optimizer": {"zero": 1}}),
    "zero 2": (2, {"optimizer": {"zero": 2}}),
    "zero 3": (2, {"optimizer": {"zero": 3}}),
    "tp 2": (2, {"mesh": {"tp": 2}, "plan": "auto_tp"}),
    "pp 2": (2, {"mesh": {"pp": 2}, "pipeline": {"stages": "auto", "microbatches": 2}}),
    "zero 1, tp 2": (
        4,
        {"mesh": {"dp": 2, "tp": 2}, "plan": "auto_tp", "optimizer": {"zero": 1}},
    ),
    "zero 3, pp 2": (
        4,
        {
            "mesh": {"dp": 2, "pp": 2},
            "pipeline": {"stages": "auto", "microbatches": 2},
            "optimizer": {"zero": 3},
        },
    ),
}  # fmt: skip


def build(name, seed=3, **options):
    """Return a model with random weights."""
    import transformers

    kind, config, own = KINDS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, kind)(getattr(transformers, config)(**{**own, **options}))
    # transformers starts biases and norms with zeros and ones, which would hide a wrong place.
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=draw) * 0.05)
    return model


@functools.cache
def inputs(name):
    """Return the inputs of one batch, by name."""
    draw = torch.Generator().manual_seed(7)
    if name == "ViT":
        return {"pixel_values": torch.randn(4, 3, 16, 16, generator=draw)}
    words = torch.randint(1, 40, (4, 8), generator=draw)
    return {"input_ids": words} | ({"decoder_input_ids": words.flip(1)} if name == "T5" else {})


def logits(model, name):
    """Return what a model says of one batch."""
    model.eval()
    with torch.no_grad():
        return model(**inputs(name)).logits
