"""Models that decide by values of their part of the batch: parts decide alike, or are refused."""

import copy
import warnings

import pytest
import torch
from mixing_functions import WIDTH
from ranks import run_warm
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import msrun
from msrun.errors import ModelError
from msrun.parallel.local import full_tensor
from msrun.parallel.losses.decided.decisions import Decisions, DecisionTrace

pytestmark = pytest.mark.torch

SAMPLES, RANKS = 8, 2
WORDS = 16


def above(h):
    """Differs where one part has the largest value."""
    return h * 0.5 if h.abs().max() > 2 else h


def by_a_number(h):
    return h * 0.5 if (h.abs().max() > 2).item() else h


def any_above(h):
    return h.clamp(-2, 2) if (h.abs() > 2).any() else h


def all_below(h):
    return h if torch.all(h < 2) else h.tanh()


def by_closeness(h):
    return h if torch.allclose(h, h.clamp(-2, 2)) else h.tanh()


def of_the_mean(h):
    return h if h.detach().mean(0).max() < 1 else h.tanh()


def of_one_token(h):
    return h if h[:, 0].abs().max() < 0.5 else h.tanh()


DECIDING = [above, by_a_number, by_closeness, of_the_mean, of_one_token]
GUARDS = [any_above, all_below]


def of_numbers(h):
    """All parts decide alike."""
    return h * 0.5 if h.abs().max() > 1e6 else h


def of_finite_values(h):
    return h.clamp(-10, 10) if torch.isinf(h).any() or h.isnan().any() else h


def of_each_sample(h):
    return torch.stack([row * 0.5 if row.abs().max() > 2 else row for row in h])


def of_some_samples(h):
    first, second = h.chunk(2)
    return torch.cat([first * 2, second * 2 if second[0].max() > 2 else second + second])


def of_places(h):
    """Experts of which some get no sample."""
    chosen = h[:, :3].argmax(-1)
    result = torch.zeros_like(h)
    for expert in range(3):
        is_of = chosen == expert
        if is_of.any():
            result[is_of] = h[is_of] * (expert + 1)
    return result


RIGHT = [of_numbers, of_finite_values, of_places]


class Network(nn.Module):
    """Two layers with a function between."""

    def __init__(self, between, *, recompute=False):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.between, self.recompute = between, recompute

    def forward(self, x):
        if self.recompute:
            h = checkpoint(lambda x: self.between(self.first(x)), x, use_reentrant=False)
        else:
            h = self.between(self.first(x))
        return self.last(h)


class Words(nn.Module):
    """A padding mask is left out where nothing is padding, and lengths crop the batch."""

    def __init__(self):
        super().__init__()
        self.embed, self.last = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, tokens):
        mask = (tokens != 0).float()
        tokens = tokens[:, : int(mask.sum(1).max())]
        h, mask = self.embed(tokens), mask[:, : tokens.shape[1]]
        if not mask.all():
            h = h * mask[..., None]
        if (mask == 0).any():
            h = h + 0 * mask[..., None]
        return self.last(h.sum(1))


def batch(*, outlier=True):
    torch.manual_seed(1)
    x = torch.randn(SAMPLES, WIDTH) * 0.1
    if outlier:
        x[SAMPLES - 1] *= 100  # the last sample of the last rank
    return x, torch.arange(SAMPLES) % 5


