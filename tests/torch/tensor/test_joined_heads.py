"""Attention that joins its heads with the samples, and divides them again, on shards of heads."""

import copy

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch

# Samples, heads, words and width of a head.
B, H, S, D = 6, 4, 5, 3
# How heads of samples, (B * H, S, D), come apart again.
FORMS = {
    "heads": lambda y: y.view(B, H, S, D),
    "heads, joined with words": lambda y: y.reshape(B, H, S * D).unflatten(2, (S, D)),
    "samples in groups": lambda y: y.view(2, B // 2, H, S, D).flatten(0, 1),
    "halves of heads": lambda y: y.view(B * 2, 2, S, D).view(B, H, S, D),
    "joined still": lambda y: y.view(B * H, S * D).view(B, H, S, D),
}


class Attention(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.num_heads = H
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(H * D, H * D) for _ in range(3))
        self.o_proj = nn.Linear(H * D, H * D)
        self.form = FORMS[form]

    def forward(self, x):
        parts = (part(x).view(B, S, H, D) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.transpose(1, 2).reshape(B * H, S, D) for part in parts)
        y = self.form((q @ k.transpose(1, 2)).softmax(-1) @ v)
        return self.o_proj(y.transpose(1, 2).reshape(B, S, H * D))


def differences(form):
    """Return how far outputs and gradients are from one process, and the heads on this rank."""
    torch.manual_seed(3)
    model = Attention(form).double()
    whole = copy.deepcopy(model)
    x = torch.randn(B, S, H * D).double()
    model = msrun.init({"mesh": {"tp": 2}, "plan": "auto_tp"}).shard(model)
    with torch.no_grad():
        worst = [(full_tensor(model(x)) - whole(x)).abs().max().item()]
    for each in (model, whole):
        functional.mse_loss(each(x), x).backward()
    for (_, param), (_, other) in zip(
        model.named_parameters(), whole.named_parameters(), strict=True
    ):
        worst.append((full_tensor(param.grad) - other.grad).abs().max().item())
    return max(worst), model.q_proj.weight.to_local().shape[0] // D


@pytest.mark.parametrize("form", FORMS)
def test_heads_joined_with_samples_come_apart_as_in_one_process(form):
    for worst, heads in run_warm(differences, 2, form):
        assert worst == pytest.approx(0, abs=1e-12)
        assert heads == H // 2
