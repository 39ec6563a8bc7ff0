"""Models of timm, torchvision, diffusers and others for the table, and some written by hand.

Sizes divide by two ranks, and dropout is off.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import nn
from zoo_entry import (  # type: ignore[import-not-found]  # beside this file
    CLASSES,
    SAMPLES,
    ZooModel,
    by_class,
    classes,
    image,
    of,
    padded,
    squared,
    styles,
    tokens,
)
from zoo_modules import (  # type: ignore[import-not-found]  # beside this file
    VOCABULARY,
    Dlrm,
    Gpt,
    GraphNetwork,
    Lstm,
    Translator,
)

OTHER_MODELS: dict[str, ZooModel] = {
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
        inputs=lambda: (image(),),
        target=classes,
        loss=by_class,
        blocks=["blocks"],
        plan="timm_vit",
    ),
    "timm ResNet": ZooModel(
        needs="timm",
        make=lambda: _timm("resnet18", layers=[1, 1, 1, 1], channels=(8, 8, 16, 16)),
        inputs=lambda: (image(32),),
        target=classes,
        loss=by_class,
        blocks=["layer3", "layer4"],
    ),
    "timm EfficientNet": ZooModel(
        needs="timm",
        make=lambda: _timm("test_efficientnet"),
        inputs=lambda: (image(32),),
        target=classes,
        loss=by_class,
        blocks=["blocks"],
    ),
    "diffusers UNet2D": ZooModel(
        needs="diffusers",
        make=partial(
            of,
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
        inputs=lambda: (image(8), torch.arange(SAMPLES)),
        target=partial(image, 8),
        loss=squared,
        blocks=["down_blocks", "up_blocks"],
    ),
    "diffusers DiT": ZooModel(
        needs="diffusers",
        make=lambda: _dit(),  # noqa: PLW0108 - it is defined below
        inputs=lambda: (image(8), torch.arange(SAMPLES), classes()),
        target=partial(image, 8),
        loss=squared,
        blocks=["transformer_blocks"],
        plan="dit",
    ),
    "LSTM": ZooModel(
        needs="",
        make=Lstm,
        inputs=lambda: (tokens(),),
        target=padded,
        loss=by_class,
        blocks=["lstm"],
        plan=styles(colwise=["head"]),
    ),
    "DLRM": ZooModel(
        needs="",
        make=Dlrm,
        inputs=lambda: (
            torch.randn(SAMPLES, 5, dtype=torch.float64),
            torch.randint(0, 20, (SAMPLES, 3, 2)),
        ),
        target=lambda: torch.randn(SAMPLES, 1, dtype=torch.float64),
        loss=squared,
        blocks=["top"],
        plan=styles(colwise=["top.0"], rowwise=["top.2"]),
    ),
    "nn.Transformer": ZooModel(
        needs="",
        make=Translator,
        inputs=lambda: (tokens(), tokens()),
        target=padded,
        loss=by_class,
        blocks=["transformer.encoder.layers", "transformer.decoder.layers"],
        plan="auto_tp",
    ),
    "timm MobileNetV3": ZooModel(
        needs="timm",
        make=lambda: _timm("mobilenetv3_small_050"),
        inputs=lambda: (image(32),),
        target=classes,
        loss=by_class,
        blocks=["blocks"],
    ),
    "timm RegNet": ZooModel(
        needs="timm",
        make=lambda: _timm("regnetx_002"),
        inputs=lambda: (image(32),),
        target=classes,
        loss=by_class,
        blocks=["s3", "s4"],
    ),
    "torchvision ResNet-18": ZooModel(
        needs="torchvision",
        make=partial(of, "torchvision.models", "resnet18", num_classes=CLASSES),
        inputs=lambda: (image(32),),
        target=classes,
        loss=by_class,
        blocks=["layer3", "layer4"],
    ),
    "diffusers UNet2D, cross attention": ZooModel(
        needs="diffusers",
        make=partial(
            of,
            "diffusers",
            "UNet2DConditionModel",
            sample_size=8,
            in_channels=3,
            out_channels=3,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            cross_attention_dim=16,
            attention_head_dim=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ),
        inputs=lambda: (
            image(8),
            torch.arange(SAMPLES),
            torch.randn(SAMPLES, 6, 16, dtype=torch.float64),
        ),
        target=partial(image, 8),
        loss=squared,
        blocks=["down_blocks", "up_blocks"],
        plan="auto_tp",
    ),
    "x-transformers": ZooModel(
        needs="x_transformers",
        make=lambda: _x_transformer(),  # noqa: PLW0108 - it is defined below
        inputs=lambda: (tokens(),),
        target=padded,
        loss=by_class,
        blocks=["attn_layers"],
        plan="auto_tp",
    ),
    "GPT by hand": ZooModel(
        needs="",
        make=Gpt,
        inputs=lambda: (tokens(),),
        target=padded,
        loss=by_class,
        blocks=["blocks"],
        plan="gpt2",
    ),
    "graph network": ZooModel(
        needs="",
        make=GraphNetwork,
        inputs=lambda: (
            torch.randn(SAMPLES, 10, 6, dtype=torch.float64),
            torch.randint(0, 10, (SAMPLES, 2, 24)),
        ),
        target=classes,
        loss=by_class,
        blocks=["layers"],
        plan="auto_tp",
    ),
    "DLRM, sparse": ZooModel(
        needs="",
        make=partial(Dlrm, sparse=True),
        inputs=lambda: (
            torch.randn(SAMPLES, 5, dtype=torch.float64),
            torch.randint(0, 20, (SAMPLES, 3, 2)),
        ),
        target=lambda: torch.randn(SAMPLES, 1, dtype=torch.float64),
        loss=squared,
        blocks=["top"],
        plan=styles(colwise=["top.0"], rowwise=["top.2"]),
        optimizer=partial(torch.optim.SGD, lr=1e-2),
    ),
}


def _x_transformer() -> nn.Module:
    library = importlib.import_module("x_transformers")
    layers = library.Decoder(dim=16, depth=2, heads=4, attn_dim_head=4)
    model: nn.Module = library.TransformerWrapper(
        num_tokens=VOCABULARY, max_seq_len=32, attn_layers=layers
    )
    return model


def _dit() -> nn.Module:
    model = of(
        *("diffusers", "DiTTransformer2DModel"),
        num_attention_heads=4,
        attention_head_dim=4,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=CLASSES,
    )
    for module in model.modules():
        if hasattr(module, "dropout_prob"):  # of labels, which no option sets
            setattr(module, "dropout_prob", 0.0)  # noqa: B010 - a module has no such attribute
    built: nn.Module = model
    return built


def _timm(name: str, **options: Any) -> nn.Module:
    timm = importlib.import_module("timm")
    model: nn.Module = timm.create_model(name, num_classes=CLASSES, **options)
    return model
