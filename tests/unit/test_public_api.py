"""The names of `import msrun`: there, loaded only on use, and typed for the scripts of users."""

import subprocess
import sys

import pytest

import msrun

SCRIPT = """
from pathlib import Path

import torch
from torch import nn

import msrun


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, index**2])


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


with msrun.init({"mesh": {"dp": -1}, "checkpoint": {"dir": "ckpt"}}) as rt:
    reveal_type(rt)
    model = rt.shard(nn.Linear(1, 1), sample=(torch.ones(4, 1),))
    optimizer = rt.optimizer(torch.optim.AdamW(model.parameters()))
    reveal_type(optimizer)
    loader = rt.loader(Squares(), batch_size=8, shuffle=True, num_workers=2)
    step = rt.resume(model, optimizer, loader, extra={"epochs": 3})
    reveal_type(step)
    for batch in loader:
        loss = rt.step(model, optimizer, loss_of, batch[:, :1], batch[:, 1:], max_norm=1.0)
        reveal_type(loss)
        rt.print("loss", loss.item(), end="\\n")
    rt.save(model, optimizer, step=step, path=Path("last"), loader=loader)
    total = msrun.collectives.all_reduce(torch.ones(1), "dp")
    reveal_type(total)
    reveal_type(rt.layout.axes)
msrun.beat()


def train(epochs: int, lr: float = 0.1) -> float:
    return epochs * lr


values = msrun.launch(train, (3,), {"lr": 1.0}, workers=2, max_restarts=1, env={"A": "1"})
reveal_type(values)
with msrun.Job("train.py", ["--lr", 0.1], log_dir=Path("logs"), tail=[0, 1]) as job:
    reveal_type(job)
    reveal_type(job.status().phase)
    job.stop(now=True)
    reveal_type(job.logs(0, lines=3))
try:
    reveal_type(msrun.Job(train, (3,)).start().wait(timeout=3.0))
except msrun.JobFailed as failed:
    reveal_type(failed.rank)
    reveal_type(job.verdict)
try:
    msrun.init("missing.yaml", device="cpu", timeout=30.0)
except msrun.UsageError as error:
    reveal_type(error.exit_code)
    print(error.message, error.hint)
"""
REVEALED = [
    "msrun.parallel.runtime.Runtime",
    "torch.optim.adamw.AdamW",
    "int",
    "torch._tensor.Tensor",
    "torch._tensor.Tensor",
    "dict[str, int]",
    "list[float]",
    "msrun.api.job.Job[None]",
    "str",
    "str",
    "list[float]",
    "int | None",
    "msrun.cluster.verdict.Verdict | None",
    "msrun.errors.ExitCode",
]
WRONG = """
import msrun
rt = msrun.init(config=3)
rt.loader([1, 2], batch_size="8")
rt.loader([1, 2], 8, mixed=True)
rt.save(rt, step=0)
msrun.launch(print, workers=1.5)
msrun.Job(3)
"""


def check(folder, text):
    """Return what mypy --strict says of a script of a user."""
    (folder / "train.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "train.py"]
    answer = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=110, check=False
    )
    assert not answer.stderr, answer.stderr
    return answer.stdout.splitlines()


@pytest.mark.thorough
def test_a_script_of_a_user_is_typed(tmp_path):
    lines = check(tmp_path, SCRIPT)

    assert [line.split('"')[1] for line in lines if "Revealed" in line] == REVEALED
    assert [line for line in lines if "error:" in line] == []
    errors = [line for line in check(tmp_path, WRONG) if "error:" in line]
    assert [line.split(":")[1] for line in errors] == ["3", "4", "5", "6", "7", "8"]


@pytest.mark.parametrize("name", msrun.__all__)
def test_every_public_name_is_there(name):
    assert getattr(msrun, name) is not None
    assert name in dir(msrun)


def test_another_name_is_refused_as_python_does():
    with pytest.raises(AttributeError, match="module 'msrun' has no attribute 'launchpad'"):
        _ = msrun.launchpad


def test_importing_msrun_loads_nothing_but_its_version():
    code = "import sys, msrun; print(sorted(name for name in sys.modules if 'msrun' in name))"
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert answer.stdout == "['msrun', 'msrun.version']\n"
