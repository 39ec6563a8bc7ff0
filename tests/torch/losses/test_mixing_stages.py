"""What mixes samples in stages and in plans of mode auto: the sentence of other micro-batches."""

import warnings

import mixing_functions
import pytest
import torch
from mixing_functions import WIDTH, normal
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import UsageError
from msrun.parallel.auto.tracing.trace import trace
from msrun.parallel.local import local_part

pytestmark = pytest.mark.torch

SAMPLES = 4
STAGES = {"mesh": {"pp": 2}, "pipeline": {"stages": "auto", "microbatches": 2}}
STAGES_OF_RANKS = {"mesh": {"pp": 2, "dp": 2}, "pipeline": {"stages": "auto", "microbatches": 2}}
AUTO_PARTS = {"mode": "auto", "mesh": {"dp": 2}, "accumulate": 2}
AUTO_STAGES = {"mode": "auto", "mesh": {"pp": 2}, "pipeline": STAGES["pipeline"]}


class Mixes(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.linear, self.between = nn.Linear(WIDTH, WIDTH), between

    def forward(self, x):
        return self.between(self.linear(x)).reshape(len(x), WIDTH)


class Blocks(nn.Module):
    """Four blocks, one of which has a function between; it also returns what the loss ignores."""

    def __init__(self, between, place=1, *, beside=None):
        super().__init__()
        blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        blocks[place] = Mixes(between)
        self.blocks, self.beside = nn.Sequential(*blocks), beside

    def forward(self, x, target=None):
        output = self.blocks(x)
        if target is not None:
            return functional.cross_entropy(output, target)
        return output if self.beside is None else (output, self.beside(output))


class Numbered(Blocks):
    """Returns a number beside the output, in which the loss is linear."""

    def __init__(self, number):
        super().__init__(lambda x: x)
        self.number = number

    def forward(self, x, target=None):
        output = self.blocks(x)
        number = self.number(output)
        if target is not None:
            return functional.cross_entropy(output, target) + number
        return output, number


def with_number(output, target):
    return functional.cross_entropy(output[0], target) + output[1]


def square(x):
    return x.square().mean()


NUMBERS = {
    "mean": square,
    "sum by samples": lambda x: x.square().sum() / len(x),
    "root": lambda x: square(x).sqrt(),
    "sum": lambda x: x.square().sum(),
}


def said_of_numbers(config):
    """Return what is said of models with numbers, whose loss a function computes or the model."""
    return {
        name: [
            outcome(config, Numbered(number), loss_fn=with_number)[0],
            outcome(config, Numbered(number), has_loss=False)[0],
        ]
        for name, number in NUMBERS.items()
    }


def first(output, target):
    return functional.cross_entropy(output[0] if isinstance(output, tuple) else output, target)


def values(model):
    """Return this rank's parts: to compare divided tensors would be collective."""
    return [local_part(param).detach().clone() for param in model.parameters()]


def outcome(config, model, *, has_loss=True, steps=1, loss_fn=first):
    """Return the refusals and the warnings of steps, and whether weights changed."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    count, share = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
    x, target = torch.randn(4 * SAMPLES, WIDTH), torch.arange(4 * SAMPLES) % 5
    x, target = x.chunk(count)[share], target.chunk(count)[share]
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = rt.shard(model, (x,) if has_loss else {"x": x, "target": target})
            before = values(model)
            update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        except UsageError as error:
            return [f"shard: {error.message}"], True
        for _ in range(steps):
            try:
                if has_loss:
                    rt.step(model, update, loss_fn, x, target)
                else:
                    rt.step(model, update, {"x": x, "target": target})
            except UsageError as error:
                said.append(error.message)
    said += [str(item.message) for item in caught if "over samples" in str(item.message)]
    is_same = all(map(torch.equal, before, values(model)))
    rt.close()
    return said, is_same


def outcomes(config, names, **options):
    found = {}
    for name in names:
        found[name] = outcome(config, Blocks(getattr(mixing_functions, name)), **options)
        msrun.init(config).close()
    return found


# In place and by shape the rules are the same; those that read values have no stages.
MIXING = ["normal", "variance", "pair_of_statistics", "of_tokens", "covariance", "across"]
RIGHT = ["each", "attention", "instance_norm", "rows", "weights", "constants", "diagonal_of_pairs"]


@pytest.mark.parametrize(
    ("config", "mixing", "right"),
    [
        (STAGES, MIXING, RIGHT),
        (AUTO_PARTS, ["normal"], ["each"]),
        (AUTO_STAGES, ["across"], ["attention"]),
    ],
    ids=["pp", "auto", "auto pp"],
)
def test_a_model_that_mixes_samples_is_refused_and_no_other(config, mixing, right):
    for found in run_warm(outcomes, 2, config, mixing + right):
        for name in mixing:
            expected = mixing_functions.MIXING[getattr(mixing_functions, name)]
            expected = expected.partition(" (")[0]
            [said], is_same = found[name]
            assert said.startswith("the loss depends on a "), said
            place = "in blocks.1" if "mode" in config else "mixing_functions.py, line"
            assert f"{expected} ({place}" in said
            assert is_same
        assert {name: found[name] for name in right} == dict.fromkeys(right, ([], False))


def test_it_is_refused_again_in_the_next_step():
    for said, is_same in run_warm(twice, 2, STAGES, Blocks(normal)):
        assert len(said) == 2
        assert said[0] == said[1]
        assert is_same


def test_all_ranks_of_stages_and_copies_refuse():
    every = run_warm(outcome, 4, STAGES_OF_RANKS, Blocks(normal, place=2))

    assert len(every[0][0]) == 1
    assert every == [every[0]] * 4


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (STAGES, "the loss depends on a std over samples ("),
        (AUTO_STAGES, "parallel.mode: auto runs a model that returns its loss on 2 micro-batches"),
    ],
    ids=["pp", "auto pp"],
)
def test_a_model_that_returns_its_loss_is_refused(config, expected):
    model = Blocks(normal)
    for said, is_same in run_warm(own_loss, 2, config, model):
        assert said[0].startswith(expected)
        assert is_same


def twice(config, model):
    return outcome(config, model, steps=2)


def own_loss(config, model):
    return outcome(config, model, has_loss=False)


def clipped(x):
    x = x.clone()
    x[x < 0] = 0.1
    return x


def clipped_in_place(x):
    x[(x < 0).nonzero(as_tuple=True)] = 0.1  # which cannot be run without values
    return x


class Spread(Blocks):
    """Its loss has the spread over samples behind blocks."""

    def forward(self, x, target):
        output = self.blocks(x)
        return functional.cross_entropy(output, target) + output.var(0).mean()


@pytest.mark.parametrize("between", [clipped, clipped_in_place])
def test_samples_are_known_behind_a_module_whose_flow_follows_values(between):
    for said, is_same in run_warm(own_loss, 2, STAGES, Spread(between)):
        assert said[0].startswith("the loss depends on a var over samples (")
        assert is_same
    assert run_warm(own_loss, 2, STAGES, Blocks(between)) == [([], False)] * 2


def spread(output):
    return output.var(0).mean()


@pytest.mark.parametrize("config", [STAGES, AUTO_PARTS, AUTO_STAGES], ids=["pp", "auto", "auto pp"])
def test_what_the_loss_does_not_depend_on_may_mix(config):
    model = Blocks(torch.relu, beside=spread)
    assert run_warm(outcome, 2, config, model) == [([], False)] * 2


def test_copies_of_whole_stages_warn():
    stages = STAGES_OF_RANKS["pipeline"] | {"microbatches": 1, "schedule": "gpipe"}
    config = STAGES_OF_RANKS | {"pipeline": stages}
    every = run_warm(twice, 4, config, Blocks(normal))

    said = [text for found, _ in every for text in found]
    assert len(said) == 2  # on the last stage of each copy
    assert all(text.startswith("msrun: the loss depends on a std over samples") for text in said)
    assert not any(is_same for _, is_same in every)


def test_statistics_of_parts_are_accepted_if_they_are_meant():
    config = STAGES | {"batch_norm": "local"}
    assert run_warm(outcome, 2, config, Blocks(normal)) == [([], False)] * 2


@pytest.mark.parametrize("name", [*(each.__name__ for each in mixing_functions.MIXING), *RIGHT])
def test_a_trace_knows_what_mixes_samples(name):
    between = getattr(mixing_functions, name)
    traced = trace(Blocks(between), (torch.randn(SAMPLES, WIDTH),))
    expected = mixing_functions.MIXING.get(between, "").partition(" (")[0]
    assert traced.of_whole_batch == (expected and f"{expected} (in blocks.1)")


def test_numbers_beside_the_output_of_stages_are_followed():
    for found in run_warm(said_of_numbers, 2, STAGES):
        assert found["mean"] == found["sum by samples"] == [[], []]
        assert "the loss depends on a mean over samples" in found["root"][0][0]
        assert "the loss depends on a sum over samples" in found["sum"][0][0]
        assert "no linear function of mean over the batch" in found["root"][1][0]
        assert "may mean a mean or a sum over the whole batch" in found["sum"][1][0]
