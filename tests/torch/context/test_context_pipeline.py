"""Style `context` in a pipeline: stages with parts of sequences learn what one process learns."""

from functools import partial

import pytest
import torch
from context_models import TOKENS, WIDTH, WORDS, Table, Text, batches, build, loss_fn, trained
from ranks import run_warm
from test_context import MIXING, MODELS, MORE, RING, RULE, Changed, assert_equal
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError
from msrun.parallel.local import full_tensor

pytestmark = [
    pytest.mark.torch,
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]


def pipeline(schedule="1f1b", microbatches=2, rule=RULE, **more):
    return {
        "mesh": {"pp": 2, "cp": 2},
        "plan": [rule],
        "pipeline": {"stages": "auto", "schedule": schedule, "microbatches": microbatches},
        **more,
    }


TENSOR = [
    {"match": "blocks.*.up", "style": "colwise"},
    {"match": "blocks.*.down", "style": "rowwise"},
    RULE,
]
RECOMPUTE = {"recompute": {"modules": ["blocks.?"]}}
CONFIGS = {
    "1f1b": (4, pipeline()),
    "ring, gpipe": (4, pipeline("gpipe", 4, RING)),
    "micro-batches of unequal size": (4, pipeline("1f1b", 3, RING)),
    "interleaved, zero 1, recompute": (4, pipeline("interleaved", 4, **RECOMPUTE)),
    "ring, zbv, recompute": (4, pipeline("zbv", 4, RING, **RECOMPUTE)),
    "zero 3, recompute": (4, pipeline(optimizer={"zero": 3}, **RECOMPUTE)),
    "dp 2": (8, pipeline(mesh={"pp": 2, "dp": 2, "cp": 2}, optimizer={"zero": 2})),
    "tp 2": (8, pipeline(mesh={"pp": 2, "cp": 2, "tp": 2}, plan=TENSOR, **RECOMPUTE)),
}


@pytest.fixture(scope="module")
def alone():
    """Return what one process learns, by model; each is trained once."""
    known = {}

    def of(name):
        if name not in known:
            known[name] = run_warm(trained, 1, {}, *(MODELS | MORE)[name])[0]
        return known[name]

    return of


def assert_stages_equal(found, expected):
    """Compare the losses of all ranks, and the weights that stages have together."""
    names = set()
    for losses, weights in found:
        assert_equal((losses, expected[1] | weights), expected)
        names |= set(weights)
    assert names == set(expected[1])


@pytest.mark.parametrize("name", ["positions by a range", "a mask of keys"])
def test_stages_with_parts_of_sequences_equal_one_process(name, alone):
    ranks, config = CONFIGS["1f1b"]
    assert_stages_equal(run_warm(trained, ranks, config, *MODELS[name]), alone(name))


@pytest.mark.slow
@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("name", MODELS | MORE)
def test_every_schedule_and_technique_equals_one_process(name, case, alone):
    ranks, config = CONFIGS[case]
    assert_stages_equal(run_warm(trained, ranks, config, *(MODELS | MORE)[name]), alone(name))


def lengths(config):
    """Return losses and weights after steps on sequences of several lengths, and an evaluation."""
    draw = torch.Generator().manual_seed(8)
    steps = [torch.randint(0, WORDS, (2, 4, size), generator=draw) for size in (8, 16, 4, 16)]
    with msrun.init(config) as rt:
        model = rt.shard(build(Table), sample=(steps[0][0],))
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        losses = [rt.step(model, optimizer, loss_fn, x, y) for x, y in steps]
        with torch.no_grad():
            output = model.eval()(steps[1][0])
        model.train()
        losses += [rt.step(model, optimizer, loss_fn, *steps[0])]
        weights = {name: full_tensor(p.detach()) for name, p in model.named_parameters()}
        return torch.stack(losses), weights, output


def test_lengths_may_change_and_evaluations_take_whole_sequences():
    (losses, weights, output) = run_warm(lengths, 1, {})[0]
    found = run_warm(lengths, 4, pipeline())
    assert_stages_equal([each[:2] for each in found], (losses, weights))
    for *_, evaluated in found:
        torch.testing.assert_close(evaluated, output, rtol=0, atol=1e-12)


class Sliced(Text):
    """Reads the first values of a token, as many as the part has tokens."""

    def forward(self, x):
        y = self.words(x) + self.position(x)
        for block in self.blocks:
            y = block(y)
        return self.head(torch.cat([y[:, :, :4], y[:, :, 4:]], 2))


@pytest.mark.parametrize("config", [{"mesh": {"cp": 2}, "plan": [RULE]}, pipeline()])
def test_a_slice_of_tokens_is_no_table_of_positions(config):
    expected = run_warm(trained, 1, {}, Sliced)[0]
    ranks = 4 if "pipeline" in config else 2
    assert TOKENS // 2 == 4  # as many as the slice has
    assert_stages_equal(run_warm(trained, ranks, config, Sliced), expected)


