"""Losses that are no mean of samples: the loss and the weights of one process, or a sentence."""

import functools

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError
from msrun.parallel.local import full_tensor
from msrun.parallel.losses.tally import LossTally
from msrun.parallel.losses.terms import TallyRanks

pytestmark = pytest.mark.torch

CLASSES, SAMPLES, STEPS = 10, 8, 2
PLAN = [{"match": "up", "style": "colwise"}, {"match": "mid", "style": "rowwise"}]
PIPELINE = {"stages": {"up": 0, "mid": 1, "down": 1}, "microbatches": 2}
WEIGHT = torch.linspace(0.2, 2.0, CLASSES, dtype=torch.float64)
# name -> ranks, configuration.
CONFIGS = {
    "dp 2": (2, {}),
    "dp 2, accumulate 2": (2, {"accumulate": 2}),
    "one rank, accumulate 4": (1, {"accumulate": 4}),
    "zero 1": (2, {"optimizer": {"zero": 1}}),
    "zero 3": (2, {"optimizer": {"zero": 3}}),
    "pp 2": (2, {"mesh": {"pp": 2}, "pipeline": PIPELINE}),
    "pp 2 gpipe": (2, {"mesh": {"pp": 2}, "pipeline": PIPELINE | {"schedule": "gpipe"}}),
    "dp 4, zero 2, accumulate 2": (4, {"optimizer": {"zero": 2}, "accumulate": 2}),
    "dp 2 x tp 2": (4, {"mesh": {"dp": 2, "tp": 2}, "plan": PLAN}),
    "pp 2 x dp 2": (4, {"mesh": {"pp": 2, "dp": 2}, "pipeline": PIPELINE}),
    "pp 2 x dp 2, zero 1": (
        4,
        {"mesh": {"pp": 2, "dp": 2}, "pipeline": PIPELINE, "optimizer": {"zero": 1}},
    ),
}
ONE_PART = [
    name for name, (_, config) in CONFIGS.items() if not {"accumulate", "pipeline"} & {*config}
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, x):
        return self.down(functional.relu(self.mid(functional.relu(self.up(x)))))


def pair(output, target):
    losses = functional.cross_entropy(output, target, reduction="none")
    return losses.sum(), (target >= 0).sum()


def pair_of_numbers(output, target):
    del target
    return output.square().sum(), 2 * len(output)


def masked(output, target, *, divisor=lambda count: count):
    mask = (target >= 0).to(output.dtype)
    return (output.square().sum(1) * mask).sum() / divisor(mask.sum())


def quotient_with_floor(output, target):
    return masked(output, target, divisor=lambda count: count.clamp(min=1))


def quotient_with_offset(output, target):
    return masked(output, target, divisor=lambda count: count + 0.5)


def of_chosen(output, target):
    return output[target >= 0].square().mean()


def legacy_sum(output, target):
    with pytest.warns(UserWarning, match="size_average"):
        return functional.cross_entropy(output, target, size_average=False)


def written(output, target):
    loss = functional.cross_entropy(output, target)
    loss += 0.0
    loss *= 2.0
    return loss


def with_penalty(output, target):
    return functional.cross_entropy(output, target) + 0.1 * output.square().mean()


def two_means(output, target):
    first = functional.cross_entropy(output, target)
    second = functional.nll_loss(output, target.clamp(min=0), weight=WEIGHT)
    return torch.stack([first, second * 0.5]).sum()


def in_slots(output, target):
    losses = output.new_zeros(2)
    losses[0] = functional.cross_entropy(output, target)
    losses[1:].add_(0.1 * output.square().mean())
    return losses.sum()


def chunks(output, target):
    for part in zip(output.split(3), target.split(3), strict=True):
        yield CROSS_ENTROPY(*part, reduction="sum"), (part[1] >= 0).sum()


def sum_of_chunks(output, target):
    return sum(loss for loss, _ in chunks(output, target))


def chunks_in_place(output, target):
    total, counted = torch.zeros((), dtype=output.dtype), 0
    for loss, count in chunks(output, target):
        total += loss
        counted += count
    return total / counted


