"""Models and rules of both tests of `verify`."""

import random
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional

TP = [
    {"match": "layers.*.q", "style": "colwise"},
    {"match": "layers.*.k", "style": "colwise"},
    {"match": "layers.*.v", "style": "colwise"},
    {"match": "layers.*.o", "style": "rowwise"},
    {"match": "layers.*.up", "style": "colwise"},
    {"match": "layers.*.down", "style": "rowwise"},
]


class Centred(nn.Module):
    """Takes the mean over the batch, of which a rank has a part."""

    def forward(self, x):
        return x - x.mean(0)


def of_samples():
    return nn.Sequential(nn.Linear(16, 8), Centred(), nn.Linear(8, 10))


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.randn(len(x), self.out_features)


class Drawing(nn.Linear):
    """Draws numbers that change nothing, as layers that are dropped at a rate of 0."""

    def forward(self, x):
        drawn = random.random() + torch.rand(1).item()
        return super().forward(x) if drawn >= 0.0 else x


class WrongDrawing(Drawing):
    """Computes something else on another rank, too."""

    def forward(self, x):
        return super().forward(x) * (1.0 + torch.distributed.get_rank())


class Adapted(nn.Linear):
    """Drops by functions, at rates that are in a dict and in a config."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.module_dropout = {"default": 0.5}
        self.config = SimpleNamespace(layerdrop=0.5, width=0.5)

    def forward(self, x):
        y = functional.dropout(super().forward(x), self.module_dropout["default"])
        return y + y if torch.rand([]) < self.config.layerdrop else y


def not_verified(caught):
    """Return the warnings that say what was not verified."""
    return [str(w.message) for w in caught if "verif" in str(w.message)]
