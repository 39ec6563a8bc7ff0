"""Models and rules of both tests of `verify`."""

import torch
from torch import nn

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


def not_verified(caught):
    """Return the warnings that say what was not verified."""
    return [str(w.message) for w in caught if "verif" in str(w.message)]
