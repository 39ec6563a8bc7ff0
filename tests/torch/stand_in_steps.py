"""A program whose workers find the stand-in devices: `stand_in_steps.py joined|large|CONFIG...`.

Each worker prints lines of JSON, lists that begin with a list: of `joined`, where it is; of
`large`, what a step with a large table copies; else what it learned under each CONFIG.
"""

import json
import sys

import stand_in_npu
import torch
import torch.distributed as dist
from ranks import OPTIMIZERS, batches, build
from torch import nn
from torch.nn import functional

import msrun


def joined():
    stand_in_npu.install(devices=4)
    with msrun.init() as runtime:
        total = torch.ones(3)
        dist.all_reduce(total, group=runtime.group("dp"))
        backend = dist.get_backend_config()
        return total.tolist(), str(runtime.device), torch.npu.current_device(), backend


def table_model():
    """Return a model with a table of ids, which a configuration may place on the host."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(32, 4), nn.Flatten(), nn.Linear(32, 10))


def table_batches():
    """Return ids and classes."""
    return [(tokens, later[:, -1] % 10) for tokens, later in batches("transformer")]


def trained(config):
    """Return losses, where parameters and gradients lie, and the collectives of the device."""
    stand_in_npu.calls.clear()
    with msrun.init(config, device="npu:0") as runtime:
        is_placed = "place" in config
        network = runtime.shard(table_model() if is_placed else build("mlp"))
        update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
        share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
        losses = []
        for batch in table_batches() if is_placed else batches("mlp"):
            part = [tensor.chunk(count)[share] for tensor in batch]
            norm = 0.1 if is_placed else None
            loss = runtime.step(network, update, functional.cross_entropy, *part, max_norm=norm)
            losses.append(loss.item())
        params = list(network.parameters())
        places = {str(t.device) for p in params for t in (p, p.grad)}
        return losses, sorted(places), sorted(stand_in_npu.calls)


class Clicks(nn.Module):
    """A table of which a batch reads few rows."""

    def __init__(self, rows, width, ids):
        super().__init__()
        self.table = nn.Embedding(rows, width, sparse=True)
        self.head = nn.Linear(ids * width, 4)

    def forward(self, ids):
        return self.head(self.table(ids).flatten(1))


def large(place):
    """Return what each step copied, what it needs to, the table's bytes, and if rows are right.

    Args:
        place: As of the configuration.
    """
    rows, width, ids = 4096, 8, 3
    numbers = torch.Generator().manual_seed(5)
    found = []
    with msrun.init({"place": place}, device="npu:0") as runtime:
        network = runtime.shard(Clicks(rows, width, ids))
        update = runtime.optimizer(torch.optim.SGD(network.parameters(), lr=0.5))
        table = network.table.weight
        before, touched = table.detach().clone(), torch.zeros(rows, dtype=torch.bool)
        share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
        for _ in range(4):
            tokens = torch.randint(0, rows, (8, ids), generator=numbers)
            target = torch.randint(0, 4, (8,), generator=numbers)
            touched[tokens] = True
            batch = [tensor.chunk(count)[share] for tensor in (tokens, target)]
            stand_in_npu.copied.clear()
            runtime.step(network, update, functional.cross_entropy, *batch)
            found.append([stand_in_npu.copied["npu"], stand_in_npu.copied["cpu"]])
        changed = (table.detach() != before).any(1)
        values = batch[0].numel() * width * table.element_size()
        needed = [batch[0].nbytes + batch[1].nbytes + values, batch[0].nbytes + values]
        return found, needed, table.nbytes, bool((changed == touched).all())


if __name__ == "__main__":
    if sys.argv[1] == "large":
        stand_in_npu.install(devices=1)
        for word in sys.argv[2:]:
            print(json.dumps(large(json.loads(word))), flush=True)
    elif sys.argv[1:] == ["joined"]:
        print(json.dumps(joined()))
    else:
        stand_in_npu.install(devices=1)
        for word in sys.argv[1:]:
            print(json.dumps(trained(json.loads(word))), flush=True)
