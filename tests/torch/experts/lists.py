"""Mixtures whose experts are a `ModuleList`, with the loops around it that people write."""

import functools

import torch
from mixtures import CHOICES, EXPERTS, MODELS, WIDTH, Language
from torch import nn
from torch.nn import functional


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return self.down(functional.silu(self.up(x)))


class Loop(nn.Module):
    """Calls the experts that some token chose, as Mixtral of transformers did."""

    kind = Expert

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList([self.kind() for _ in range(EXPERTS)])
        self.shared = nn.Linear(WIDTH, WIDTH)

    def route(self, rows):
        weights, index = self.gate(rows).softmax(-1).topk(CHOICES)
        return weights / weights.sum(-1, keepdim=True), index

    def forward(self, x):
        rows = x.view(-1, WIDTH)
        weights, index = self.route(rows)
        return (self.mix(rows, weights, index) + self.shared(rows)).view_as(x)

    def mix(self, rows, weights, index):
        found = torch.zeros_like(rows)
        mask = functional.one_hot(index, EXPERTS).permute(2, 1, 0)
        for expert in (mask.sum((-1, -2)) > 0).nonzero():
            place, row = torch.where(mask[expert].squeeze(0))
            y = self.experts[expert](rows[None, row].reshape(-1, WIDTH)) * weights[row, place, None]
            found.index_add_(0, row, y.to(found.dtype))
        return found


class After(Loop):
    """Calls the shared expert after the others."""

    def forward(self, x):
        rows = x.reshape(-1, WIDTH)
        weights, index = self.route(rows)
        return self.mix(rows, weights, index).view_as(x) + self.shared(x)


class Before(Loop):
    """Calls the shared expert before the others, and adds what it returned to theirs."""

    def forward(self, x):
        rows = x.reshape(-1, WIDTH)
        shared = self.shared(rows)
        return (shared + self.mix(rows, *self.route(rows))).view_as(x)


class Looked(Loop):
    """As `Before`, and looks at what the shared expert returned, but not in the trial."""

    def forward(self, x):
        rows = x.reshape(-1, WIDTH)
        shared = self.shared(rows)
        if torch.is_grad_enabled():
            shared = shared * 1
        return (shared + self.mix(rows, *self.route(rows))).view_as(x)


class Twice(Loop):
    """As `Before`, and calls the shared expert twice, but not in the trial."""

    def forward(self, x):
        rows = x.reshape(-1, WIDTH)
        found = [self.shared(rows)]
        if torch.is_grad_enabled():
            found.append(self.shared(rows * 2))
        return (self.mix(rows, *self.route(rows)) + sum(found)).view_as(x)


class Both(Before):
    """Calls one shared expert before the others and one behind them."""

    def __init__(self):
        super().__init__()
        self.behind = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x) + self.behind(x)


class EveryLoop(Loop):
    """Calls every expert, also without tokens; and by name."""

    def mix(self, rows, weights, index):
        found = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(index == number)
            found[row] += expert(x=rows[row]).mul_(weights[row, place, None])
        return found


class Assigned(Loop):
    """Writes results in their places, as remote code of DeepSeek does in training."""

    def mix(self, rows, weights, index):
        repeated, flat = rows.repeat_interleave(CHOICES, 0), index.flatten()
        y = torch.empty_like(repeated)
        for number, expert in enumerate(self.experts):
            y[flat == number] = expert(repeated[flat == number]).to(y.dtype)
        return (y.view(*index.shape, -1) * weights.unsqueeze(-1)).sum(1)


