"""Models of recommendation, whose fields each have a run of rows of one table."""

import torch
from ranks import Counted
from torch import nn
from torch.nn import functional

import msrun

ROWS, WIDTH, SAMPLES, STEPS = (10, 20, 30, 4), 5, 8, 4
RULE = {"match": "table", "rows": list(ROWS), "axis": "tp"}
HALVES = {"match": "table", "rows": [30, 34], "axis": "tp"}


class Fields(nn.Module):
    """A table for all fields, and layers on what it gives for each sample."""

    def __init__(self, **options):
        super().__init__()
        self.table = nn.Embedding(sum(ROWS), WIDTH, **options)
        self.up, self.down = nn.Linear(len(ROWS) * WIDTH, 16), nn.Linear(16, 3)

    def forward(self, ids):
        return self.down(torch.relu(self.up(self.table(ids).flatten(1))))


class Bags(nn.Module):
    """A bag of the rows of all fields, each with a weight that is learnt or none."""

    def __init__(self, mode, *, has_weights=False, **options):
        super().__init__()
        self.table = nn.EmbeddingBag(sum(ROWS), WIDTH, mode=mode, **options)
        self.weights = nn.Parameter(torch.rand(len(ROWS))) if has_weights else None
        self.down = nn.Linear(WIDTH, 3)

    def forward(self, ids):
        weights = None if self.weights is None else self.weights.expand(len(ids), -1)
        return self.down(self.table(ids, per_sample_weights=weights))


MODELS = {
    "fields": Fields,
    "padding": lambda: Fields(padding_idx=12),
    "sparse": lambda: Fields(sparse=True),
    "by frequency": lambda: Fields(scale_grad_by_freq=True),
    "sum": lambda: Bags("sum"),
    "mean, padding": lambda: Bags("mean", padding_idx=3),
    "max": lambda: Bags("max"),
    "weights": lambda: Bags("sum", has_weights=True),
}


class Shown(nn.Module):
    """Sees the rows that a rank has looked up."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(sum(ROWS), WIDTH)

    def forward(self, ids):
        rows = self.table(ids)
        assert rows.to_local().shape == (SAMPLES, 1, WIDTH)
        return rows.shape[0]


def build(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return MODELS[name]()


def batches(steps=STEPS, samples=SAMPLES):
    """Return ids of each field, of few rows so that many stand twice, and classes."""
    draw = torch.Generator().manual_seed(5)
    first = [sum(ROWS[:index]) for index in range(len(ROWS))]
    found = []
    for _ in range(steps):
        fields = [at + torch.randint(0, 4, (samples,), generator=draw) for at in first]
        found.append((torch.stack(fields, 1), torch.randint(0, 3, (samples,), generator=draw)))
    return found


def optimizer_of(name, model):
    if name == "sparse":
        return torch.optim.SGD(model.parameters(), lr=0.5)
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def one_process(name, max_norm=None):
    """Return the losses of plain torch, and the table that it ends with."""
    model = build(name)
    update, losses = optimizer_of(name, model), []
    for ids, target in batches():
        update.zero_grad()
        loss = functional.cross_entropy(model(ids), target)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        update.step()
        losses.append(loss.item())
    return losses, model.table.weight.detach()


def worst(config, name, max_norm=None):
    """Return how far losses and the table are from those of one process."""
    rt = msrun.init(config)
    model = rt.shard(build(name))
    update = rt.optimizer(optimizer_of(name, model))
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    losses = []
    for ids, target in batches():
        part = [t.chunk(count)[share] for t in (ids, target)]
        losses.append(
            rt.step(model, update, functional.cross_entropy, *part, max_norm=max_norm).item()
        )
    expected, table = one_process(name, max_norm)
    gaps = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
    whole = rt.state_dict(model)
    if rt.is_main:
        gaps.append((whole["table.weight"] - table).abs().max().item())
    return max(gaps)


def each_worst(cases):
    found = {}
    for name, (config, *arguments) in cases.items():
        found[name] = worst(config, *arguments)
        msrun.init().close()
    return found


def counts(config):
    """Return collectives of forward and of backward, and the rows of this rank."""
    rt = msrun.init(config)
    model = rt.shard(build("fields"))
    ids, _ = batches()[0]
    model(ids)  # the first call compares the batches of ranks, too
    with Counted() as forward:
        output = model(ids)
    rt.close()
    by_field = {"match": "table", "rows": list(ROWS), "out": [None, "tp", None]}
    other = msrun.init(config | {"plan": [by_field]}).shard(Shown())
    other(ids)
    with Counted() as looked_up:
        other(ids)
    return (
        dict(looked_up.calls),
        dict(forward.calls),
        len(model.table.weight.detach()),
        output.shape,
    )


def _step_from(config, path, *, is_first):
    rt = msrun.init(config)
    model = rt.shard(build("fields"))
    update = rt.optimizer(optimizer_of("fields", model))
    if not is_first:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        rt.load(model, update, path=path)
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    losses = []
    for pair in batches()[: 1 if is_first else STEPS]:
        part = [t.chunk(count)[share] for t in pair]
        losses.append(rt.step(model, update, functional.cross_entropy, *part).item())
    if is_first:
        rt.save(model, update, step=1, path=path)
    return losses


def first_step(config, path):
    """Train a step and save."""
    return _step_from(config, path, is_first=True)


def later_steps(config, path):
    """Load, and train on."""
    return _step_from(config, path, is_first=False)