def trained(config, make, steps=2, *, outlier_from=0, recompute=False, is_plain=False):
    """Return losses, what was said, and whether weights changed."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    model = rt.shard(Network(make, recompute=recompute) if callable(make) else Words())
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = [full_tensor(param.detach()).clone() for param in model.parameters()]
    said, losses = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for step in range(steps):
                x, target = batch(outlier=step >= outlier_from)
                if not callable(make):
                    x = (x * 100).long().abs() % WORDS * (torch.arange(WIDTH) < target[:, None] + 1)
                parts = rt.layout.axes.get("dp", 1)
                share = rt.coordinate.get("dp", 0)
                own = [part.chunk(parts)[share] for part in (x, target)]
                if is_plain:
                    losses.append(stepped(rt, model, optimizer, *own))
                else:
                    losses.append(rt.step(model, optimizer, functional.cross_entropy, *own).item())
        except ModelError as error:
            said.append(error.message)
    said += [str(item.message) for item in caught if "of the batch" in str(item.message)]
    after = [full_tensor(param.detach()) for param in model.parameters()]
    is_same = all(map(torch.equal, before, after))
    rt.close()
    return losses, said, is_same


def stepped(rt, model, optimizer, x, target):
    """Train a step of a plain loop."""
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), target)
    loss.backward()
    optimizer.step()
    return rt.mean_over_data(loss).item()


CONFIGS = {
    "dp": {},
    "zero 1": {"optimizer": {"zero": 1}},
    "zero 3": {"optimizer": {"zero": 3}},
    "accumulate": {"accumulate": 2},
}
SENTENCE = "the model decides by values of a part of the batch, and parts differ (test_decisions.py"


@pytest.mark.sampled
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("between", DECIDING, ids=lambda function: function.__name__)
def test_parts_that_decide_otherwise_are_refused_on_all_ranks(between, config):
    for losses, said, is_same in run_warm(trained, RANKS, config, between):
        assert losses == []
        assert len(said) == 1
        assert said[0].startswith(SENTENCE)
        assert is_same


@pytest.mark.sampled
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("between", GUARDS, ids=lambda function: function.__name__)
def test_guards_that_differ_are_a_warning(between, config):
    alone = run_warm(trained, 1, {}, between)[0]
    for losses, said, is_same in run_warm(trained, RANKS, config, between):
        assert [text.startswith("msrun: some parts of the batch have el") for text in said] == [
            True
        ]
        assert not is_same
        # Only what changes elements that it does not guard differs.
        assert (losses == pytest.approx(alone[0], rel=1e-6)) == (between is any_above)


def test_micro_batches_of_one_rank_are_compared():
    losses, said, is_same = run_warm(trained, 1, {"accumulate": 2}, above)[0]

    assert losses == []
    assert said[0].startswith(SENTENCE)
    assert is_same


@pytest.mark.sampled
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recompute"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_later_steps_compare_what_the_first_found(config, recompute):
    options = {"steps": 4, "outlier_from": 2, "recompute": recompute}
    for losses, said, _ in run_warm(_trained_with, RANKS, config, above, options):
        assert len(losses) == 2
        assert [text.startswith(SENTENCE) for text in said] == [True]


def _trained_with(config, between, options):
    return trained(config, between, **options)


@pytest.mark.sampled
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("between", [*RIGHT, "words"], ids=lambda it: getattr(it, "__name__", it))
def test_what_parts_may_decide_trains_as_one_process(between, config):
    alone = run_warm(trained, 1, {}, between)[0]
    for losses, said, is_same in run_warm(trained, RANKS, config, between):
        assert said == []
        assert losses == pytest.approx(alone[0], rel=1e-6)
        assert not is_same


def compiled_frames(between):
    """Return the losses of three steps with `compile`, and how many frames were compiled."""
    from torch._dynamo.utils import counters

    counters.clear()
    losses, said, _ = trained({"compile": {"modules": ["first", "last"]}}, between, 3)
    return losses, said, counters["frames"]["total"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # the compiler's own
def test_a_model_that_decides_runs_without_compile():
    alone = run_warm(trained, 1, {}, of_numbers, 3)[0]
    for losses, said, frames in run_warm(compiled_frames, RANKS, of_numbers):
        assert (said, frames) == ([], 0)
        assert losses == pytest.approx(alone[0], rel=1e-6)


PLAIN = {name: CONFIGS[name] for name in ("dp", "zero 1", "zero 3")}


@pytest.mark.sampled
@pytest.mark.parametrize("outlier_from", [0, 2])
@pytest.mark.parametrize("config", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("between", [above, of_the_mean], ids=lambda function: function.__name__)
def test_a_plain_loop_compares_too(between, config, outlier_from):
    options = {"steps": 4, "outlier_from": outlier_from, "is_plain": True}
    for losses, said, is_same in run_warm(_trained_with, RANKS, config, between, options):
        assert len(losses) == outlier_from
        assert [text.startswith(SENTENCE) for text in said] == [True]
        assert is_same == (not outlier_from)


@pytest.mark.parametrize("config", PLAIN.values(), ids=PLAIN)
def test_a_plain_loop_of_parts_that_decide_alike_trains_as_one_process(config):
    alone = run_warm(trained, 1, {}, of_numbers)[0]
    for losses, said, _ in run_warm(_trained_with, RANKS, config, of_numbers, {"is_plain": True}):
        assert said == []
        assert losses == pytest.approx(alone[0], rel=1e-6)


def by_a_sum(h):
    return h if h.square().sum() < 1e6 else h.tanh()


def by_any(h):
    return h if (h > 1e6).sum() == 0 else h.tanh()


def by_a_mean(h):
    return h if h.square().sum() / h.numel() < 1e6 else h.tanh()


def scaled(h):
    return h / h.abs().max().item()


def test_a_sum_over_samples_is_refused_in_micro_batches_and_a_warning_between_ranks():
    text = "the model decides by a sum over the samples of a part of the batch"

    for losses, said, is_same in run_warm(trained, RANKS, {"accumulate": 2}, by_a_sum):
        assert (losses, is_same) == ([], True)
        assert said[0].startswith(text)
    for losses, said, _ in run_warm(trained, RANKS, {}, by_a_sum):
        assert len(losses) == 2
        assert [warning.startswith(f"msrun: {text}") for warning in said] == [True]


@pytest.mark.parametrize("between", [by_any, by_a_mean])
def test_sums_that_say_whether_there_is_any_or_are_means_are_right(between):
    for losses, said, _ in run_warm(trained, RANKS, {"accumulate": 2}, between):
        assert (len(losses), said) == (2, [])


def test_a_number_of_a_part_is_a_warning():
    for losses, said, _ in run_warm(trained, RANKS, {}, scaled):
        assert len(losses) == len(said) == 2
        assert said[0].startswith("msrun: the model reads a number of a part of the batch (test_de")
        assert said[1].startswith("msrun: the loss depends on a max over samples")


@pytest.mark.parametrize("between", [of_each_sample, of_some_samples])
def test_samples_may_decide_by_themselves(between):
    x, _ = batch()
    decisions = Decisions()
    with DecisionTrace(decisions, [x]) as trace, trace.in_model():
        between(x)
    assert not decisions.lines


def test_a_loss_may_be_shown():
    x, target = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decisions = Decisions()
        with DecisionTrace(decisions, [x, target]):
            loss = functional.cross_entropy(x, target)
            assert loss.item() > 0
    assert not decisions.lines


class Masked(nn.Module):
    """Some ranks have padding, and alone come to a decision by values."""

    def __init__(self, limit):
        super().__init__()
        self.embed, self.last = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 5)
        self.limit = limit

    def forward(self, tokens):
        mask = (tokens != 0).float()
        h = self.embed(tokens)
        if not mask.all():
            h = h * mask[..., None]
            if h.abs().max() > 1e6:
                h = h.tanh()
        if h.abs().max() > self.limit:
            h = h * 0.5
        return self.last(h.sum(1))


def masked(config, limit, *, is_plain=False):
    """Return losses of three steps, of which the last samples have padding, or what is refused."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    model = rt.shard(Masked(limit))
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    target = torch.arange(SAMPLES) % 5
    tokens = torch.arange(SAMPLES * 4).view(SAMPLES, 4) % (WORDS - 1) + 1
    tokens[SAMPLES // 2 :, 2:] = 0
    share = rt.coordinate.get("dp", 0)
    own = [part.chunk(rt.layout.axes.get("dp", 1))[share] for part in (tokens, target)]
    losses = []
    try:
        for _ in range(3):
            if is_plain:
                losses.append(stepped(rt, model, optimizer, *own))
            else:
                losses.append(rt.step(model, optimizer, functional.cross_entropy, *own).item())
    except ModelError as error:
        losses.append(error.message)
    rt.close()
    return losses


def masked_plainly(config, limit):
    return masked(config, limit, is_plain=True)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_ranks_may_come_to_a_decision_that_others_pass_by(config):
    alone = run_warm(masked, 1, {}, 1e6)[0]
    for losses in run_warm(masked, RANKS, config, 1e6):
        assert losses == pytest.approx(alone, rel=1e-6)
    for losses in run_warm(masked, RANKS, config, -1):
        assert len(losses) == 3


@pytest.mark.parametrize("config", PLAIN.values(), ids=PLAIN)
def test_ranks_of_a_plain_loop_may_pass_a_decision_by(config):
    alone = run_warm(masked, 1, {}, 1e6)[0]
    for losses in run_warm(masked_plainly, RANKS, config, 1e6):
        assert losses == pytest.approx(alone, rel=1e-6)


def test_micro_batches_may_come_to_a_decision_that_others_pass_by():
    alone = run_warm(masked, 1, {}, -1)[0]
    losses = run_warm(masked, 1, {"accumulate": 2}, -1)[0]
    assert losses == pytest.approx(alone, rel=1e-6)


class Chosen(nn.Module):
    """The values of a part decide which module runs."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.extra = nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH))

    def forward(self, x):
        h = self.first(x)
        if h.abs().max() > 2:
            h = self.extra(h)
        return self.last(h)


def chosen(config, outlier_from, is_plain):
    """Return the losses, and what is refused."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    model = rt.shard(Chosen())
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    try:
        for step in range(4):
            x, target = batch(outlier=step >= outlier_from)
            own = [part.chunk(RANKS)[rt.coordinate["dp"]] for part in (x, target)]
            if is_plain:
                losses.append(stepped(rt, model, optimizer, *own))
            else:
                losses.append(rt.step(model, optimizer, functional.cross_entropy, *own).item())
    except ModelError as error:
        losses.append(error.message)
    rt.close()
    return losses


@pytest.mark.sampled
@pytest.mark.parametrize("is_plain", [False, True], ids=["step", "plain"])
@pytest.mark.parametrize("outlier_from", [0, 2])
@pytest.mark.parametrize("level", [1, 3])
def test_ranks_that_would_gather_other_modules_compare_before_they_do(
    level, outlier_from, is_plain
):
    options = {"zero": level, "modules": ["first", "extra.*", "last"]}
    for found in run_warm(chosen, RANKS, {"optimizer": options}, outlier_from, is_plain):
        assert len(found) == outlier_from + 1
        assert found[-1].startswith(SENTENCE)


def until_small(h):
    while h.abs().max() > 0.5:
        h = h * 0.5
    return h


def test_loops_that_end_at_other_times_are_refused():
    for losses, said, is_same in run_warm(trained, RANKS, {}, until_small):
        assert (losses, is_same) == ([], True)
        assert [text.startswith(SENTENCE) for text in said] == [True]


def called_alone(between):
    """Return losses of a loop in which rank 0 trains a copy of the model, too."""
    rt = msrun.init({})
    torch.manual_seed(0)
    model = rt.shard(Network(between))
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    copied = copy.deepcopy(model)
    x, target = batch()
    own = [part.chunk(RANKS)[rt.rank] for part in (x, target)]
    losses = []
    for _ in range(3):
        if rt.rank == 0:
            copied(x)
        losses.append(stepped(rt, model, optimizer, *own))
    rt.close()
    return losses


def test_a_copy_of_a_model_may_be_called_on_one_rank():
    alone = run_warm(trained, 1, {}, of_numbers, 3)[0]
    for losses in run_warm(called_alone, RANKS, of_numbers):
        assert losses == pytest.approx(alone[0], rel=1e-6)