def stacked_chunks(output, target):
    losses, counts = zip(*chunks(output, target), strict=True)
    return torch.stack(losses).sum() / torch.stack(counts).sum().clamp(min=1)


def two_sums(output, target):
    return CROSS_ENTROPY(output, target, reduction="sum") + output.square().sum()


CROSS_ENTROPY = functional.cross_entropy
# Losses that are right in every configuration.
EXACT = {
    "ignored": CROSS_ENTROPY,
    "ignored by a module": nn.CrossEntropyLoss(),
    "another ignored, smoothed": functools.partial(
        lambda o, t, **k: CROSS_ENTROPY(o, t.clamp(min=0), **k), ignore_index=3, label_smoothing=0.1
    ),
    "class weights": nn.CrossEntropyLoss(weight=WEIGHT),
    "class weights, smoothed": nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2),
    "nll": lambda o, t: nn.NLLLoss(WEIGHT)(o.log_softmax(1), t),
    "probabilities": lambda o, t: CROSS_ENTROPY(
        o, functional.one_hot(t.clamp(min=0), CLASSES) * 0.9
    ),
    "sum": functools.partial(CROSS_ENTROPY, reduction="sum"),
    "sum by a module": lambda o, t: nn.MSELoss(reduction="sum")(
        o[:, 0], t.clamp(min=0).to(o.dtype)
    ),
    "sum at the end": lambda o, t: (o[:, 0] - t.clamp(min=0)).square().sum(),
    "deprecated sum": legacy_sum,
    "pair": pair,
    "pair of numbers": pair_of_numbers,
    "masked": masked,
    "masked with a floor": quotient_with_floor,
    "masked with an offset": quotient_with_offset,
    "of chosen": of_chosen,
    "sum of chunks": sum_of_chunks,
    "chunks added up in place": chunks_in_place,
    "stacked chunks": stacked_chunks,
    "chunks by samples": lambda o, t: sum_of_chunks(o, t.clamp(min=0)) / len(o),
    "two sums": two_sums,
    "mean of squares": lambda o, t: functional.mse_loss(o[:, 0], t.clamp(min=0).to(o.dtype)),
}
# Losses that have counts inside, and need them all before the first backward pass.
COMPOSED = {
    "written": written,
    "with a penalty": with_penalty,
    "two means": two_means,
    "in slots": in_slots,
}


