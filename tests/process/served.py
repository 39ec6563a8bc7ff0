"""A program whose table lives on parameter servers, and which compares itself with one process."""

# Every rank compares each loss with that of one process.
TRAIN = """
    import os, pathlib, time
    import torch
    import msrun
    from torch import nn

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.EmbeddingBag(1200, 4), nn.Linear(4, 1))

    def batch(step):
        draw = torch.Generator().manual_seed(step)
        return torch.randint(0, 1200, (4, 3), generator=draw), torch.rand(4, 1, generator=draw)

    def wait_for(name):
        print("at", name)
        while not pathlib.Path(name).exists():
            time.sleep(0.01)

    rt = msrun.init()
    loss_of = nn.functional.mse_loss
    alone = build()
    ours = torch.optim.SGD(alone.parameters(), lr=0.1)
    model = rt.shard(build())
    theirs = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(6):
        ids, values = batch(step)
        expected = loss_of(alone(ids), values)
        ours.zero_grad()
        expected.backward()
        ours.step()
        mine = slice(2 * rt.rank, 2 * rt.rank + 2)
        loss = rt.step(model, theirs, loss_of, ids[mine], values[mine])
        assert abs(loss.item() - expected.item()) < 1e-6, step
        if rt.generation == 0 and step in (1, 3):
            wait_for(f"go{step}")
    print("equal")
"""
