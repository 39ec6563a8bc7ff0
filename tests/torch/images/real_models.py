"""Models of timm, torchvision and diffusers on parts of images, in small sizes with random weights.

They have the kinds of the table of models (`scripts/zoo_others.py`), and what their libraries add:
checkpoints, blocks and paths that are dropped, blur, attention.
"""

import importlib
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from zoo_entry import CLASSES, of

import msrun
from msrun.parallel.local import full_tensor

SAMPLES, STEPS = 4, 2
VIT = {"img_size": 32, "embed_dim": 16}
SWIN = {"window_size": 4, "depths": (1, 1), "num_heads": (2, 2)}
UNET = {
    "sample_size": 16,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}


def timm_model(name, **options):
    timm = importlib.import_module("timm")
    return timm.create_model(name, num_classes=CLASSES, **options)


def vision_model(name, **options):
    return of("torchvision.models", name, num_classes=CLASSES, **options)


def convnext():
    """Return a small one of torchvision."""
    library = importlib.import_module("torchvision.models.convnext")
    block = library.CNBlockConfig
    blocks = [block(8, 16, 1), block(16, 16, 1), block(16, None, 1)]
    return library.ConvNeXt(blocks, layer_scale=1.0, num_classes=CLASSES)


def efficientnet():
    """Return a small one of torchvision."""
    library = importlib.import_module("torchvision.models.efficientnet")
    blocks = [
        library.FusedMBConvConfig(2, 3, 2, 8, 8, 1),
        library.MBConvConfig(2, 5, 2, 8, 16, 2),
    ]
    return library.EfficientNet(blocks, dropout=0.0, stochastic_depth_prob=0.0, num_classes=CLASSES)


def checkpointed():
    """Return a ResNet that recomputes its blocks."""
    model = timm_model("resnet18", **SMALL)
    model.set_grad_checkpointing()
    return model


class Segmented(nn.Module):
    """A model of torchvision that returns a mapping."""

    def __init__(self):
        super().__init__()
        name = "lraspp_mobilenet_v3_large"
        options = {"weights": None, "weights_backbone": None, "num_classes": 3}
        self.model = of("torchvision.models.segmentation", name, **options)

    def forward(self, sample, timestep):
        del timestep
        return self.model(sample)["out"]


class Autoencoder(nn.Module):
    """An autoencoder of diffusers, without its random numbers."""

    def __init__(self):
        super().__init__()
        self.model = of(
            *("diffusers", "AutoencoderKL"),
            block_out_channels=(8, 16),
            norm_num_groups=4,
            latent_channels=4,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        )

    def forward(self, sample, timestep):
        del timestep
        return self.model.decode(self.model.encode(sample).latent_dist.mode()).sample


def unet(down, up, *, name="UNet2DModel", is_checkpointed=False, **options):
    kinds = {"down_block_types": down, "up_block_types": up}
    model = of("diffusers", name, **{**UNET, **kinds, **options})
    if is_checkpointed:
        model.enable_gradient_checkpointing()
    return model


def conditioned():
    return unet(
        ("DownBlock2D", "CrossAttnDownBlock2D"),
        ("CrossAttnUpBlock2D", "UpBlock2D"),
        name="UNet2DConditionModel",
        in_channels=3,
        out_channels=3,
        cross_attention_dim=16,
    )