class Placed(nn.Module):
    """Positions by a range and a table, in a module that is one step of the forward."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.register_buffer("table", torch.randn(2 * TOKENS, WIDTH))

    def forward(self, x):
        return self.places(torch.arange(x.shape[1])) + self.table[: x.shape[1]]


class Weighted(Text):
    """Returns its own loss, in which early tokens weigh more."""

    def __init__(self):
        super().__init__()
        self.placed = Placed()

    def position(self, x):
        return self.placed(x)

    def forward(self, x, y):
        output = super().forward(x)
        each = functional.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="none")
        return (each.view(y.shape) / (1 + torch.arange(y.shape[1]))).mean()


def weighted(output, target):
    each = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    weights = 1.0 / (1 + torch.arange(target.shape[1], dtype=each.dtype))
    return (each.view(target.shape) * weights).mean()


def clipped(config, *, is_own):
    """Return losses and weights after steps of clipped gradients of a loss that knows positions."""
    with msrun.init(config) as rt:
        sample = batches()[0][: 1 + is_own]
        model = rt.shard(build(Weighted if is_own else Text), sample=sample)
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        given = [batch if is_own else (weighted, *batch) for batch in batches()]
        losses = [rt.step(model, optimizer, *each, max_norm=0.1) for each in given]
        weights = {name: full_tensor(p.detach()) for name, p in model.named_parameters()}
        return torch.stack(losses), weights


@pytest.mark.parametrize("is_own", [False, True])
def test_losses_count_positions_from_the_first_token(is_own):
    run = partial(clipped, is_own=is_own)
    expected = run_warm(run, 1, {})[0]
    assert_stages_equal(run_warm(run, 4, pipeline()), expected)
    if not is_own:
        assert_stages_equal(run_warm(run, 2, {"mesh": {"cp": 2}, "plan": [RULE]}), expected)


class Deciding(Text):
    """Asks a number of the positions, which the recording of the forward could tell."""

    def position(self, x):
        places = torch.arange(x.shape[1])
        return self.places(places) if places.max() > 5 else 2 * self.places(places)


def decided(config):
    """Return what is said of the model."""
    with msrun.init(config) as rt:
        model = rt.shard(Deciding(), sample=batches()[0][:1])
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ModelError) as error:
            rt.step(model, optimizer, loss_fn, *batches()[0])
        return error.value.message


def test_a_decision_by_positions_of_a_part_is_refused():
    for said in run_warm(decided, 4, pipeline()):
        assert "a decision by a max over tokens (test_context_pipeline.py" in said


# What the pipeline itself refuses, or has no need to: it runs a checkpointed function as steps.
OF_PIPELINE = {
    "does not run on a part",
    "decision by an argmax over tokens",
    "function of torch.utils.checkpoint",
}


def refusals():
    """Return what is said of each model, and whether its weights changed."""
    found = {}
    stages = {"words": 0, "places": 0, "blocks.0": 0, "*": 1}
    settings = {"stages": stages, "microbatches": 2}
    with msrun.init(pipeline(rule={**RULE, "kind": "all_to_all"}, pipeline=settings)) as rt:
        for name in sorted(MIXING.keys() - OF_PIPELINE):
            torch.manual_seed(0)
            model = rt.shard(Changed(MIXING[name]), sample=batches()[0][:1])
            optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(ModelError) as error:
                rt.step(model, optimizer, loss_fn, *batches()[0])
            now = zip(before, model.parameters(), strict=True)
            found[name] = error.value.message, all(torch.equal(*pair) for pair in now)
    return found


@pytest.mark.slow
def test_what_mixes_tokens_is_refused_on_all_stages_before_a_weight_changes():
    for found in run_warm(refusals, 4):
        wrong = {name: said for name, (said, _) in found.items() if name not in said}
        assert wrong == {}
        assert all(is_unchanged for _, is_unchanged in found.values())


def refused_twice():
    """Return what is said of a model in two steps, as a script may go on."""
    with msrun.init(pipeline()) as rt:
        change = MIXING["values that the model made"]
        model = rt.shard(Changed(change), sample=batches()[0][:1])
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        said = []
        for batch in batches()[:2]:
            with pytest.raises(ModelError) as error:
                rt.step(model, optimizer, loss_fn, *batch)
            said.append(error.value.message)
        return said


def test_a_step_behind_a_refused_one_is_refused_too():
    for said in run_warm(refused_twice, 4):
        assert len(said) == 2
        assert all("values that the model made" in each for each in said)