class Sorted(Loop):
    """Sorts tokens by expert and joins the results, as remote code of DeepSeek does."""

    def mix(self, rows, weights, index):
        flat = index.flatten()
        order = flat.argsort(stable=True)
        parts = rows[order // CHOICES].split(flat.bincount(minlength=EXPERTS).tolist())
        found = torch.cat([e(p) for e, p in zip(self.experts, parts, strict=True) if len(p)])
        back = torch.empty_like(found).index_copy(0, order, found)
        return (back.view(*index.shape, -1) * weights.unsqueeze(-1)).sum(1)


class Dense(Loop):
    """Every expert computes every token."""

    def mix(self, rows, weights, index):
        shares = weights.new_zeros(len(rows), EXPERTS).scatter(1, index, weights)
        found = torch.stack([expert(rows) for expert in self.experts], 1)
        return (found * shares.unsqueeze(-1)).sum(1)


class InPlace(Loop):
    """Adds to what a shared expert returned, counts, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("chosen", torch.zeros(EXPERTS), persistent=False)
        self.calls, self.seen = 0, []

    def forward(self, x):
        rows = x.flatten(0, 1) + 0
        rows *= 1.5
        found = self.shared(rows)
        weights, index = self.route(rows)
        self.calls += 1
        self.seen.append(len(rows))
        with torch.no_grad():
            self.chosen += 1
        for number, expert in enumerate(self.experts):
            row, place = torch.where(index == number)
            if row.numel():
                y = expert(rows[row]) * weights[row, place, None]
                found.index_add_(0, row, y.to(found.dtype))
        return found.view_as(x), torch.rand(2)


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = InPlace()

    def forward(self, x):
        return self.inner(x)[0]


class Crowded(Loop):
    """All tokens choose the first two experts, so other ranks get none."""

    def route(self, rows):
        weights = self.gate(rows).softmax(-1)[:, :CHOICES]
        return weights, torch.arange(CHOICES).expand(len(rows), -1)


class Lonely(Loop):
    """Only texts that begin with an even token choose experts, so some ranks call none."""

    def forward(self, x):
        chosen = x[:, 0, 0] > 0
        found = torch.zeros_like(x)
        if chosen.any():
            rows = x[chosen].flatten(0, 1)
            found[chosen] = self.mix(rows, *self.route(rows)).view(-1, *x.shape[1:])
        return found + self.shared(x)


class Weighted(nn.Module):
    """Multiplies by the weights itself, as the first Mixtral of transformers did."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x, weights):
        return self.down(torch.relu(self.up(x))) * weights


class WeightedLoop(Loop):
    kind = Weighted

    def mix(self, rows, weights, index):
        found = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(index == number)
            if len(row):
                y = expert(rows[row], weights[row, place, None])
                found.index_add_(0, row, y.to(found.dtype))
        return found


class Finished(Loop):
    """Drops each result, calls a module with their sum, and one with what does not depend on it."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.scale = nn.LayerNorm(WIDTH), nn.Dropout(0.0), nn.Linear(WIDTH, 1)
        self.gate_norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        rows = self.gate_norm(x.flatten(0, 1))
        weights, index = self.route(rows)
        found = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(index == number)
            found[row] += self.drop(expert(rows[row])) * weights[row, place, None]
        return (self.norm(found) * self.scale(rows).sigmoid() + self.shared(rows)).view_as(x)


class Three(Loop):
    """Has experts that ranks do not divide."""

    def __init__(self):
        super().__init__()
        self.experts = self.experts[:3]

    def route(self, rows):
        return self.gate(rows)[:, :3].softmax(-1).topk(2)


LISTS = {
    "list, finished": Finished,
    "list": Loop,
    "list, after": After,
    "list, before": Before,
    "list, looked at": Looked,
    "list, twice": Twice,
    "list, both": Both,
    "list, every": EveryLoop,
    "list, assigned": Assigned,
    "list, sorted": Sorted,
    "list, dense": Dense,
    "list, in place": First,
    "list, crowded": Crowded,
    "list, lonely": Lonely,
    "list, weighted": WeightedLoop,
}
MODELS |= {name: functools.partial(Language, kind) for name, kind in LISTS.items()}
MODELS["three"] = functools.partial(Language, Three)
