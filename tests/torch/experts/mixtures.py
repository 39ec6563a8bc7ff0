"""Mixtures of experts as people write them, and what one process makes of them."""

import copy

import torch
from ranks import Counted
from torch import nn
from torch.nn import functional

import msrun
from msrun.parallel.local import full_tensor
from msrun.parallel.uneven_rows.rows import rows_of

WIDTH, EXPERTS, CHOICES, ROWS, LENGTH = 8, 4, 2, 8, 6
RULE = {"match": "*.experts", "style": "experts", "axis": "ep"}


class Experts(nn.Module):
    """The weights of all experts in 3-D parameters; loops over those that some token chose."""

    def __init__(self, experts=EXPERTS):
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 16, WIDTH) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(experts, WIDTH, 8) * 0.3)

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            rows, place = torch.where(index == expert)
            if len(rows):
                gate, up = functional.linear(x[rows], self.gate_up_proj[expert]).chunk(2, -1)
                y = functional.linear(functional.silu(gate) * up, self.down_proj[expert])
                y = y * weights[rows, place, None]
                out.index_add_(0, rows, y.to(out.dtype))
        return out


class Mixture(nn.Module):
    """Routes each token to its best experts, beside an expert that all tokens share."""

    def __init__(self, kind=Experts):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), kind()
        self.shared = nn.Linear(WIDTH, WIDTH)

    def route(self, rows):
        return self.gate(rows).softmax(-1).topk(CHOICES)

    def forward(self, x):
        rows = x.reshape(-1, WIDTH)
        weights, index = self.route(rows)
        return (self.experts(rows, index, weights) + self.shared(rows)).view_as(x)


class CrowdedMixture(Mixture):
    """All tokens choose the first two experts, so other ranks get none."""

    def route(self, rows):
        weights = self.gate(rows).softmax(-1)[:, :CHOICES]
        return weights, torch.arange(CHOICES).expand(len(rows), -1)


class CapacityMixture(Mixture):
    """An expert takes the first three tokens of a text; the others go to none."""

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        weights, index = scores.topk(CHOICES)
        chosen = functional.one_hot(index, EXPERTS).flatten(1, 2)
        place = (chosen.cumsum(1) * chosen).sum(-1).view_as(index)
        index = index.where(place <= 3, EXPERTS)
        y = self.experts(x.flatten(0, 1), index.flatten(0, 1), weights.flatten(0, 1))
        return y.view_as(x) + self.shared(x)


class Layer(nn.Module):
    def __init__(self, mixture):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), None
        self.outer, self.mlp = nn.Linear(16, WIDTH), mixture()

    def forward(self, x):
        x = x + self.outer(torch.relu(self.inner(self.norm(x))))
        return x + self.mlp(x)


class Language(nn.Module):
    def __init__(self, mixture=Mixture):
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList([Layer(mixture) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MODELS = {
    "top 2": Language,
    "crowded": lambda: Language(CrowdedMixture),
    "capacity": lambda: Language(CapacityMixture),
}


def build(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return MODELS[name]()


def token_loss(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def texts(steps):
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(0, 32, (2, ROWS, LENGTH), generator=draw) for _ in range(steps)]


def difference(name, config, steps=3):
    """Return how far losses, gradients and weights are from one process, the bytes of the last
    step, and the shapes of parameters."""
    model = build(name)
    whole = copy.deepcopy(model)
    plain = torch.optim.AdamW(whole.parameters(), lr=0.01)
    rt = msrun.init(config)
    model = rt.shard(model)
    update = rt.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    worst = 0.0
    for tokens, target in texts(steps):
        plain.zero_grad()
        expected = token_loss(whole(tokens), target)
        expected.backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        plain.step()
        part = [tensor.chunk(count)[share] for tensor in (tokens, target)]
        with Counted() as counts:
            loss = rt.step(model, update, token_loss, *part, max_norm=0.5)
        worst = max(worst, abs(loss.item() - expected.item()))
    assert norm > 0.5  # it did clip
    there = dict(whole.named_parameters())
    for param_name, param in model.named_parameters():
        pairs = [(param, there[param_name]), (param.grad, there[param_name].grad)]
        rows = rows_of(param)
        for found, wanted in pairs:
            if rows and not rows.count:  # it is of an expert of another rank
                assert not param.numel()
                continue
            assert (found is None) == (wanted is None)
            if found is not None:
                worst = max(worst, (full_tensor(found.detach()) - wanted).abs().max().item())
    shapes = {
        param_name: list((param.to_local() if hasattr(param, "to_local") else param).shape)
        for param_name, param in model.named_parameters()
    }
    return worst, (dict(counts.calls), dict(counts.bytes)), shapes
