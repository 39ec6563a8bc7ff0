"""Models of transformers and peft for the table, in small.

Dropout is off, and caches of decoders too (`use_cache=False`), as the pages of transformers say for
training.  The rows with `labels` have their default cache, batches by name with padding, and return
the loss that transformers computes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from zoo_entry import (  # type: ignore[import-not-found]  # beside this file
    CLASSES,
    ENCODER,
    LENGTH,
    SAMPLES,
    SEEN,
    TEXT,
    ZooModel,
    by_class,
    classes,
    image,
    labelled,
    of,
    of_pairs,
    padded,
    tokens,
)
from zoo_modules import VOCABULARY  # type: ignore[import-not-found]  # beside this file

_Inputs = Callable[[], Any]


def words() -> tuple[Tensor, ...]:
    """Return a batch of texts."""
    return (tokens(),)


def masked() -> tuple[Tensor, ...]:
    """Return a batch of texts and its mask."""
    return tokens(), torch.ones(SAMPLES, LENGTH, dtype=torch.int64)


def translated() -> tuple[Tensor, ...]:
    """Return a batch of texts, its mask, and texts for the decoder."""
    return (*masked(), tokens())


def model_of(
    name: str,
    settings: str,
    *blocks: str,
    plan: str,
    inputs: _Inputs = words,
    target: _Inputs = padded,
    loss: Callable[[Any, Tensor], Tensor] = by_class,
    **options: Any,
) -> ZooModel:
    """Return the entry of a model of transformers that returns logits."""
    return ZooModel(
        needs="transformers",
        make=partial(of, "transformers", name, settings, **options),
        inputs=inputs,
        target=target,
        loss=loss,
        blocks=blocks,
        plan=plan,
    )


def owning(name: str, settings: str, *blocks: str, plan: str, **options: Any) -> ZooModel:
    """Return the entry of a model that returns its loss."""
    return ZooModel(
        needs="transformers",
        make=partial(of, "transformers", name, settings, **options),
        inputs=labelled,
        blocks=blocks,
        plan=plan,
    )


def _without_cache(options: dict[str, Any]) -> dict[str, Any]:
    """Return options that leave the cache as it is by default."""
    return {key: value for key, value in options.items() if key != "use_cache"}


_DECODER = TEXT | {"use_cache": False}


def decoder(family: str, plan: str, **options: Any) -> ZooModel:
    """Return the entry of a model that continues texts, as most families name its parts."""
    return model_of(
        f"{family}ForCausalLM",
        f"{family}Config",
        "model.layers",
        plan=plan,
        **(_DECODER | options),
    )


_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "use_cache": False,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
WHISPER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_mel_bins": 8,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "use_cache": False,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_source_positions": 8,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
SOUND: dict[str, Any] = {
    "conv_dim": (16, 16),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "activation_dropout": 0.0,
    "layerdrop": 0.0,
    "final_dropout": 0.0,
    "mask_time_prob": 0.0,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "use_cache": False,
}
_CLIP: dict[str, Any] = {
    "projection_dim": 16,
    "text_config": {
        **ENCODER,
        "eos_token_id": 2,
        "bos_token_id": 1,
    },
    "vision_config": {
        **{k: v for k, v in SEEN.items() if k != "num_labels"},
        "image_size": 16,
        "patch_size": 8,
    },
}


TEXT_MODELS: dict[str, ZooModel] = {
    "GPT-2": model_of("GPT2LMHeadModel", "GPT2Config", "transformer.h", plan="gpt2", **_GPT2),
    "Llama": decoder("Llama", "llama"),
    "Qwen2, tied": decoder("Qwen2", "qwen2", tie_word_embeddings=True),
    "Qwen3": decoder("Qwen3", "qwen3", head_dim=4),
    "Gemma 2": decoder("Gemma2", "gemma2", head_dim=4, query_pre_attn_scalar=4),
    "Mistral": decoder("Mistral", "mistral"),
    "Mixtral": decoder("Mixtral", "mixtral", num_local_experts=2, experts_implementation="eager"),
    "BERT": model_of(
        *("BertForMaskedLM", "BertConfig", "bert.encoder.layer"),
        **ENCODER,
        inputs=masked,
        plan="bert",
    ),
    "T5": model_of(
        *("T5ForConditionalGeneration", "T5Config", "encoder.block", "decoder.block"),
        **_T5,
        inputs=translated,
        plan="t5",
    ),
    "ViT": model_of(
        *("ViTForImageClassification", "ViTConfig", "vit.layers"),
        **SEEN,
        image_size=16,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        inputs=lambda: (image(),),
        target=classes,
        plan="vit",
    ),
    "Whisper": model_of(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        *("model.encoder.layers", "model.decoder.layers"),
        **WHISPER,
        inputs=lambda: (
            torch.randn(SAMPLES, 8, 16, dtype=torch.float64),
            torch.ones(SAMPLES, 16, dtype=torch.int64),
            tokens(),
        ),
        plan="whisper",
    ),
    "wav2vec2": model_of(
        *("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", "wav2vec2.encoder.layers"),
        **(SEEN | SOUND),
        inputs=lambda: (torch.randn(SAMPLES, 400, dtype=torch.float64),),
        target=classes,
        plan="wav2vec2",
    ),
    "DistilBERT": model_of(
        *("DistilBertForMaskedLM", "DistilBertConfig", "distilbert.transformer.layer"),
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        n_layers=2,
        n_heads=4,
        dim=16,
        hidden_dim=32,
        dropout=0.0,
        attention_dropout=0.0,
        inputs=masked,
        plan="distilbert",
    ),
    "ALBERT": model_of(
        *("AlbertForMaskedLM", "AlbertConfig", "albert.encoder"),
        **ENCODER,
        embedding_size=8,
        inputs=masked,
        plan="auto_tp",
    ),
    "BART": model_of(
        "BartForConditionalGeneration",
        "BartConfig",
        *("model.encoder.layers", "model.decoder.layers"),
        **BART,
        inputs=translated,
        plan="bart",
    ),
    "CLIP": model_of(
        *("CLIPModel", "CLIPConfig", "text_model.encoder.layers", "vision_model.encoder.layers"),
        **_CLIP,
        inputs=lambda: (tokens(), image(16)),
        target=lambda: torch.randint(0, 2, (SAMPLES,)).double(),
        loss=of_pairs,
        plan="auto_tp",
    ),
    "ConvNeXt": model_of(
        *("ConvNextForImageClassification", "ConvNextConfig", "convnext.encoder.stages"),
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
        image_size=32,
        num_labels=CLASSES,
        inputs=lambda: (image(32),),
        target=classes,
        plan="auto_tp",
    ),
    "Mamba": model_of(
        *("MambaForCausalLM", "MambaConfig", "backbone.layers"),
        vocab_size=VOCABULARY,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=2,
        expand=2,
        time_step_rank=4,
        use_cache=False,
        plan="auto_tp",
    ),
    "Qwen2-MoE": decoder(
        "Qwen2Moe",
        "auto_tp",
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        experts_implementation="eager",
    ),
    "Llama, LoRA": ZooModel(
        needs="peft",
        make=lambda: _adapted(),  # noqa: PLW0108 - it is defined below
        inputs=words,
        target=padded,
        loss=by_class,
        blocks=["base_model.model.model.layers"],
        plan="auto_tp",
    ),
    "GPT-2, labels": owning(
        "GPT2LMHeadModel",
        "GPT2Config",
        "transformer.h",
        plan="gpt2",
        **_without_cache(_GPT2),
    ),
    "Llama, labels": owning(
        "LlamaForCausalLM", "LlamaConfig", "model.layers", plan="llama", **TEXT
    ),
    "T5, labels": owning(
        "T5ForConditionalGeneration",
        "T5Config",
        "encoder.block",
        plan="t5",
        **_without_cache(_T5),
    ),
}


def _adapted() -> nn.Module:
    """Return a Llama whose query and value are adapted."""
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = of("transformers", "LlamaForCausalLM", "LlamaConfig", **_DECODER)
    adapted: nn.Module = peft.get_peft_model(model, config)
    for name, param in adapted.named_parameters():
        if "lora_B" in name:  # it starts as zeros, and nothing reaches lora_A then
            nn.init.normal_(param, std=0.1)
    return adapted
