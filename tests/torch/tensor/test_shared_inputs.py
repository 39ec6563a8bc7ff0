"""Modules of one input: it is placed for all of them once, and only while it stays what it was."""

import pytest
import torch
from ranks import Counted, run_warm
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import msrun

pytestmark = pytest.mark.torch

WIDTH = 8
ROUNDS = 2
COLUMNS = [{"match": name, "style": "colwise"} for name in "abc"]
# What the second takes is cut, what the third has is whole.
MIXED = [
    {"match": "a", "style": "colwise"},
    {"match": "b", "style": "rowwise"},
    {"match": "c", "params": {"weight": [None, None]}, "in": ["..."], "out": ["..."]},
]
SEQUENCES = [
    {"match": "norm", "style": "sequence"},
    {"match": "[abc]", "style": "colwise"},
]


class Siblings(nn.Module):
    """Three linear layers of one input, on (batch, sequence, width)."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return sum(map(torch.sin, self.branches(self.norm(x))))

    def branches(self, x):
        return self.a(x), self.b(x), self.c(x)


class Written(Siblings):
    """Writes the input between two of them; the first does not need it in backward."""

    def branches(self, x):
        self.a.requires_grad_(requires_grad=False)
        first = self.a(x)
        x.mul_(2)
        return first, self.b(x), self.c(x)


class Untracked(Siblings):
    """Calls one of them without gradients first."""

    def branches(self, x):
        with torch.no_grad():
            first = self.a(x)
        return first, self.b(x), self.c(x)


class Late(Siblings):
    """Wants the gradient of the input only after it was used."""

    def forward(self, x):
        x = x.detach()
        first = self.a(x)
        x.requires_grad_()
        second = self.b(x) + self.c(x)
        (gradient,) = torch.autograd.grad(second.square().sum(), x, create_graph=True)
        return torch.sin(first) + second + gradient


class Renewed(Siblings):
    """Makes the input another leaf after it was used."""

    def forward(self, x):
        x = x * 1
        first = self.b(x)
        x.detach_().requires_grad_()
        second = self.b(x) + self.c(x)
        (gradient,) = torch.autograd.grad(second.square().sum(), x, create_graph=True)
        return torch.sin(first) + second + gradient


class Exchanged(Siblings):
    """Gives the input other memory after it was used."""

    def forward(self, x):
        x = x * 1
        self.b.requires_grad_(requires_grad=False)
        first = self.b(x)
        x.data = x.data * 2
        return torch.sin(first) + self.b(x)


class Writing(Siblings):
    """Has a module that writes its input, which the next one sees."""

    def __init__(self):
        super().__init__()
        self.b.forward = lambda x: functional.linear(x.mul_(2), self.b.weight)

    def branches(self, x):
        return self.b(x * 1), self.b(x), self.c(x)


class Checkpointed(Siblings):
    """Recomputes two of them by itself."""

    def branches(self, x):
        first = self.a(x)
        both = checkpoint(lambda x: self.b(x) * self.c(x), x, use_reentrant=False)
        return first, both


class Between(Siblings):
    """Calls them on two inputs in turn."""

    def branches(self, x):
        y = x * 2
        return self.a(x), self.b(y), self.c(x)


def gradients(kind, config):
    """Return the output, the gradients of all after some rounds, and the collectives."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = kind()
        x = torch.randn(2, 4, WIDTH, requires_grad=True)
    if config is not None:
        runtime = msrun.init(config)
        network = runtime.shard(network)
    with Counted() as counted:
        for _ in range(ROUNDS):
            output = network(x)
            output.square().sum().backward()
    tensors = {"x": x, **dict(network.named_parameters())}
    found = {
        name: tensor.grad.full_tensor() if hasattr(tensor.grad, "full_tensor") else tensor.grad
        for name, tensor in tensors.items()
        if tensor.grad is not None
    }
    return output.detach(), found, dict(counted.calls)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kind",
    [Siblings, Written, Untracked, Late, Renewed, Exchanged, Writing, Checkpointed, Between],
)
@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (COLUMNS, {}),
        (MIXED, {}),
        (SEQUENCES, {}),
        (COLUMNS, {"recompute": {"modules": ["norm"]}}),
    ],
    ids=["columns", "mixed", "sequences", "recompute"],
)
def test_what_happens_between_two_of_them_counts(kind, plan, options):
    expected, own, _ = run_warm(gradients, 1, kind, None)[0]
    for output, found, _ in run_warm(
        gradients, 2, kind, {"mesh": {"tp": 2}, "plan": plan, **options}
    ):
        torch.testing.assert_close(output, expected)
        assert set(found) == set(own)
        for name, gradient in own.items():
            torch.testing.assert_close(found[name], gradient, msg=name)


@pytest.mark.parametrize(
    ("plan", "calls"),
    [
        # Backward sums the gradient of the input; the output is gathered.
        (COLUMNS, {"all_reduce": 1, "all_gather_into_tensor": 1}),
        # The input is gathered, and its gradient scattered; gathered are the output and that
        # gradient behind the norm too, whose own two are summed.
        (
            SEQUENCES,
            {"all_gather_into_tensor": 3, "reduce_scatter_tensor": 1, "all_reduce": 2},
        ),
    ],
    ids=["columns", "sequences"],
)
def test_an_input_travels_once(plan, calls):
    for _, _, found in run_warm(gradients, 2, Siblings, {"mesh": {"tp": 2}, "plan": plan}):
        assert found.pop("allreduce_") == 1  # the first call compares the batches of ranks
        assert found == {kind: ROUNDS * count for kind, count in calls.items()}
