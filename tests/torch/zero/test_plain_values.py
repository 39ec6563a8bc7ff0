"""Plain tensors that scripts compute with sharded parameters and gradients, as one process does."""

import re
import sys

import pytest
import torch
from ranks import assert_equal_curves, batches, build, run_ranks, run_warm
from test_grid import zero
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import RanksDisagreeError

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*DTensor.*random.*"),
]

PLAN = [{"match": "fc1", "style": "colwise"}, {"match": "fc2", "style": "rowwise"}]
CONFIGS = {
    "zero 1, small ones whole": {"optimizer": {"zero": 1, "threshold": 300}},
    "zero 3": zero(3),
    "tp": {"mesh": {"tp": 2}, "plan": PLAN},
}


def drawn(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def noise(network, _):
    for param in network.parameters():
        param.grad.add_(0.1 * drawn(param.shape))


def noise_added(network, _):
    for param in network.parameters():
        param.grad += 0.1 * drawn(param.shape)


def noise_like(network, _):
    torch.manual_seed(5)
    for param in network.parameters():
        param.grad.add_(torch.randn_like(param.grad), alpha=0.1)
        param.grad.sub_(torch.rand_like(param), alpha=0.1)


def noise_of_one_process(network, _):
    """Draw noise from the generators of ranks, which differ where their samples do."""
    for param in network.parameters():
        if param.dim() > 1:  # others may be whole, and ranks must draw those alike
            param.grad.add_(torch.randn_like(param), alpha=0.1)


def initialized_again(network, _):
    """Begin a layer anew, by functions of torch that write at random."""
    torch.nn.init.xavier_uniform_(network.fc1.weight)
    torch.nn.init.normal_(network.fc2.weight, std=0.1)
    gradient = network.fc1.weight.grad
    gradient.mul_(torch.bernoulli(torch.full_like(gradient, 0.5)))
    gradient.mul_(torch.randint_like(gradient, 1, 3))
    gradient.mul_(torch.empty_like(gradient).exponential_())


def initialized_whole(network, _):
    """Begin layers anew, by functions of torch that need the whole of a parameter."""
    init, weights = torch.nn.init, [network.fc1.weight, network.fc2.weight, network.fc3.weight]
    init.trunc_normal_(weights[0], std=0.1)
    init.orthogonal_(weights[1])
    init.sparse_(weights[2], 0.3)
    with torch.no_grad():
        weights[0].add_(init.eye_(torch.empty_like(weights[0])), alpha=0.1)
        weights[1].copy_(torch.normal(weights[1], 0.1))
        weights[2].add_(torch.normal(0.0, weights[2].abs() + 0.1))


@torch.no_grad()
def noise_of_weights(network, _):
    for param in network.parameters():
        param.add_(0.01 * drawn(param.shape))


def mask(network, _):
    for param in network.parameters():
        param.grad.mul_((drawn(param.shape) > 0).float())


@torch.no_grad()
def pulled(network, _):
    """Pull weights to those of the beginning, which the script has whole."""
    for name, param in build("mlp").named_parameters():
        own = network.get_parameter(name)
        own.lerp_(param.detach(), 0.1)
        own.grad.add_(own.detach() - param.detach(), alpha=0.1)


def assigned(network, _):
    for param in network.parameters():
        param.grad.data = param.grad.data * 0.5


def given(network, _):
    for param in network.parameters():
        param.grad = 0.01 * drawn(param.shape)


def sharpness(network, again):
    """Step to where the loss is higher, and back, as SAM does by hand."""
    with torch.no_grad():
        norm = torch.stack([param.grad.norm() for param in network.parameters()]).norm()
        steps = [param.grad * (0.05 / (norm + 1e-12)) for param in network.parameters()]
        for param, step in zip(network.parameters(), steps, strict=True):
            param.add_(step)
    network.zero_grad()
    again(1.0)
    with torch.no_grad():
        for param, step in zip(network.parameters(), steps, strict=True):
            param.sub_(step)


def surgery(network, again):
    """Project the gradient of one loss on that of another one."""
    first = [param.grad.clone() for param in network.parameters()]
    network.zero_grad()
    again(2.0)
    second = [param.grad.clone() for param in network.parameters()]
    product = sum((a * b).sum() for a, b in zip(first, second, strict=True))
    square = sum((b * b).sum() for b in second)
    for param, a, b in zip(network.parameters(), first, second, strict=True):
        param.grad = a - b * (product / square) + b


HABITS = [
    noise,
    noise_added,
    noise_like,
    noise_of_one_process,
    initialized_again,
    initialized_whole,
    noise_of_weights,
    mask,
    pulled,
    assigned,
    given,
    sharpness,
    surgery,
]


def trained(config, habit):
    rt = msrun.init(config)
    network = rt.shard(build("mlp"))
    optimizer = rt.optimizer(torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9))
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    losses = []
    for x, y in batches("mlp", steps=4):
        part = [t.chunk(count)[share] for t in (x, y)]

        def again(scale, part=part):
            loss = functional.cross_entropy(scale * network(part[0]), part[1])
            loss.backward()
            return loss.detach()

        optimizer.zero_grad()
        losses.append(rt.mean_over_data(again(1.0)).item())
        habit(network, again)
        optimizer.step()
    return losses


