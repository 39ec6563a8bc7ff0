"""What a user writes, with the types that mypy finds: read by `scripts/check types`, never run."""

from pathlib import Path
from typing import assert_type

import torch
from torch import nn

import msrun
from msrun.api.job import Job
from msrun.cluster.verdict import Verdict
from msrun.errors import ExitCode
from msrun.parallel.runtime import Runtime


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, index**2])


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


with msrun.init({"mesh": {"dp": -1}, "checkpoint": {"dir": "ckpt"}}) as rt:
    assert_type(rt, Runtime)
    model = rt.shard(nn.Linear(1, 1), sample=(torch.ones(4, 1),))
    optimizer = rt.optimizer(torch.optim.AdamW(model.parameters()))
    assert_type(optimizer, torch.optim.AdamW)
    loader = rt.loader(Squares(), batch_size=8, shuffle=True, num_workers=2)
    step = rt.resume(model, optimizer, loader, extra={"epochs": 3})
    assert_type(step, int)
    for batch in loader:
        loss = rt.step(model, optimizer, loss_of, batch[:, :1], batch[:, 1:], max_norm=1.0)
        assert_type(loss, torch.Tensor)
        rt.print("loss", loss.item(), end="\n")
    rt.save(model, optimizer, step=step, path=Path("last"), loader=loader)
    total = msrun.collectives.all_reduce(torch.ones(1), "dp")
    assert_type(total, torch.Tensor)
    assert_type(rt.layout.axes, dict[str, int])
msrun.beat()


def train(epochs: int, lr: float = 0.1) -> float:
    return epochs * lr


values = msrun.launch(train, (3,), {"lr": 1.0}, workers=2, max_restarts=1, env={"A": "1"})
assert_type(values, list[float])
with msrun.Job("train.py", ["--lr", 0.1], log_dir=Path("logs"), tail=[0, 1]) as job:
    assert_type(job, Job[None])
    assert_type(job.status().phase, str)
    job.stop(now=True)
    assert_type(job.logs(0, lines=3), str)
try:
    assert_type(msrun.Job(train, (3,)).start().wait(timeout=3.0), list[float])
except msrun.JobFailed as failed:
    assert_type(failed.rank, int | None)
    assert_type(job.verdict, Verdict | None)
try:
    msrun.init("missing.yaml", device="cpu", timeout=30.0)
except msrun.UsageError as error:
    assert_type(error.exit_code, ExitCode)
    print(error.message, error.hint)


# What is wrong is said: mypy refuses an `ignore` that nothing needs.
rt = msrun.init(config=3)  # type: ignore[arg-type]
rt.loader([1, 2], batch_size="8")  # type: ignore[arg-type]
rt.loader([1, 2], 8, mixed=True)  # type: ignore[call-arg]
rt.save(rt, step=0)  # type: ignore[arg-type]
msrun.launch(print, workers=1.5)  # type: ignore[arg-type]
msrun.Job(3)  # type: ignore[call-overload]