CONVNEXT = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
SMALL = {"layers": [1, 1, 1, 1], "channels": (8, 8, 16, 16)}
PLAIN = ("DownBlock2D", "DownBlock2D"), ("UpBlock2D", "UpBlock2D")
# Package, constructor, and the size of images, which neither strides nor ranks divide.
CLASSIFIERS = {
    "timm ResNet": ("timm", lambda: timm_model("resnet18", **SMALL), 34),
    "timm ResNet, checkpoints": ("timm", checkpointed, 34),
    "timm ResNet, drop block": (
        "timm",
        lambda: timm_model("resnet18", **SMALL, drop_block_rate=0.3, drop_rate=0.2),
        34,
    ),
    "timm ResNet-D": ("timm", lambda: timm_model("resnet26d", **SMALL), 34),
    "timm ResNet, blur": ("timm", lambda: timm_model("resnetblur18", **SMALL), 34),
    "timm ResNet, context": (
        "timm",
        lambda: timm_model("resnet18", **SMALL, block_args={"attn_layer": "gc"}),
        34,
    ),
    "timm EfficientNet": ("timm", lambda: timm_model("test_efficientnet"), 36),
    "timm EfficientNet V2": (
        "timm",
        lambda: timm_model("tf_efficientnetv2_b0", channel_multiplier=0.25, depth_multiplier=0.2),
        36,
    ),
    "timm ConvNeXt": (
        "timm",
        lambda: timm_model("convnext_atto", **CONVNEXT, ls_init_value=1.0, drop_path_rate=0.5),
        66,
    ),
    "timm ConvNeXt V2": ("timm", lambda: timm_model("convnextv2_atto", **CONVNEXT), 66),
    "timm ViT": (
        "timm",
        lambda: timm_model("vit_tiny_patch16_224", **VIT, patch_size=8, depth=2, num_heads=4),
        32,
    ),
    "timm Swin": (
        "timm",
        lambda: timm_model("swin_tiny_patch4_window7_224", **VIT, **SWIN),
        32,
    ),
    "torchvision ResNet-18": ("torchvision", partial(vision_model, "resnet18"), 34),
    "torchvision EfficientNet": ("torchvision", efficientnet, 34),
    "torchvision ConvNeXt": ("torchvision", convnext, 66),
    "torchvision ShuffleNet": ("torchvision", partial(vision_model, "shufflenet_v2_x0_5"), 34),
}
# The same of models that return images.
PAINTERS = {
    "diffusers UNet2D": ("diffusers", partial(unet, *PLAIN, add_attention=False), 18),
    "diffusers UNet2D, checkpoints": ("diffusers", partial(unet, *PLAIN, is_checkpointed=True), 18),
    "diffusers UNet2D, attention": (
        "diffusers",
        partial(unet, ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")),
        16,
    ),
    "diffusers UNet2D, skips": (
        "diffusers",
        partial(
            unet,
            ("SkipDownBlock2D", "ResnetDownsampleBlock2D"),
            ("ResnetUpsampleBlock2D", "SkipUpBlock2D"),
            block_out_channels=(32, 32),
        ),
        16,
    ),
    "diffusers UNet2D, conditioned": ("diffusers", conditioned, 17),
    "diffusers AutoencoderKL": ("diffusers", Autoencoder, 16),
    "torchvision LR-ASPP": ("torchvision", Segmented, 66),
}
MODELS = CLASSIFIERS | PAINTERS


def build(name):
    torch.manual_seed(3)
    return MODELS[name][1]().double()


def batches(name):
    """Return inputs and a target for each step."""
    draw = torch.Generator().manual_seed(5)
    size = MODELS[name][2]
    found = []
    for _ in range(STEPS):
        image = torch.randn(SAMPLES, 3, size, size - 2 * (size % 16 > 0), generator=draw).double()
        if name in CLASSIFIERS:
            found.append(([image], torch.randint(0, CLASSES, (SAMPLES,), generator=draw)))
            continue
        inputs = [image, torch.arange(SAMPLES)]
        if "conditioned" in name:
            inputs.append(torch.randn(SAMPLES, 6, 16, generator=draw).double())
        found.append((inputs, torch.randn(image.shape, generator=draw).double()))
    return found


def data_of(name, axes):
    """Return the key `data` for images divided over `axes`."""
    image = ["dp", None, *(axis if axis in axes else None for axis in "hw")]
    if name in CLASSIFIERS:
        return {"image": image, "label": ["dp"]}
    inputs = {"sample": image, "timestep": ["dp"]}
    if "conditioned" in name:
        inputs["encoder_hidden_states"] = ["dp", None, None]
    return inputs | {"target": image}


def loss_of(output, target):
    output = getattr(output, "sample", output)
    if target.dim() == 1:
        return functional.cross_entropy(output, target)
    return functional.mse_loss(output, target)


def trained(config, name):
    """Return losses, weights and buffers after some steps, and the output in evaluation."""
    if "mesh" in config:
        config = {**config, "data": data_of(name, config["mesh"])}
    with msrun.init(config) as rt:
        model = rt.shard(build(name), sample=batches(name)[0][0])
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
        ranks, rank = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
        losses = []
        for inputs, target in batches(name):
            part = [value.tensor_split(ranks)[rank] for value in (*inputs, target)]
            losses.append(rt.step(model, optimizer, loss_of, *part).item())
        found = {key: full_tensor(param.detach()) for key, param in model.named_parameters()}
        found |= dict(model.named_buffers())
        with torch.no_grad():
            output = model.eval()(*batches(name)[0][0])
        found["output"] = getattr(output, "sample", output)
        return losses, found