@pytest.mark.sampled
@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("config", CONFIGS)
def test_gradients_and_weights_changed_by_hand_are_those_of_one_process(config, habit):
    expected = run_warm(trained, 1, {}, habit)[0]

    assert_equal_curves(run_warm(trained, 2, CONFIGS[config], habit), expected, 1e-5)


def differing(network, _):
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for param in network.parameters():
        param.grad.add_(torch.randn(param.shape, generator=generator))


def refused(habit):
    try:
        trained(zero(3), habit)
    except RanksDisagreeError as error:
        return error.message, error.hint


def test_ranks_that_have_other_tensors_are_refused():
    for said, hint in run_warm(refused, 2, differing):
        assert said.startswith(
            "ranks have other values of the plain tensors that the script computed with sharded "
            "parameters or gradients (rank 1)"
        )
        assert "manual_seed" in hint


class Outside(nn.Module):
    """Reads a parameter of a unit beside samples of the same shape."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4)])

    def forward(self, x):
        weight = [layer.weight for layer in self.layers][0]  # noqa: RUF015 - no path of names
        return self.layers[1](x * weight)


def in_model():
    rt = msrun.init({"optimizer": {"zero": 3, "threshold": 0}})
    network = rt.shard(Outside())
    with torch.no_grad(), pytest.raises(msrun.ModelError) as error:
        network(torch.ones(4, 4))
    return error.value.message


def test_samples_in_a_model_are_not_taken_for_whole_tensors():
    for said in run_warm(in_model, 2):
        assert "a parameter was used outside of the forward of its module" in said


def told():
    """Return what is shown of an error of torch that nothing caught."""
    shown = []
    sys.excepthook = lambda _, error, __: shown.append(error)
    rt = msrun.init({"mesh": {"tp": 2}, "plan": PLAN})
    network = rt.shard(build("mlp"))
    x, y = batches("mlp", steps=1)[0]
    functional.cross_entropy(network(x), y).backward()
    try:
        torch.atan2(network.fc1.weight.grad, torch.ones(network.fc1.weight.shape))
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    [error] = shown
    return type(error), error.message, error.hint


def test_what_torch_refuses_is_told_with_its_line():
    # Hooks of the first use of sharded values show it: new ranks.
    for kind, message, hint in run_ranks(told, 2):
        assert kind is msrun.ModelError
        assert re.fullmatch(
            r"test_plain_values\.py, line \d+: torch computes no plain tensor with a sharded "
            "parameter, gradient or activation here",
            message,
        )
        assert hint.startswith("call full_tensor() of the sharded ones on all ranks")
