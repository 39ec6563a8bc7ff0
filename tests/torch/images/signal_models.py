"""Models of signals and volumes for tests of the key `data`, and how they are trained on parts."""

import torch
from torch import nn
from torch.nn import functional

import msrun
from msrun.parallel.local import full_tensor

CLASSES = 3
SIZES = {"audio": (37,), "words": (41,), "volume": (9, 7, 10)}
AXES = {"audio": ("h",), "words": ("h",), "volume": ("d", "h", "w")}


class Dilated(nn.Module):
    """A residual block of WaveNet, whose windows may be wider than a rank's part."""

    def __init__(self, width, dilation):
        super().__init__()
        self.conv = nn.Conv1d(width, 2 * width, 3, padding="same", dilation=dilation)
        self.norm = nn.GroupNorm(2, 2 * width)
        self.back = nn.Conv1d(width, width, 1)

    def forward(self, x):
        return x + self.back(functional.glu(self.norm(self.conv(x)), 1))


class Audio(nn.Module):
    """A class for each moment of a signal: an encoder, dilated blocks and a decoder."""

    norm = nn.BatchNorm1d

    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Conv1d(3, 8, 7, stride=2, padding=3), self.norm(8))
        self.pool = nn.MaxPool1d(3, 2, 1)
        self.blocks = nn.ModuleList([Dilated(8, dilation) for dilation in (1, 2, 4, 8)])
        self.decode = nn.ConvTranspose1d(8, 8, 4, stride=2, padding=1)
        self.head = nn.Conv1d(11, CLASSES, 5, padding=2, padding_mode="reflect")

    def forward(self, image):
        x = self.pool(functional.gelu(self.encode(image)))
        for block in self.blocks:
            x = block(x)
        x = functional.interpolate(self.decode(x), size=image.shape[-1], mode="linear")
        return self.head(torch.cat([x, image], 1))


class GroupedAudio(Audio):
    """Without batch norms, so that micro-batches are those of one process."""

    norm = staticmethod(lambda width: nn.GroupNorm(2, width))


class Words(nn.Module):
    """A class for each signal, by depthwise and pointwise convolutions."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(3, 8, 5, 2), nn.BatchNorm1d(8), nn.ReLU())
        self.deep = nn.Sequential(
            nn.Conv1d(8, 8, 9, padding=4, groups=8),
            nn.Conv1d(8, 12, 1),
            nn.InstanceNorm1d(12, affine=True),
            nn.LeakyReLU(),
            nn.AvgPool1d(3, 2, 1, ceil_mode=True),
        )
        self.mean = nn.AdaptiveAvgPool1d(1)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, image):
        x = self.deep(self.stem(image))
        return self.head(torch.cat([self.mean(x).flatten(1), x.amax(-1)], 1))


class Twice(nn.Sequential):
    def __init__(self, before, after, norm):
        super().__init__(
            nn.Conv3d(before, after, 3, padding=1),
            norm(after),
            nn.LeakyReLU(0.1),
            nn.Conv3d(after, after, (1, 3, 3), padding=(0, 1, 1), groups=2),
            nn.PReLU(after),
        )


class Volume(nn.Module):
    """A class for each voxel: a U-Net in three dims."""

    norm = nn.BatchNorm3d

    def __init__(self):
        super().__init__()
        self.down1, self.down2 = Twice(3, 4, self.norm), Twice(4, 6, self.norm)
        self.bottom = Twice(6, 8, nn.InstanceNorm3d)
        self.up = nn.ConvTranspose3d(8, 6, 2, stride=2, output_padding=(0, 1, 0))
        self.up1, self.up2 = Twice(12, 4, self.norm), Twice(8, 4, self.norm)
        self.head = nn.Conv3d(4, CLASSES, 1)

    def forward(self, image):
        first = self.down1(image)
        second = self.down2(functional.max_pool3d(first, 2, ceil_mode=True))
        x = self.up(self.bottom(functional.avg_pool3d(second, 2, ceil_mode=True)))
        x = x[:, :, : second.shape[2], : second.shape[3], : second.shape[4]]
        x = self.up1(torch.cat([second, x], 1))
        x = functional.interpolate(x, size=first.shape[2:], mode="trilinear", align_corners=False)
        return self.head(self.up2(torch.cat([first, x], 1)))


class GroupedVolume(Volume):
    """Without batch norms, so that micro-batches are those of one process."""

    norm = staticmethod(lambda width: nn.GroupNorm(2, width))


MODELS = {
    "audio": Audio,
    "words": Words,
    "volume": Volume,
    "audio in groups": GroupedAudio,
    "volume in groups": GroupedVolume,
}


def build(name):
    torch.manual_seed(3)
    return MODELS[name]().double()


def batches(name, samples=4, count=3):
    """Return inputs and classes: of each, or of each element, of which some do not count."""
    draw, size = torch.Generator().manual_seed(5), SIZES[name.split()[0]]
    found = []
    for _ in range(count):
        x = torch.randn(samples, 3, *size, generator=draw).double()
        if name == "words":
            y = torch.randint(0, CLASSES, (samples,), generator=draw)
        else:
            y = torch.randint(0, CLASSES, (samples, *size), generator=draw)
            y[:, :3] = -100
        found.append((x, y))
    return found


def loss_fn(output, target):
    return functional.cross_entropy(output, target)


def data_of(name, mesh):
    dims = [axis if axis in mesh else None for axis in AXES[name.split()[0]]]
    return {"image": ["dp", None, *dims], "label": ["dp"] if name == "words" else ["dp", *dims]}


def trained(config, name, path=None, max_norm=None):
    """Return losses, weights and buffers after three steps, and outputs in evaluation.

    Args:
        config: The configuration, without `data`.
        name: Of the model.
        path: Of a checkpoint that is written after the first step, or read before it where it is.
        max_norm: Of the gradients.
    """
    if "mesh" in config:
        config = {**config, "data": data_of(name, config["mesh"])}
    with msrun.init(config) as rt:
        model = rt.shard(build(name))
        optimizer = rt.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        ranks, rank = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
        todo = batches(name)
        if path and path.exists():
            rt.load(model, optimizer, path=path)
            todo, path = todo[1:], None
        losses = []
        for batch in todo:
            x, y = (tensor.tensor_split(ranks)[rank] for tensor in batch)
            losses.append(rt.step(model, optimizer, loss_fn, x, y, max_norm=max_norm))
            if path:
                rt.save(model, optimizer, step=1, path=path)
                path = None
        weights = {key: full_tensor(p.detach()) for key, p in model.named_parameters()}
        weights |= dict(model.named_buffers())
        with torch.no_grad():
            weights["output"] = model.eval()(batches(name)[0][0])
        return torch.stack(losses).double(), weights