def data(*, ignored):
    """Return the batches; the first half of the last one has no target that counts."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for step in range(STEPS):
        x = torch.randn(SAMPLES, 6, generator=draw, dtype=torch.float64)
        y = torch.randint(0, CLASSES, (SAMPLES,), generator=draw)
        if ignored:
            y[torch.rand(SAMPLES, generator=draw) < 0.4] = -100
            y[-1] = 2
            if step == STEPS - 1:
                y[: SAMPLES // 2] = -100
        found.append((x, y))
    return found


def build():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net().double()


def one_process(loss_fn, *, ignored, max_norm):
    model = build()
    update = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    losses = []
    for x, y in data(ignored=ignored):
        update.zero_grad()
        loss = loss_fn(model(x), y)
        loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        loss.backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        update.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def doubled(output, target):
    loss = functional.cross_entropy(output, target)
    loss.register_hook(lambda gradient: 2 * gradient)
    return loss


def kept(output, target):
    loss = functional.cross_entropy(output, target)
    loss.retain_grad()
    return loss


HOOKED = {"doubled": doubled, "kept": kept}


def difference(rt, loss_fn, *, ignored=True, max_norm=None):
    """Return by how much losses and weights differ from those of one process."""
    losses, weights = one_process(loss_fn, ignored=ignored, max_norm=max_norm)
    model = rt.shard(build())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9))
    count, share = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
    worst = 0.0
    for (x, y), expected in zip(data(ignored=ignored), losses, strict=True):
        part = [t.chunk(count)[share] for t in (x, y)]
        loss = rt.step(model, update, loss_fn, *part, max_norm=max_norm)
        worst = max(worst, abs(loss.item() - expected) / max(1.0, abs(expected)))
    for name, param in model.named_parameters():
        worst = max(worst, (full_tensor(param.detach()) - weights[name]).abs().max().item())
    return worst


def differences(config, names, options=None):
    """Return the difference, or what was refused, for each loss of `names`."""
    found = {}
    for name in names:
        rt = msrun.init(config)
        try:
            loss_fn = {**EXACT, **COMPOSED, **HOOKED}[name]
            found[name] = difference(rt, loss_fn, **(options or {}))
        except ModelError as error:
            found[name] = error.message
        rt.close()
    return found


def wrong(name, losses, *arguments):
    """Return the losses that differ from one process under a configuration, and by how much."""
    ranks, config = CONFIGS[name]
    found = run_warm(differences, ranks, {"mesh": {"dp": -1}, **config}, list(losses), *arguments)
    equal = pytest.approx(0, abs=1e-12)
    return [{loss: off for loss, off in of_rank.items() if off != equal} for of_rank in found]


# Zero 3 and stages in copies show what zero 1 and stages do.
AT_NIGHT = ("dp 4, zero 2, accumulate 2", "pp 2 x dp 2, zero 1", "zero 1", "pp 2")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in AT_NIGHT)) for n in CONFIGS]
)
@pytest.mark.few(4)
def test_losses_that_count_are_those_of_one_process(name):
    assert wrong(name, EXACT) == [{}] * CONFIGS[name][0]


@pytest.mark.parametrize("name", ["zero 1", "dp 4, zero 2, accumulate 2", "pp 2 x dp 2"])
def test_their_gradients_are_clipped_as_in_one_process(name):
    names = ["ignored", "class weights", "sum", "pair"]

    assert wrong(name, names, {"max_norm": 0.01}) == [{}] * CONFIGS[name][0]


@pytest.mark.parametrize("name", ONE_PART)
def test_linear_functions_of_means_are_exact_with_one_micro_batch(name):
    assert wrong(name, COMPOSED) == [{}] * CONFIGS[name][0]


@pytest.mark.parametrize("name", sorted({*CONFIGS} - {*ONE_PART}))
@pytest.mark.few(4)
def test_linear_functions_of_means_need_equal_counts_with_several_micro_batches(name):
    sentence = (
        "the loss contains a mean over parts of the batch in which different numbers of targets "
        "count, so their mean is not that of the batch; no weight was changed"
    )
    everywhere = [dict.fromkeys(COMPOSED, sentence)] * CONFIGS[name][0]

    assert wrong(name, COMPOSED) == everywhere
    assert wrong(name, ["written", "with a penalty"], {"ignored": False}) == [{}] * CONFIGS[name][0]


@pytest.mark.parametrize("config", [{}, {"accumulate": 2}])
def test_a_sum_of_gradients_is_that_of_a_summed_loss(config):
    sums = ["sum", "sum by a module", "sum at the end"]
    found = run_warm(differences, 2, config | {"reduce": {"op": "sum"}}, sums)

    assert found == [dict.fromkeys(sums, pytest.approx(0, abs=1e-12))] * 2


@pytest.mark.parametrize("name", ["dp 2", "one rank, accumulate 4", "zero 3", "pp 2"])
def test_hooks_of_a_loss_are_refused_as_another_sum_is_differentiated(name):
    for found in wrong(name, HOOKED):
        assert "the loss function returns has a hook for its gradient" in found["doubled"]
        assert "the loss function returns keeps its gradient" in found["kept"]


class OwnLoss(Net):
    def forward(self, x):
        return super().forward(x).square().mean()


def passed_on(config):
    """Return the losses of a model that computes its own, which the loss function passes on."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 6)
    model = rt.shard(OwnLoss())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    part = x.chunk(rt.layout.size("dp"))[rt.coordinate.get("dp", 0)]
    return [rt.step(model, update, lambda loss, _: loss, part, part).item() for _ in range(STEPS)]


