"""Models of images for tests of the key `data`, and how they are trained on parts of images."""

import torch
from torch import nn
from torch.nn import functional

import msrun
from msrun.parallel.local import full_tensor

SIZE = (18, 14)  # which neither two strides nor three ranks divide
CLASSES = 3


class Residual(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride), nn.BatchNorm2d(after))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += self.short(x)
        return self.relu(y)


class ResNet(nn.Module):
    """A class for each image."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, stride=2, padding=3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks = [Residual(8, 8, 1), Residual(8, 12, 2), Residual(12, 16, 2)]
        self.blocks = nn.ModuleList(blocks)
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))

    def forward(self, image):
        x = self.pool(self.stem(image))
        for block in self.blocks:
            x = block(x)
        return self.head(torch.flatten(self.mean(x), 1))


class Double(nn.Sequential):
    def __init__(self, before, after):
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1, padding_mode="reflect"),
            nn.GroupNorm(2, after),
            nn.SiLU(),
            nn.Conv2d(after, after, 3, padding=2, dilation=2, groups=2),
            nn.BatchNorm2d(after),
            nn.GELU(),
        )


class UNet(nn.Module):
    """A class for each pixel."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.bottom = Double(3, 4), Double(4, 8), Double(8, 8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.up1, self.up2 = Double(16, 4), Double(8, 4)
        self.head = nn.Conv2d(4, CLASSES, 1)

    def forward(self, image):
        first = self.down1(image)
        second = self.down2(functional.max_pool2d(first, 2))
        x = self.up(self.bottom(functional.avg_pool2d(second, 2, ceil_mode=True)))
        x = self.up1(torch.cat([second, x[..., : second.shape[2], : second.shape[3]]], 1))
        size = first.shape[-2:]
        x = functional.interpolate(x, size=size, mode="bilinear", align_corners=True)
        return self.head(self.up2(torch.cat([first, x], 1)))


def build(make):
    torch.manual_seed(3)
    return make().double()


def batches(make, samples=4, count=3, size=SIZE):
    """Return images and classes: of each, or of each pixel, of which some do not count."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for _ in range(count):
        x = torch.randn(samples, 3, *size, generator=draw).double()
        if make is ResNet:
            y = torch.randint(0, CLASSES, (samples,), generator=draw)
        else:
            y = torch.randint(0, CLASSES, (samples, *size), generator=draw)
            y[:, :3, 2:] = -100
            y[0, :9] = -100
        found.append((x, y))
    return found


def data_of(make, axes):
    """Return the key `data` for images divided over `axes`."""
    dims = ["h" if "h" in axes else None, "w" if "w" in axes else None]
    target = ["dp"] if make is ResNet else ["dp", *dims]
    return {"image": ["dp", None, *dims], "label": target}


def loss_fn(output, target):
    return functional.cross_entropy(output, target)


def trained(config, make):
    """Return losses, weights and buffers after three steps, and outputs in evaluation."""
    if "mesh" in config:
        config = {**config, "data": data_of(make, config["mesh"])}
    with msrun.init(config) as rt:
        model = rt.shard(build(make), sample=batches(make)[0][:1])
        optimizer = rt.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        ranks, rank = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
        losses = []
        for batch in batches(make):
            x, y = (tensor.tensor_split(ranks)[rank] for tensor in batch)
            losses.append(rt.step(model, optimizer, loss_fn, x, y))
        weights = {name: full_tensor(p.detach()) for name, p in model.named_parameters()}
        weights |= dict(model.named_buffers())
        with torch.no_grad():
            weights["output"] = model.eval()(batches(make)[0][0])
        return torch.stack(losses).double(), weights
