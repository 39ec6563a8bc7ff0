"""More families of transformers for the table, in small: those that people asked about later.

As in `zoo_text`, dropout is off and decoders have no cache.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from zoo_entry import (  # type: ignore[import-not-found]  # beside this file
    CLASSES,
    ENCODER,
    LENGTH,
    SAMPLES,
    TEXT,
    ZooModel,
    by_class,
    classes,
    image,
    of_pairs,
    padded,
    tokens,
)
from zoo_modules import VOCABULARY  # type: ignore[import-not-found]  # beside this file
from zoo_text import (  # type: ignore[import-not-found]  # beside this file
    SOUND,
    WHISPER,
    decoder,
    masked,
    model_of,
)

_PLAN = "auto_tp"
_DECODER = TEXT | {"use_cache": False}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "experts_implementation": "eager",
}
_LOCAL_EXPERTS: dict[str, Any] = {
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "experts_implementation": "eager",
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "experts_implementation": "eager",
}
_SPEECH: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_text_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "positional_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "apply_spec_augment": False,
    **{
        key: value
        for key, value in SOUND.items()
        if key not in ("layerdrop", "final_dropout", "classifier_proj_size")
    },
}
_PATCHES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_WHOLE: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def encoder(name: str, blocks: str, plan: str = _PLAN, **options: Any) -> ZooModel:
    """Return the entry of a model that reads texts in both directions."""
    return model_of(
        f"{name}ForMaskedLM", f"{name}Config", blocks, inputs=masked, plan=plan, **options
    )


def seeing(name: str, *blocks: str, **options: Any) -> ZooModel:
    """Return the entry of a model of images and their classes."""
    return model_of(
        f"{name}ForImageClassification",
        f"{name}Config",
        *blocks,
        inputs=lambda: (image(),),
        target=classes,
        plan=_PLAN,
        num_labels=CLASSES,
        **options,
    )


def named(make: Any, inputs: Any, *blocks: str) -> ZooModel:
    """Return the entry of a model that takes its batch by name and returns its loss."""
    return ZooModel(needs="transformers", make=make, inputs=inputs, blocks=blocks, plan=_PLAN)


def _built(name: str, config: str, **options: Any) -> nn.Module:
    transformers = importlib.import_module("transformers")
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**options))
    return model


def _detr() -> nn.Module:
    transformers = importlib.import_module("transformers")
    backbone = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    return _built(
        "DetrForObjectDetection",
        "DetrConfig",
        backbone_config=backbone,
        d_model=16,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_queries=5,
        num_labels=CLASSES,
        dropout=0.0,
    )


def of_boxes(output: Any, target: Tensor) -> Tensor:
    """Return the loss of objects whose order is that of the queries, with boxes at 0."""
    boxes = output["pred_boxes"]
    found = functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())
    return found + functional.mse_loss(boxes, torch.zeros_like(boxes))


def spoken() -> dict[str, Tensor]:
    """Return sounds and what is said in them."""
    return {
        "input_values": torch.randn(SAMPLES, 400, dtype=torch.float64),
        "labels": padded(),
    }


def transcribed() -> dict[str, Tensor]:
    """Return spectra and what is said in them."""
    return {
        "input_features": torch.randn(SAMPLES, 8, 16, dtype=torch.float64),
        "labels": padded(),
    }


def illustrated() -> dict[str, Tensor]:
    """Return texts with an image in each."""
    words = tokens().clamp(max=VOCABULARY - 2)
    words[:, 1:5] = VOCABULARY - 1
    return {"input_ids": words, "pixel_values": image(), "labels": padded()}


FAMILIES: dict[str, ZooModel] = {
    "Phi-3": decoder("Phi3", _PLAN),
    "OLMo 2": decoder("Olmo2", _PLAN),
    "Cohere": decoder("Cohere", _PLAN),
    "StarCoder2": decoder(
        "Starcoder2",
        _PLAN,
        residual_dropout=0.0,
        embedding_dropout=0.0,
    ),
    "SmolLM3": decoder("SmolLM3", _PLAN),
    "Gemma 3": model_of(
        *("Gemma3ForCausalLM", "Gemma3TextConfig", "model.layers"),
        **_DECODER,
        head_dim=4,
        query_pre_attn_scalar=4,
        sliding_window=4,
        plan=_PLAN,
    ),
    "Llama 4": model_of(
        *("Llama4ForCausalLM", "Llama4TextConfig", "model.layers"),
        **_DECODER,
        **_LOCAL_EXPERTS,
        head_dim=4,
        intermediate_size_mlp=32,
        attention_chunk_size=8,
        plan=_PLAN,
    ),
    "Qwen3-MoE": decoder("Qwen3Moe", _PLAN, head_dim=4, **_EXPERTS),
    "GraniteMoE": decoder("GraniteMoe", _PLAN, **_LOCAL_EXPERTS),
    "GPT-OSS": decoder("GptOss", _PLAN, head_dim=4, sliding_window=4, **_LOCAL_EXPERTS),
    "DeepSeek-V3": decoder("DeepseekV3", _PLAN, **_LATENT),
    "Falcon": model_of(
        *("FalconForCausalLM", "FalconConfig", "transformer.h"),
        **_DECODER,
        plan="falcon",
    ),
    "Falcon, new decoder": model_of(
        *("FalconForCausalLM", "FalconConfig", "transformer.h"),
        **_DECODER,
        new_decoder_architecture=True,
        num_kv_heads=2,
        plan="falcon",
    ),
    "GPT-NeoX": model_of(
        *("GPTNeoXForCausalLM", "GPTNeoXConfig", "gpt_neox.layers"),
        **_DECODER,
        plan="gpt_neox",
    ),
    "BLOOM": model_of(
        *("BloomForCausalLM", "BloomConfig", "transformer.h"),
        vocab_size=VOCABULARY,
        hidden_size=16,
        n_layer=2,
        n_head=4,
        use_cache=False,
        plan="bloom",
    ),
    "Mamba 2": model_of(
        *("Mamba2ForCausalLM", "Mamba2Config", "backbone.layers"),
        vocab_size=VOCABULARY,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=2,
        expand=2,
        num_heads=4,
        head_dim=8,
        n_groups=1,
        chunk_size=4,
        use_cache=False,
        plan=_PLAN,
    ),
    "RWKV": model_of(
        *("RwkvForCausalLM", "RwkvConfig", "rwkv.blocks"),
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        context_length=32,
        use_cache=False,
        plan=_PLAN,
    ),
    "Jamba": decoder(
        "Jamba",
        _PLAN,
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=4,
        mamba_d_conv=2,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
        experts_implementation="eager",
    ),
    "ModernBERT": encoder(
        *("ModernBert", "model.layers"),
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=4,
    ),
    "DeBERTa-v2": encoder(
        *("DebertaV2", "deberta.encoder.layer"),
        **ENCODER,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
    ),
    "ELECTRA": encoder(
        *("Electra", "electra.encoder.layer", "electra"), **ENCODER, embedding_size=8
    ),
    "Longformer": encoder(
        *("Longformer", "longformer.encoder.layer"),
        **(ENCODER | {"max_position_embeddings": LENGTH + 2, "pad_token_id": 1}),
        attention_window=[4, 4],
    ),
    "XLNet": model_of(
        *("XLNetLMHeadModel", "XLNetConfig", "transformer.layer"),
        vocab_size=VOCABULARY,
        d_model=16,
        n_layer=2,
        n_head=4,
        d_inner=32,
        dropout=0.0,
        use_mems_train=False,
        plan=_PLAN,
    ),
    "Whisper, labels": named(
        partial(
            _built,
            *("WhisperForConditionalGeneration", "WhisperConfig"),
            **{key: value for key, value in WHISPER.items() if key != "use_cache"},
        ),
        transcribed,
        *("model.encoder.layers", "model.decoder.layers"),
    ),
    "SpeechT5": named(
        partial(_built, *("SpeechT5ForSpeechToText", "SpeechT5Config"), **_SPEECH),
        spoken,
        "speecht5.encoder.wrapped_encoder.layers",
    ),
    "DINOv2": seeing("Dinov2", "dinov2.encoder.layer", **_PATCHES, **_WHOLE),
    "Swin": seeing(
        *("Swin", "swin.encoder.layers"),
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.0,
        **_WHOLE,
    ),
    "SegFormer": seeing(
        *("Segformer", "segformer.stages.0.blocks", "segformer.stages.1.blocks"),
        depths=[1, 1],
        num_encoder_blocks=2,
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
        drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
        **_WHOLE,
    ),
    "DETR": ZooModel(
        needs="transformers",
        make=_detr,
        inputs=lambda: (image(),),
        target=lambda: torch.randint(0, CLASSES, (SAMPLES, 5)),
        loss=of_boxes,
        blocks=["model.decoder.layers"],
        plan=_PLAN,
    ),
    "SigLIP": model_of(
        *("SiglipModel", "SiglipConfig"),
        *("text_model.encoder.layers", "vision_model.encoder.layers"),
        text_config={
            **{key: value for key, value in ENCODER.items() if "dropout" not in key},
            "attention_dropout": 0.0,
            "projection_size": 16,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        vision_config=_PATCHES,
        inputs=lambda: (tokens(), image()),
        target=lambda: torch.randint(0, 2, (SAMPLES,)).double(),
        loss=of_pairs,
        plan=_PLAN,
    ),
    "BLIP": model_of(
        *("BlipForConditionalGeneration", "BlipConfig", "text_decoder.bert.encoder.layer"),
        text_config={
            **ENCODER,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "sep_token_id": 2,
            "encoder_hidden_size": 16,
            "use_cache": False,
        },
        vision_config=_PATCHES,
        projection_dim=16,
        inputs=lambda: (image(), tokens()),
        loss=by_class,
        plan=_PLAN,
    ),
    "LLaVA": named(
        partial(
            _built,
            *("LlavaForConditionalGeneration", "LlavaConfig"),
            text_config={**_DECODER, "model_type": "llama"},
            vision_config={**_PATCHES, "model_type": "clip_vision_model", "projection_dim": 16},
            image_token_index=VOCABULARY - 1,
        ),
        illustrated,
        "model.language_model.layers",
    ),
}
