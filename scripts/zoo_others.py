"""Models of timm, torchvision, diffusers and others for the table, and some written by hand.

Sizes divide by two ranks, and dropout is off.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from zoo_entry import (  # type: ignore[import-not-found]  # beside this file
    ADAMW,
    CLASSES,
    SAMPLES,
    Optimizer,
    Plan,
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

Make = Callable[[], nn.Module]


def seeing(needs: str, make: Make, *blocks: str, size: int = 32, plan: Plan = ()) -> ZooModel:
    """Return the entry of a model that classifies images."""
    return ZooModel(
        needs=needs,
        make=make,
        inputs=lambda: (image(size),),
        target=classes,
        loss=by_class,
        blocks=blocks,
        plan=plan,
    )


def reading(
    needs: str, make: Make, *blocks: str, plan: Plan = "auto_tp", count: int = 1
) -> ZooModel:
    """Return the entry of a model of `count` texts that returns logits of each token."""
    return ZooModel(
        needs=needs,
        make=make,
        inputs=lambda: tuple(tokens() for _ in range(count)),
        target=padded,
        loss=by_class,
        blocks=blocks,
        plan=plan,
    )


def denoising(
    make: Make, *blocks: str, more: Callable[[], Any] = tuple, plan: Plan = ()
) -> ZooModel:
    """Return the entry of a model of diffusers: of images, their times, and `more`."""
    return ZooModel(
        needs="diffusers",
        make=make,
        inputs=lambda: (image(8), torch.arange(SAMPLES), *more()),
        target=partial(image, 8),
        loss=squared,
        blocks=blocks,
        plan=plan,
    )


_UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}


def dlrm(optimizer: Optimizer, *, sparse: bool) -> ZooModel:
    """Return the entry of a model that recommends."""
    return ZooModel(
        needs="",
        make=partial(Dlrm, sparse=sparse),
        inputs=lambda: (
            torch.randn(SAMPLES, 5, dtype=torch.float64),
            torch.randint(0, 20, (SAMPLES, 3, 2)),
        ),
        target=lambda: torch.randn(SAMPLES, 1, dtype=torch.float64),
        loss=squared,
        blocks=["top"],
        plan=styles(colwise=["top.0"], rowwise=["top.2"]),
        optimizer=optimizer,
    )


OTHER_MODELS: dict[str, ZooModel] = {
    "timm ViT": seeing(
        "timm",
        lambda: _timm(
            *("vit_tiny_patch16_224",),
            img_size=16,
            patch_size=8,
            embed_dim=16,
            depth=2,
            num_heads=4,
        ),
        "blocks",
        size=16,
        plan="timm_vit",
    ),
    "timm ResNet": seeing(
        "timm",
        lambda: _timm("resnet18", layers=[1, 1, 1, 1], channels=(8, 8, 16, 16)),
        *("layer3", "layer4"),
        plan="resnet",
    ),
    "timm EfficientNet": seeing(
        "timm", lambda: _timm("test_efficientnet"), "blocks", plan="efficientnet"
    ),
    "diffusers UNet2D": denoising(
        partial(
            of,
            *("diffusers", "UNet2DModel"),
            **_UNET,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        *("down_blocks", "up_blocks"),
        plan="unet",
    ),
    "diffusers DiT": denoising(
        lambda: _dit(),  # noqa: PLW0108 - it is defined below
        "transformer_blocks",
        more=lambda: (classes(),),
        plan="dit",
    ),
    "LSTM": reading("", Lstm, "lstm", plan=styles(colwise=["head"])),
    "DLRM": dlrm(ADAMW, sparse=False),
    "nn.Transformer": reading(
        *("", Translator, "transformer.encoder.layers", "transformer.decoder.layers"),
        count=2,
    ),
    "timm MobileNetV3": seeing(
        "timm", lambda: _timm("mobilenetv3_small_050"), "blocks", plan="mobilenet"
    ),
    "timm RegNet": seeing("timm", lambda: _timm("regnetx_002"), "s3", "s4", plan="regnet"),
    "torchvision ResNet-18": seeing(
        "torchvision",
        partial(of, "torchvision.models", "resnet18", num_classes=CLASSES),
        *("layer3", "layer4"),
        plan="resnet",
    ),
    "diffusers UNet2D, cross attention": denoising(
        partial(
            of,
            *("diffusers", "UNet2DConditionModel"),
            **_UNET,
            in_channels=3,
            out_channels=3,
            cross_attention_dim=16,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ),
        *("down_blocks", "up_blocks"),
        more=lambda: (torch.randn(SAMPLES, 6, 16, dtype=torch.float64),),
        plan="auto_tp",
    ),
    "x-transformers": reading(
        "x_transformers",
        lambda: _x_transformer(),  # noqa: PLW0108 - it is defined below
        "attn_layers",
        plan="x_transformers",
    ),
    "GPT by hand": reading("", Gpt, "blocks", plan="gpt2"),
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
    "DLRM, sparse": dlrm(partial(torch.optim.SGD, lr=1e-2), sparse=True),
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
