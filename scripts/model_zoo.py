"""Models that people train, in small: what scripts/model_table.py puts through every configuration.

All have random weights; nothing is downloaded.  Sizes divide by two ranks, dropout is off, and
caches of decoders too (`use_cache=False`), as the pages of transformers say for training.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from zoo_modules import Dlrm, Lstm, Translator  # type: ignore[import-not-found]  # beside this file


def _make_torchvision_importable() -> None:
    """Declare the operators without which torchvision cannot be imported."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # it is built for another torch; its models need none of its operators
        declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(declared)
        importlib.import_module("torchvision")


_DECLARED: list[torch.library.Library] = []
_make_torchvision_importable()

SAMPLES = 8
_VOCABULARY, _LENGTH, _CLASSES = 40, 12, 8
_TEXT: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "use_cache": False,
}
_SEEN: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_labels": _CLASSES,
}

Rules = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """One model.

    Args:
        needs: The package that has it; empty for torch alone.
        make: Builds it.
        inputs: Returns the inputs of a batch, by position.
        target: Returns its target.
        loss: Of output and target.
        blocks: Names of the lists whose members are recomputed.
        plan: The rules of a tensor-parallel plan; without any there is none.
    """

    needs: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    target: Callable[[], Tensor]
    loss: Callable[[Any, Tensor], Tensor]
    blocks: Sequence[str] = ()
    plan: Rules = field(default_factory=list)


def _styles(**patterns: Sequence[str]) -> Rules:
    return [{"match": m, "style": style} for style, found in patterns.items() for m in found]


def _of(package: str, name: str, settings: str = "", **options: Any) -> nn.Module:
    """Build a model of a package from a class and, if it has one, its configuration."""
    module = importlib.import_module(package)
    if not settings:
        return getattr(module, name)(**options)  # type: ignore[no-any-return]
    return getattr(module, name)(getattr(module, settings)(**options))  # type: ignore[no-any-return]