def test_a_loss_of_the_model_may_have_the_hooks_of_its_units():
    [expected] = run_warm(passed_on, 1, {})
    found = run_warm(passed_on, 2, {"optimizer": {"zero": 3}})
    assert found == [pytest.approx(expected, rel=1e-6)] * 2


def compiled(config):
    loss_fn = torch.compile(CROSS_ENTROPY, backend="eager")
    return difference(msrun.init(config), loss_fn)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("config", [{}, {"accumulate": 2}])
def test_compiled_losses_count_too(config):
    assert run_warm(compiled, 2, config) == [pytest.approx(0, abs=1e-12)] * 2


@pytest.mark.parametrize("ignored", [0, 1])
def test_micro_batches_of_one_rank_are_scaled_only_if_their_counts_differ(ignored):
    weight = nn.Parameter(torch.randn(3, 5))
    x, target = torch.randn(4, 3), torch.tensor([0, 1, 2, 3])
    target[2 : 2 + ignored] = -100
    tally = LossTally(
        TallyRanks(group=None, weight=1.0, op="mean", device=torch.device("cpu")),
        parts=2,
        samples=4,
    )
    for inputs, wanted in zip(x.chunk(2), target.chunk(2), strict=True):
        output = inputs @ weight
        loss = tally.measure(
            functools.partial(functional.cross_entropy, output, wanted), 2, [output, wanted]
        )
        tally.add(loss, 2)
        tally.objective(loss, 2).backward()
    tally.combine()

    scaled = []
    loss = tally.finish(lambda: scaled.append(True) or [weight])

    assert scaled == [True] * ignored
    alone = weight.detach().clone().requires_grad_()
    expected = functional.cross_entropy(x @ alone, target)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item())
    torch.testing.assert_close(weight.grad, alone.grad)


def coded(x, terms):
    """Return a loss of a variational autoencoder: one factor outside of its sum, or inside."""
    mean, spread = x.chunk(2, -1)
    divergence = 1 + spread - mean.square() - spread.exp()
    target = torch.full_like(mean, 0.3)
    rebuilt = functional.binary_cross_entropy_with_logits(mean, target, reduction="sum")
    if terms == "inside":
        return rebuilt + (-0.5 * divergence).sum()
    loss = rebuilt - 0.5 * divergence.sum()
    if terms == "mean":
        return loss / x.size(0)
    if terms == "over pixels":
        return loss / 784
    return (loss, len(x)) if terms == "pair" else loss


def autoencoded(config, terms):
    rt = msrun.init(config)
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 6)
    model = rt.shard(nn.Linear(6, 8))
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    x = x.chunk(count)[share]
    try:
        return [
            rt.step(model, update, lambda o, _: coded(o, terms), x, x).item() for _ in range(STEPS)
        ]
    except ModelError as error:
        return error.message, error.hint


def test_a_sum_with_a_factor_outside_says_where_to_put_it():
    for message, hint in run_warm(autoencoded, 2, {}, "outside"):
        assert message.startswith("the loss is a function of binary_cross_entropy")
        assert hint.startswith("put a factor inside of its sum, as (-0.5 * x).sum()")
        assert "return (loss, samples)" in hint


def test_sums_over_another_number_are_refused_as_well():
    for message, _ in run_warm(autoencoded, 2, {}, "over pixels"):
        assert message.startswith("the loss is a function of binary_cross_entropy")


@pytest.mark.parametrize("terms", ["inside", "pair", "mean"])
@pytest.mark.parametrize("config", [{}, {"accumulate": 2}])
def test_what_the_hint_says_trains_as_one_process(config, terms):
    [expected] = run_warm(autoencoded, 1, {}, terms)
    [of_sum] = run_warm(autoencoded, 1, {}, "outside")

    found = run_warm(autoencoded, 2, config, terms)
    assert found == [pytest.approx(expected, rel=1e-6)] * 2
    if terms == "inside":
        assert expected == pytest.approx(of_sum, rel=1e-6)
