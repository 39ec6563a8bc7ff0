"""Models that nothing here was written for, in small: what a user brings next.

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
    SEEN,
    TEXT,
    ZooModel,
    by_class,
    classes,
    image,
    labelled,
    of,
    padded,
    squared,
    tokens,
)
from zoo_families import encoder, named  # type: ignore[import-not-found]
from zoo_modules import VOCABULARY  # type: ignore[import-not-found]
from zoo_others import seeing  # type: ignore[import-not-found]
from zoo_text import BART, SOUND, decoder, masked, model_of, owning  # type: ignore[import-not-found]

_PLAN = "auto_tp"
_TRANSLATOR = {key: value for key, value in BART.items() if key != "use_cache"}
_CODEBOOKS = 2


def hidden(output: Any, target: Tensor) -> Tensor:
    """Return the mean of squared distances of what an encoder gives."""
    return functional.mse_loss(output.last_hidden_state, target)


def of_features(output: Any, target: Tensor) -> Tensor:
    """Return the mean of squares of all features of a ControlNet, beside a target."""
    features, middle = output[:2]
    parts = [functional.mse_loss(part, torch.zeros_like(part)) for part in (*features, middle)]
    return sum(parts, functional.mse_loss(features[0].mean(1, keepdim=True), target))


def noise(*shape: int) -> Tensor:
    """Return numbers of samples."""
    return torch.randn(SAMPLES, *shape, dtype=torch.float64)


def forecast() -> dict[str, Tensor]:
    """Return the past and the future of series."""
    return {"past_values": noise(16, 2), "future_values": noise(4, 2)}


def adapted(settings: str, **options: Any) -> nn.Module:
    """Return a Llama that peft adapts."""
    peft = importlib.import_module("peft")
    text = TEXT | ({} if "task_type" in options else {"use_cache": False})
    model = of("transformers", "LlamaForCausalLM", "LlamaConfig", **text)
    found: nn.Module = peft.get_peft_model(model, getattr(peft, settings)(**options))
    for param in found.parameters():
        if param.requires_grad and not param.any():  # nothing reaches the others then
            nn.init.normal_(param, std=0.1)
    return found


def _timm(name: str, **options: Any) -> nn.Module:
    timm = importlib.import_module("timm")
    model: nn.Module = timm.create_model(name, num_classes=CLASSES, **options)
    return model


def _vision(name: str, **options: Any) -> nn.Module:
    model: nn.Module = of("torchvision.models", name, num_classes=CLASSES, **options)
    return model


_SPATIAL: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
}

STRANGERS: dict[str, ZooModel] = {
    "StableLM": decoder("StableLm", _PLAN, use_qkv_bias=True, qk_layernorm=True),
    "OLMoE": decoder(
        "Olmoe",
        _PLAN,
        num_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",
    ),
    "LFM2": decoder(
        "Lfm2",
        _PLAN,
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
    ),
    "RoBERTa": encoder("Roberta", "roberta.encoder.layer", "roberta", **ENCODER),
    "mBART, labels": owning(
        *("MBartForConditionalGeneration", "MBartConfig"),
        *("model.encoder.layers", "model.decoder.layers"),
        plan=_PLAN,
        **_TRANSLATOR,
    ),
    "Pegasus, labels": owning(
        *("PegasusForConditionalGeneration", "PegasusConfig"),
        *("model.encoder.layers", "model.decoder.layers"),
        plan=_PLAN,
        **_TRANSLATOR,
    ),
    "FNet": model_of(
        *("FNetForMaskedLM", "FNetConfig", "fnet.encoder.layer"),
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        hidden_dropout_prob=0.0,
        max_position_embeddings=32,
        pad_token_id=0,
        plan=_PLAN,
    ),
    "Perceiver": model_of(
        *("PerceiverForMaskedLM", "PerceiverConfig", "perceiver.encoder.self_attends"),
        vocab_size=VOCABULARY,
        d_model=16,
        d_latents=16,
        num_latents=4,
        num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        qk_channels=16,
        v_channels=16,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=LENGTH,
        inputs=masked,
        plan=_PLAN,
    ),
    "WavLM": model_of(
        *("WavLMForSequenceClassification", "WavLMConfig", "wavlm.encoder.layers"),
        **(SEEN | SOUND),
        inputs=lambda: (noise(400),),
        target=classes,
        plan=_PLAN,
    ),
    "MusicGen": model_of(
        *("MusicgenForCausalLM", "MusicgenDecoderConfig", "model.decoder.layers"),
        vocab_size=VOCABULARY,
        hidden_size=16,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        num_codebooks=_CODEBOOKS,
        pad_token_id=0,
        bos_token_id=0,
        dropout=0.0,
        use_cache=False,
        inputs=lambda: (torch.cat([tokens() for _ in range(_CODEBOOKS)]),),
        target=lambda: torch.cat([padded() for _ in range(_CODEBOOKS)]),
        plan=_PLAN,
    ),
    "Bark": model_of(
        *("BarkSemanticModel", "BarkSemanticConfig", "layers"),
        block_size=32,
        input_vocab_size=VOCABULARY,
        output_vocab_size=VOCABULARY,
        num_layers=2,
        num_heads=4,
        hidden_size=16,
        use_cache=False,
        plan=_PLAN,
    ),
    "PatchTST": named(
        partial(
            of,
            *("transformers", "PatchTSTForPrediction", "PatchTSTConfig"),
            num_input_channels=2,
            context_length=16,
            patch_length=4,
            patch_stride=4,
            prediction_length=4,
            d_model=16,
            ffn_dim=32,
            num_hidden_layers=2,
        ),
        forecast,
        "model.encoder.layers",
    ),
    "SAM, encoder": model_of(
        *("SamVisionModel", "SamVisionConfig", "vision_encoder.layers"),
        hidden_size=16,
        output_channels=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=4,
        mlp_dim=32,
        window_size=4,
        global_attn_indexes=[1],
        num_pos_feats=8,
        inputs=lambda: (image(32),),
        target=lambda: noise(8, 8, 8),
        loss=hidden,
        plan=_PLAN,
    ),
    "timm ConvNeXt V2": seeing(
        "timm",
        partial(_timm, "convnextv2_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
        "stages",
        plan=_PLAN,
    ),
    "timm MLP-Mixer": seeing(
        "timm",
        partial(
            of,
            *("timm.models.mlp_mixer", "MlpMixer"),
            num_classes=CLASSES,
            img_size=16,
            patch_size=4,
            embed_dim=16,
            num_blocks=2,
        ),
        "blocks",
        size=16,
        plan=_PLAN,
    ),
    "timm Swin": seeing(
        "timm",
        partial(
            _timm,
            "swin_tiny_patch4_window7_224",
            img_size=32,
            patch_size=4,
            window_size=4,
            embed_dim=8,
            depths=(2, 2),
            num_heads=(2, 4),
            drop_path_rate=0.0,
        ),
        *("layers.0.blocks", "layers.1.blocks"),
        plan=_PLAN,
    ),
    "torchvision ViT": seeing(
        "torchvision",
        partial(
            _vision,
            "VisionTransformer",
            image_size=16,
            patch_size=8,
            num_layers=2,
            num_heads=4,
            hidden_dim=16,
            mlp_dim=32,
        ),
        *("encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1"),
        size=16,
        plan=_PLAN,
    ),
    "torchvision Swin": seeing(
        "torchvision",
        partial(
            _vision,
            "SwinTransformer",
            patch_size=[4, 4],
            embed_dim=8,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=[4, 4],
            stochastic_depth_prob=0.0,
        ),
        *("features.1", "features.3"),
        plan=_PLAN,
    ),
    "torchvision DenseNet": seeing(
        "torchvision",
        partial(_vision, "DenseNet", growth_rate=4, block_config=(2, 2), num_init_features=8),
        *("features.denseblock1", "features.denseblock2"),
        plan=_PLAN,
    ),
    "diffusers AutoencoderKL": ZooModel(
        needs="diffusers",
        make=partial(
            of,
            *("diffusers", "AutoencoderKL"),
            down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
            up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
            sample_size=8,
            **_SPATIAL,
        ),
        inputs=lambda: (image(8),),
        target=partial(image, 8),
        loss=squared,
        blocks=["encoder.down_blocks", "decoder.up_blocks"],
        plan=_PLAN,
    ),
    "diffusers ControlNet": ZooModel(
        needs="diffusers",
        make=partial(
            of,
            *("diffusers", "ControlNetModel"),
            in_channels=3,
            cross_attention_dim=16,
            attention_head_dim=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            conditioning_embedding_out_channels=(8, 8),
            **_SPATIAL,
        ),
        inputs=lambda: (image(8), torch.arange(SAMPLES), noise(6, 16), image(16)),
        target=lambda: noise(1, 8, 8),
        loss=of_features,
        blocks=["down_blocks"],
        plan=_PLAN,
    ),
    "diffusers PixArt": ZooModel(
        needs="diffusers",
        make=partial(
            of,
            *("diffusers", "PixArtTransformer2DModel"),
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=3,
            out_channels=3,
            num_layers=2,
            cross_attention_dim=16,
            sample_size=8,
            patch_size=2,
            caption_channels=16,
            use_additional_conditions=False,
            num_embeds_ada_norm=CLASSES,
        ),
        inputs=lambda: (image(8), noise(6, 16), torch.arange(SAMPLES)),
        target=partial(image, 8),
        loss=squared,
        blocks=["transformer_blocks"],
        plan=_PLAN,
    ),
    "Llama, LoHa": ZooModel(
        needs="peft",
        make=partial(adapted, "LoHaConfig", r=4, target_modules=["q_proj", "v_proj"]),
        inputs=lambda: (tokens(),),
        target=padded,
        loss=by_class,
        blocks=["base_model.model.model.layers"],
        plan=_PLAN,
    ),
    "Llama, prefixes": ZooModel(
        needs="peft",
        make=partial(adapted, "PrefixTuningConfig", task_type="CAUSAL_LM", num_virtual_tokens=3),
        inputs=labelled,
        blocks=["base_model.model.layers"],
        plan=_PLAN,
    ),
}
