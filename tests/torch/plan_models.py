"""Models of transformers for tests of plans, with random weights of small sizes."""

import importlib

import torch

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "use_cache": False}
TEXT = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
HEARD = {
    "vocab_size": 60, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "num_mel_bins": 8, "max_source_positions": 16, "use_cache": False,
}  # fmt: skip
SEEN = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SEEN |= {"intermediate_size": 32, "image_size": 16, "patch_size": 4}
WORDS = {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}
WORDS |= {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
# Name -> class of the model, class and settings of its configuration.
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GROUPED | {"head_dim": 8, "sliding_window": 8}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", GROUPED | {"num_local_experts": 2}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", WORDS),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 32},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        TEXT | {"decoder_start_token_id": 0, "use_cache": False},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", SEEN),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", HEARD),
}
# Settings of dropout, by the name of the configuration.
_DROPPING = (
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout", "dropout_rate",
    "embd_pdrop", "hidden_dropout_prob", "resid_pdrop", "activation_dropout",
)  # fmt: skip


def build(name, dropout=0.0, **settings):
    """Return the model `name`, with the same weights wherever it is built."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        transformers = importlib.import_module("transformers")
        model, config, sizes = MODELS[name]
        made = getattr(transformers, config)(**{**sizes, **settings})
        for key in _DROPPING:
            if hasattr(made, key):
                setattr(made, key, dropout)
        return getattr(transformers, model)(made)


def data(name, steps=2):
    """Return batches of padded texts, sounds or images, with labels."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for _ in range(steps):
        tokens = torch.randint(1, 40, (4, 12), generator=draw)
        mask = torch.arange(12) < torch.tensor([3, 7, 12, 9])[:, None]
        labels = tokens.where(mask, -100)
        if name == "vit":
            images = torch.randn(4, 3, 16, 16, generator=draw)
            found.append({"pixel_values": images, "labels": torch.arange(4) % 2})
        elif name == "whisper":
            sound = torch.randn(4, 8, 32, generator=draw)
            found.append({"input_features": sound, "labels": labels})
        else:
            ids, known = tokens.where(mask, 0), mask.long()
            found.append({"input_ids": ids, "attention_mask": known, "labels": labels})
    return found
