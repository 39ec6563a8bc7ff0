"""Weight averages, teachers and adversaries: two models at a time, as in one process."""

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import msrun

pytestmark = pytest.mark.torch

WIDTH, CLASSES, SAMPLES, STEPS = 8, 5, 8, 3
PLAN = [{"match": "*up", "style": "colwise"}, {"match": "*down", "style": "rowwise"}]
CONFIGS = {
    "dp": {},
    "zero 1": {"optimizer": {"zero": 1}},
    "zero 3": {"optimizer": {"zero": 3}},
    "tp": {"mesh": {"tp": 2}, "plan": PLAN},
}


class Net(nn.Module):
    def __init__(self, width=WIDTH, classes=CLASSES, *, seed=1, has_norm=False):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, classes)
        self.norm = nn.BatchNorm1d(width) if has_norm else nn.Identity()
        self.double()

    def forward(self, x):
        return self.down(functional.relu(self.up(self.norm(x))))


def batches(rt, width=WIDTH):
    """Return this rank's part of each batch."""
    draw = torch.Generator().manual_seed(3)
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    found = []
    for _ in range(STEPS):
        x = torch.randn(SAMPLES, width, generator=draw, dtype=torch.float64)
        y = torch.randint(0, CLASSES, (SAMPLES,), generator=draw)
        found.append(tuple(tensor.chunk(count)[share] for tensor in (x, y)))
    return found


def averaged(config):
    """Train, average weights, estimate batch norms again; return what the average computes."""
    rt = msrun.init(config)
    plain = Net(has_norm=True)
    if "optimizer" in config:  # under ZeRO both are sharded, the average first
        average = rt.shard(AveragedModel(plain))
        model = rt.shard(plain)
    else:
        model = rt.shard(plain)
        average = AveragedModel(model)
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for x, y in batches(rt):
        losses.append(rt.step(model, update, functional.cross_entropy, x, y).item())
        average.update_parameters(model)
    update_bn([x for x, _ in batches(rt)], average)
    average.eval()
    x = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).view(4, WIDTH)
    with torch.no_grad():
        return [*losses, *average(x).flatten().tolist()]


def follow_torch(average, model):
    average.update_parameters(model)


def follow_by_hand(average, model):
    for own, param in zip(average.module.parameters(), model.parameters(), strict=True):
        own.data = 0.9 * own.data + 0.1 * param.data


def averaged_before(config, follow, decay):
    """Train; return what an average computes that was made of the plain model, and is whole."""
    rt = msrun.init(config)
    plain = Net(has_norm=True)
    options = {"multi_avg_fn": get_ema_multi_avg_fn(decay), "use_buffers": True} if decay else {}
    average = AveragedModel(plain, **options)
    model = rt.shard(plain)
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in batches(rt):
        rt.step(model, update, functional.cross_entropy, x, y)
        follow(average, model)
    average.eval()
    x = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).view(4, WIDTH)
    with torch.no_grad():
        return average(x).flatten().tolist()


def distilled(config):
    """Train a student by what a frozen teacher beside it says."""
    rt = msrun.init(config)
    teacher = Net(seed=2).requires_grad_(requires_grad=False).eval()
    student = rt.shard(Net())
    update = rt.optimizer(torch.optim.AdamW(student.parameters(), lr=0.01))

    def loss_fn(output, given):
        x, y = given
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        soft = functional.kl_div(output.log_softmax(-1), wanted, reduction="batchmean")
        return functional.cross_entropy(output, y) + 2 * soft

    return [rt.step(student, update, loss_fn, x, (x, y)).item() for x, y in batches(rt)]


class Distilled(nn.Module):
    """A student and its frozen teacher in one model."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = Net(), Net(seed=2)
        self.teacher.requires_grad_(requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x), wanted


def distilled_within(config):
    """Train a model that has its teacher inside."""
    rt = msrun.init(config)
    model = rt.shard(Distilled())
    trained = [param for param in model.parameters() if param.requires_grad]
    update = rt.optimizer(torch.optim.AdamW(trained, lr=0.01))

    def loss_fn(outputs, y):
        output, wanted = outputs
        return functional.cross_entropy(output, y) + functional.mse_loss(output, wanted)

    return [rt.step(model, update, loss_fn, x, y).item() for x, y in batches(rt)]


def adversarial(config):
    """Train a generator against a discriminator, in a plain loop."""
    rt = msrun.init(config)
    generator, critic = rt.shard(Net(4, WIDTH)), rt.shard(Net(WIDTH, 1, seed=2))
    of_critic = rt.optimizer(torch.optim.AdamW(critic.parameters(), lr=0.01))
    of_generator = rt.optimizer(torch.optim.AdamW(generator.parameters(), lr=0.01))
    judge = functional.binary_cross_entropy_with_logits
    losses = []
    for (real, _), (noise, _) in zip(batches(rt), batches(rt, 4), strict=True):
        true, false = torch.ones(len(real), 1).double(), torch.zeros(len(real), 1).double()
        of_critic.zero_grad()
        first = judge(critic(real), true) + judge(critic(generator(noise).detach()), false)
        first.backward()
        of_critic.step()
        of_generator.zero_grad()
        second = judge(critic(generator(noise)), true)
        second.backward()
        of_generator.step()
        losses += [rt.mean_over_data(loss.detach()).item() for loss in (first, second)]
    return losses


@pytest.mark.sampled
@pytest.mark.parametrize("train", [averaged, distilled, distilled_within, adversarial])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_two_models_learn_what_they_learn_in_one_process(train, config):
    [expected] = run_warm(train, 1, {})

    assert run_warm(train, 2, config) == [pytest.approx(expected, abs=1e-12)] * 2


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("follow", "decay"), [(follow_torch, None), (follow_torch, 0.9), (follow_by_hand, None)]
)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_whole_average_follows_a_sharded_model(follow, decay, config):
    [expected] = run_warm(averaged_before, 1, {}, follow, decay)

    found = run_warm(averaged_before, 2, config, follow, decay)
    assert found == [pytest.approx(expected, abs=1e-12)] * 2


def averaged_a_stage():
    rt = msrun.init(
        {"mesh": {"pp": 2}, "pipeline": {"stages": {"0": 0, "1": 1}, "microbatches": 2}}
    )
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    average = AveragedModel(plain)
    model = rt.shard(plain)
    with pytest.raises(msrun.ModelError) as error:
        average.update_parameters(model)
    return error.value.message


def test_an_average_of_the_whole_model_does_not_follow_a_stage():
    for said in run_warm(averaged_a_stage, 2):
        assert said == (
            "the average has 4 parameters and the model of rt.shard 2 on this rank, or of other "
            "shapes, such as those of a stage of a pipeline"
        )