def _field(output: Any) -> Tensor:
    """Return the tensor of an output."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "sample"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    raise TypeError(type(output))


def _by_class(output: Any, target: Tensor) -> Tensor:
    logits = _field(output)
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def _squared(output: Any, target: Tensor) -> Tensor:
    return functional.mse_loss(_field(output), target)


def _tokens(length: int = _LENGTH) -> Tensor:
    return torch.randint(1, _VOCABULARY, (SAMPLES, length))


def _image(size: int = 16, channels: int = 3) -> Tensor:
    return torch.randn(SAMPLES, channels, size, size, dtype=torch.float64)


def _classes() -> Tensor:
    return torch.randint(0, _CLASSES, (SAMPLES,))


def _padded() -> Tensor:
    """Return targets of which some do not count."""
    target = _tokens()
    target[0, 7:] = target[3, 4:] = -100
    return target


def _language(name: str, settings: str, blocks: str, plan: Rules, **options: Any) -> ZooModel:
    return ZooModel(
        needs="transformers",
        make=partial(_of, "transformers", name, settings, **options),
        inputs=lambda: (_tokens(),),
        target=_padded,
        loss=_by_class,
        blocks=[blocks],
        plan=plan,
    )


_DECODER = _styles(
    colwise=[
        *("*.q_proj", "*.k_proj", "*.v_proj"),
        *("*.gate_proj", "*.up_proj"),
    ],
    rowwise=["*.o_proj", "*.down_proj"],
)
_ATTENTION = _styles(colwise=["*.q_proj", "*.k_proj", "*.v_proj"], rowwise=["*.o_proj"])
_GPT2: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "use_cache": False,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_WHISPER: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
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
_SOUND: dict[str, Any] = {
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
    "vocab_size": _VOCABULARY,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "use_cache": False,
}


ZOO: dict[str, ZooModel] = {
    "GPT-2": _language(
        "GPT2LMHeadModel",
        "GPT2Config",
        "transformer.h",
        [],
        **_GPT2,
    ),
    "Llama": _language("LlamaForCausalLM", "LlamaConfig", "model.layers", _DECODER, **_TEXT),
    "Qwen2, tied": _language(
        *("Qwen2ForCausalLM", "Qwen2Config", "model.layers", _DECODER),
        **_TEXT,
        tie_word_embeddings=True,
    ),
    "Qwen3": _language(
        "Qwen3ForCausalLM", "Qwen3Config", "model.layers", _DECODER, **_TEXT, head_dim=4
    ),
    "Gemma 2": _language(
        *("Gemma2ForCausalLM", "Gemma2Config", "model.layers", _DECODER),
        **_TEXT,
        head_dim=4,
        query_pre_attn_scalar=4,
    ),
    "Mistral": _language("MistralForCausalLM", "MistralConfig", "model.layers", _DECODER, **_TEXT),
    "Mixtral": _language(
        *("MixtralForCausalLM", "MixtralConfig", "model.layers", _ATTENTION),
        **_TEXT,
        num_local_experts=2,
        experts_implementation="eager",
    ),
    "BERT": ZooModel(
        needs="transformers",
        make=partial(
            _of,
            *("transformers", "BertForMaskedLM", "BertConfig"),
            **{k: v for k, v in _TEXT.items() if k not in ("num_key_value_heads", "use_cache")},
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        inputs=lambda: (_tokens(), torch.ones(SAMPLES, _LENGTH, dtype=torch.int64)),
        target=_padded,
        loss=_by_class,
        blocks=["bert.encoder.layer"],
        plan=_styles(
            colwise=["*.query", "*.key", "*.value", "*.intermediate.dense"],
            rowwise=["*.output.dense"],
        ),
    ),
    "T5": ZooModel(
        needs="transformers",
        make=partial(_of, "transformers", "T5ForConditionalGeneration", "T5Config", **_T5),
        inputs=lambda: (_tokens(), torch.ones(SAMPLES, _LENGTH, dtype=torch.int64), _tokens()),
        target=_padded,
        loss=_by_class,
        blocks=["encoder.block", "decoder.block"],
        plan=_styles(colwise=["*.wi"], rowwise=["*.wo"]),
    ),
    "ViT": ZooModel(
        needs="transformers",
        make=partial(
            _of,
            *("transformers", "ViTForImageClassification", "ViTConfig"),
            **_SEEN,
            image_size=16,
            patch_size=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        inputs=lambda: (_image(),),
        target=_classes,
        loss=_by_class,
        blocks=["vit.layers"],
        plan=_styles(
            colwise=["*.q_proj", "*.k_proj", "*.v_proj", "*.fc1"], rowwise=["*.o_proj", "*.fc2"]
        ),
    ),
    "Whisper": ZooModel(
        needs="transformers",
        make=partial(
            _of, "transformers", "WhisperForConditionalGeneration", "WhisperConfig", **_WHISPER
        ),
        inputs=lambda: (
            torch.randn(SAMPLES, 8, 16, dtype=torch.float64),
            torch.ones(SAMPLES, 16, dtype=torch.int64),
            _tokens(),
        ),
        target=_padded,
        loss=_by_class,
        blocks=["model.encoder.layers", "model.decoder.layers"],
        plan=_styles(
            colwise=["*.q_proj", "*.k_proj", "*.v_proj", "*.fc1"], rowwise=["*.out_proj", "*.fc2"]
        ),
    ),
    "wav2vec2": ZooModel(
        needs="transformers",
        make=partial(
            _of,
            "transformers",
            "Wav2Vec2ForSequenceClassification",
            "Wav2Vec2Config",
            **_SEEN,
            **_SOUND,
        ),
        inputs=lambda: (torch.randn(SAMPLES, 400, dtype=torch.float64),),
        target=_classes,
        loss=_by_class,
        blocks=["wav2vec2.encoder.layers"],
        plan=_styles(
            colwise=["*.q_proj", "*.k_proj", "*.v_proj", "*.intermediate_dense"],
            rowwise=["*.out_proj", "*.output_dense"],
        ),
    ),
    "timm ViT": ZooModel(
        needs="timm",
        make=lambda: _timm(
            *("vit_tiny_patch16_224",),
            img_size=16,
            patch_size=8,
            embed_dim=16,
            depth=2,
            num_heads=4,
        ),
        inputs=lambda: (_image(),),
        target=_classes,
        loss=_by_class,
        blocks=["blocks"],
        plan=_styles(colwise=["*.fc1"], rowwise=["*.fc2"]),
    ),
    "timm ResNet": ZooModel(
        needs="timm",
        make=lambda: _timm("resnet18", layers=[1, 1, 1, 1], channels=(8, 8, 16, 16)),
        inputs=lambda: (_image(32),),
        target=_classes,
        loss=_by_class,
        blocks=["layer3", "layer4"],
    ),
    "timm EfficientNet": ZooModel(
        needs="timm",
        make=lambda: _timm("test_efficientnet"),
        inputs=lambda: (_image(32),),
        target=_classes,
        loss=_by_class,
        blocks=["blocks"],
    ),
    "diffusers UNet2D": ZooModel(
        needs="diffusers",
        make=partial(
            _of,
            "diffusers",
            "UNet2DModel",
            sample_size=8,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            attention_head_dim=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        inputs=lambda: (_image(8), torch.arange(SAMPLES)),
        target=partial(_image, 8),
        loss=_squared,
        blocks=["down_blocks", "up_blocks"],
    ),
    "diffusers DiT": ZooModel(
        needs="diffusers",
        make=lambda: _dit(),  # noqa: PLW0108 - it is defined below
        inputs=lambda: (_image(8), torch.arange(SAMPLES), _classes()),
        target=partial(_image, 8),
        loss=_squared,
        blocks=["transformer_blocks"],
        plan=_styles(
            colwise=["*.to_q", "*.to_k", "*.to_v", "*.ff.net.0.proj"],
            rowwise=["*.to_out.0", "*.ff.net.2"],
        ),
    ),
    "LSTM": ZooModel(
        needs="",
        make=Lstm,
        inputs=lambda: (_tokens(),),
        target=_padded,
        loss=_by_class,
        blocks=["lstm"],
        plan=_styles(colwise=["head"]),
    ),
    "DLRM": ZooModel(
        needs="",
        make=Dlrm,
        inputs=lambda: (
            torch.randn(SAMPLES, 5, dtype=torch.float64),
            torch.randint(0, 20, (SAMPLES, 3, 2)),
        ),
        target=lambda: torch.randn(SAMPLES, 1, dtype=torch.float64),
        loss=_squared,
        blocks=["top"],
        plan=_styles(colwise=["top.0"], rowwise=["top.2"]),
    ),
    "nn.Transformer": ZooModel(
        needs="",
        make=Translator,
        inputs=lambda: (_tokens(), _tokens()),
        target=_padded,
        loss=_by_class,
        blocks=["transformer.encoder.layers", "transformer.decoder.layers"],
        plan=_styles(colwise=["*.linear1"], rowwise=["*.linear2"]),
    ),
}


def _dit() -> nn.Module:
    model = _of(
        *("diffusers", "DiTTransformer2DModel"),
        num_attention_heads=4,
        attention_head_dim=4,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=_CLASSES,
    )
    for module in model.modules():
        if hasattr(module, "dropout_prob"):  # of labels, which no option sets
            module.dropout_prob = 0.0  # type: ignore[assignment]
    return model


def _timm(name: str, **options: Any) -> nn.Module:
    timm = importlib.import_module("timm")
    model: nn.Module = timm.create_model(name, num_classes=_CLASSES, **options)
    return model
