"""A program whose table lives on parameter servers, and which compares itself with one process."""

# Every rank compares each loss with that of one process.
TRAIN = """
    import os, pathlib, time
    import torch
    import msrun
    from torch import nn

    with open("imported", "a") as file:
        print(os.getpid(), file=file)

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

# The same with any number of ranks, until there is a file `over`; all go on from the checkpoint.
ELASTIC = """
    import pathlib, time
    import torch
    import msrun
    from torch import nn

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.EmbeddingBag(1200, 4), nn.Linear(4, 1))

    def batch(step):
        draw = torch.Generator().manual_seed(step)
        return torch.randint(0, 1200, (4, 3), generator=draw), torch.rand(4, 1, generator=draw)

    servers = {"params": ["0.weight"]}
    rt = msrun.init({"servers": servers, "checkpoint": {"dir": "checkpoints", "every": 3}})
    loss_of = nn.functional.mse_loss
    alone = build()
    ours = torch.optim.Adagrad(alone.parameters(), lr=0.1)
    model = rt.shard(build())
    theirs = rt.optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
    begin = rt.resume(model, theirs)
    print("begins with", rt.world_size, "at", begin)
    is_over, step = False, 0
    while not is_over:
        ids, values = batch(step)
        expected = loss_of(alone(ids), values)
        ours.zero_grad()
        expected.backward()
        ours.step()
        if step >= begin:
            mine = (each.chunk(rt.world_size)[rt.rank] for each in (ids, values))
            loss = rt.step(model, theirs, loss_of, *mine)
            assert abs(loss.item() - expected.item()) < 1e-6, step
            said = torch.tensor(float(pathlib.Path("over").exists()))
            is_over = rt.mean_over_data(said).item() == 1
            time.sleep(0.05)
            if step == begin + 5:
                print("goes on with", rt.world_size)
        step += 1
    print("equal")
"""
