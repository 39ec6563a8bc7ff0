"""Layers whose weight torch computes from other parameters, under rules of tensor parallelism."""

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

import msrun

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),  # its output is a view of shards
]

STEPS, WORDS, WIDTH = 4, 16, 8
PLAN = [
    {"match": "embed", "style": "embedding"},
    {"match": "up", "style": "colwise"},
    {"match": "turn", "style": "colwise"},
    {"match": "mid", "style": "rowwise"},
    {"match": "down", "style": "rowwise"},
    {"match": "head", "style": "vocab"},
]
TP, BOTH = {"mesh": {"tp": 2}}, {"mesh": {"dp": 2, "tp": 2}}


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Net(nn.Module):
    """Of each kind of torch's parametrizations, and two in a row of which one is a script's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = parametrizations.weight_norm(nn.Embedding(WORDS, WIDTH))
        self.up = parametrizations.weight_norm(nn.Linear(WIDTH, 12))
        self.mid = parametrizations.spectral_norm(nn.Linear(12, WIDTH))
        self.turn = parametrizations.orthogonal(nn.Linear(WIDTH, 12))
        self.down = parametrizations.spectral_norm(nn.Linear(12, WIDTH, bias=False))
        parametrize.register_parametrization(self.down, "weight", Doubled())
        self.head = parametrizations.weight_norm(nn.Linear(WIDTH, WORDS))

    def forward(self, x):
        x = self.mid(functional.relu(self.up(self.embed(x))))
        return self.head(self.down(functional.relu(self.turn(x))))


class Critic(nn.Module):
    """As of a GAN: convolutions with spectral and weight norms."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up = parametrizations.spectral_norm(nn.Conv1d(WIDTH, 12, 3, padding=1))
        self.mid = parametrizations.weight_norm(nn.Conv1d(12, 12, 3, padding=1, groups=2))
        self.down = parametrizations.spectral_norm(nn.ConvTranspose1d(12, WORDS, 3, padding=1))

    def forward(self, x):
        x = functional.leaky_relu(self.up(self.embed(x).transpose(1, 2)))
        return self.down(functional.leaky_relu(self.mid(x))).transpose(1, 2)


def loss_of(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batches():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(WORDS, (2, 8, 6), generator=generator) for _ in range(STEPS)]


def oracle(kind=Net):
    net, losses = kind().double(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for x, y in batches():
        optimizer.zero_grad()
        loss = loss_of(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in net.state_dict().items()}


def train(config, first=0, last=STEPS, folder=None, kind=Net):
    """Train from step `first` on, loaded from `folder`, or up to `last`, saved there."""
    rt = msrun.init(config)
    model = rt.shard(kind().double())
    optimizer = rt.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    if first:
        rt.load(model, optimizer, path=folder)
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    losses = [
        rt.step(model, optimizer, loss_of, *(t.chunk(count)[share] for t in batch)).item()
        for batch in batches()[first:last]
    ]
    if last < STEPS:
        rt.save(model, optimizer, step=last, path=folder)
    state = rt.state_dict(model)  # first: a spectral norm takes a step when its weight is read
    shape = list(model.up.weight.to_local().shape) if config.get("plan") else None
    return losses, state, shape


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (2, TP),
        (2, {**TP, "accumulate": 2}),
        (2, {**TP, "recompute": {"modules": ["up", "down"]}}),
        (4, BOTH),
        (4, {**BOTH, "optimizer": {"zero": 1}}),
        (4, {**BOTH, "optimizer": {"zero": 3}}),
    ],
    ids=["tp", "accumulate", "recompute", "dp x tp", "zero 1", "zero 3"],
)
@pytest.mark.few(3)
def test_they_are_divided_and_train_as_in_one_process(ranks, config):
    losses, weights = oracle()

    for found, state, shape in run_warm(train, ranks, {**config, "plan": PLAN}):
        assert found == pytest.approx(losses, abs=1e-9)
        assert shape == [6, WIDTH]
        for name, value in state.items() if state else ():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-7, msg=name)


CONVOLUTIONS = [
    {"match": "up", "style": "colwise"},
    {"match": "mid", "style": "colwise"},
    {"match": "down", "style": "rowwise"},
]


@pytest.mark.parametrize(("ranks", "config"), [(2, TP), (4, BOTH)], ids=["tp", "dp x tp"])
def test_convolutions_are_divided_too(ranks, config):
    losses, weights = oracle(Critic)

    config = {**config, "plan": CONVOLUTIONS}
    for found, state, shape in run_warm(train, ranks, config, 0, STEPS, None, Critic):
        assert found == pytest.approx(losses, abs=1e-9)
        assert shape == [6, WIDTH, 3]
        for name, value in state.items() if state else ():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-7, msg=name)


@pytest.mark.parametrize("is_back", [False, True], ids=["to dp", "to tp"])
def test_a_checkpoint_goes_on_under_another_layout(is_back, tmp_path):
    divided, whole = {**TP, "plan": PLAN}, {}
    first, second = (whole, divided) if is_back else (divided, whole)
    folder = str(tmp_path / "saved")
    run_warm(train, 2, first, 0, 2, folder)

    losses, _ = oracle()
    for found, _, _ in run_warm(train, 2, second, 2, STEPS, folder):
        assert found == pytest.approx(losses[2:], abs=1e-9)
