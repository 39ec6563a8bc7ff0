"""`msrun verify`: its exit code says whether the first step is that of one process."""

import pytest
from support import script

pytestmark = pytest.mark.process

TRAIN = """
import sys
import torch
from torch import nn
from torch.nn import functional
import msrun

class Weighted(torch.autograd.Function):  # no function of torch shows what it divides by
    @staticmethod
    def forward(ctx, losses, weights):
        weights = weights.numpy() / weights.numpy().sum()
        ctx.weights = torch.from_numpy(weights)
        return losses.new_tensor(losses.detach().numpy() @ weights)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.weights, None

def by_hand(output, target):
    losses = functional.cross_entropy(output, target, reduction="none")
    return Weighted.apply(losses, target.float())

rt = msrun.init({"verify": 3} if sys.argv[1] == "three steps" else None)
torch.manual_seed(0)
if sys.argv[1] == "frozen teacher":
    teacher = rt.shard(nn.Linear(16, 10).requires_grad_(False))
model = rt.shard(nn.Linear(16, 10))
optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
torch.manual_seed(rt.rank)
x, y = torch.randn(4, 16), torch.randint(0, 10, (4,))
for _ in range(2):
    if sys.argv[1] == "plain":
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    elif sys.argv[1] == "none":
        model(x)
    elif sys.argv[1] == "compiled":
        functional.cross_entropy(torch.compile(model, backend="eager")(x), y).backward()
        optimizer.step()
    elif sys.argv[1] == "lengths":
        x = torch.randn(4, 2 + rt.rank, 16)
        rt.step(model, optimizer, functional.mse_loss, x, torch.zeros(4, 2 + rt.rank, 10))
    elif sys.argv[1] == "frozen teacher":
        rt.step(model, optimizer, functional.mse_loss, x, teacher(x).detach())
    else:
        loss_fn = functional.cross_entropy if sys.argv[1] != "wrong" else by_hand
        rt.step(model, optimizer, loss_fn, x, y)
print("trained on")
"""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("right", 0, "verified: step 1 equals one process: loss "),
        ("wrong", 1, "likely cause: the loss of the batch is not the mean of the losses"),
        ("plain", 0, "verified: step 1 equals one process: outputs of one call of the model"),
        ("compiled", 2, "error: nothing was verified: the optimizer stepped, and backward reached"),
        ("lengths", 2, "error: nothing was verified in step 1: a tensor of shape (4, 2, 16) on"),
        ("frozen teacher", 0, "verified: step 1 equals one process: loss "),
        ("three steps", 0, "verified: step 2 equals one process: loss "),
        ("none", 2, "error: nothing was verified: the script ended without a training step"),
    ],
)
@pytest.mark.few(3)
def test_the_exit_code_is_the_answer(msrun, tmp_path, how, code, said):
    train = script(tmp_path, TRAIN, "train.py")
    job = msrun("verify", "--workers-per-node", 2, train, how, plain=True)

    assert job.wait() == code
    assert said in job.out + job.err
    assert ("trained on" in job.out) == (how in ("none", "three steps"))


def test_several_nodes_are_refused(msrun, tmp_path):
    train = script(tmp_path, TRAIN, "train.py")
    words = ("--nnodes", 2, "--workers-per-node", 1, "--master-addr", "localhost")
    job = msrun("verify", *words, train, plain=True)

    assert job.wait() == 2
    assert "msrun verify runs on one node" in job.out + job.err
