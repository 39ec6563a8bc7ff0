"""Where a model is cut, what a person is told of it, and each sentence about what cannot be."""

import copy

import pytest
import torch
import torch.distributed as dist
from pipelines import CPU, pipeline, split, train_step
from ranks import Transformer, batches, build, run_warm
from torch import nn
from torch.nn import functional

from msrun.errors import UsageError
from msrun.parallel.pipeline.plan import plan_split
from msrun.parallel.pipeline.split_model import split_model

pytestmark = pytest.mark.torch

STAGES = "parallel.pipeline.stages: "
TWO = {"embed": 0, "position": 0, "layers.0": 0, "layers.1": 1, "norm": 1, "head": 1}


def _modules(plan):
    return [list(program.modules) for program in plan.programs]


def test_a_module_goes_with_the_pattern_of_what_it_is_part_of():
    where = {"embed": 0, "pos*": 0, "layers.*.down": 1, "layers.0": 0, "layers": 1, "*": 1}

    plan = plan_split(build("transformer"), pipeline({"layers.0.*": 0, **where}), 2)

    assert _modules(plan) == [["embed", "position", "layers.0"], ["layers.1", "norm", "head"]]
    assert "layers.1.down.weight" in plan.stage_params[1]


def test_modules_are_opened_only_where_their_parts_are_apart():
    where = {"embed": 0, "position": 0, "layers.0": 0, "layers.1.*": 1, "norm": 1, "head": 1}
    cut = {**where, "layers.1.norm1": 0, "layers.1.[qkv]": 0, "layers.1.o": 0}

    whole = plan_split(build("transformer"), pipeline({**where, "layers.1": 1}), 2)
    opened = plan_split(build("transformer"), pipeline(dict(reversed(cut.items()))), 2)

    assert "layers.1" in whole.programs[1].modules
    assert [name for name in opened.programs[0].modules if "layers.1" in name] == [
        f"layers.1.{part}" for part in ("norm1", "q", "k", "v", "o")
    ]
    assert opened.programs[1].modules[:2] == ("layers.1.drop", "layers.1.norm2")


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x, mask=None):
        x = self.a(x) if mask is None else self.a(x * mask)
        return self.b(x)


def test_what_is_never_used_is_kept_where_it_was_put():
    plan = plan_split(Unused(), pipeline({"a": 0, "spare": 1, "b": 1, "scale": 0}), 2)

    assert sorted(plan.stage_params[0]) == ["a.bias", "a.weight", "scale"]
    assert sorted(plan.stage_params[1]) == ["b.bias", "b.weight", "spare.bias", "spare.weight"]


def test_a_sample_says_which_inputs_with_defaults_there_are():
    settings = pipeline({"a": 0, "spare": 1, "b": 1, "scale": 0})
    x = torch.ones(2, 4)

    assert plan_split(Unused(), settings, 2).traced.inputs == ("x",)
    assert plan_split(Unused(), settings, 2, (x, x)).traced.inputs == ("x", "mask")
    with pytest.raises(UsageError) as caught:
        plan_split(Unused(), settings, 2, (x, x, x))
    assert str(caught.value) == "the sample has 3 inputs, and the forward of Unused takes 2"


class Wrapping(Unused):
    """Passes on whatever it is given, as models of peft do."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_inputs_without_names_are_counted():
    settings = pipeline({"a": 0, "spare": 1, "b": 1, "scale": 0})
    x = torch.ones(2, 4)
    assert plan_split(Wrapping(), settings, 2, (x, x)).traced.inputs == ("args[0]", "args[1]")


class Uneven(nn.Module):
    """Half of its work is in the last of its layers, and half of its parameters in the first."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1000, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(4)])
        self.wide = nn.Linear(8, 32, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.wide(x)


@pytest.mark.parametrize(
    ("sample", "measure"), [((torch.zeros(2, 3, dtype=torch.long),), "flops"), (None, "parameters")]
)
def test_auto_makes_work_even(sample, measure):
    plan = plan_split(Uneven(), pipeline("auto"), 2, sample)

    assert _modules(plan) == [["table", *(f"layers.{index}" for index in range(4))], ["wide"]]
    assert plan.measure == measure


def test_auto_opens_what_is_too_large_for_a_stage():
    plan = plan_split(build("transformer"), pipeline("auto", "zbv"), 2)

    assert len(plan.programs) == 4
    assert "layers.0.up" in plan.programs[1].modules


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        if y.sum() > 0:
            y = -y
        return self.b(y)


class Modes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        return self.b(x * 2 if self.training else x.relu())


class Apart(nn.Module):
    """Its second part is called first."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(self.b(x))


class Alone(Apart):
    def forward(self, x, y):
        return self.a(x) if y is None else self.b(y)


AB = {"a": 0, "b": 1}


@pytest.mark.parametrize(
    ("model", "where", "sentence"),
    [
        (
            Transformer,
            {**TWO, "heat": 1},
            STAGES + "'heat' matches nothing (choose such as head, head.weight)",
        ),
        (
            Transformer,
            {"embed": 0, "layers.1.*": 1, "head": 1},
            STAGES + "no stage for position, layers.0, norm",
        ),
        (
            lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(12)]),
            {"1": 0, "2": 1},
            STAGES + "no stage for 0, 3, 4, 5, 6, 7, 8, 9 and 2 more",
        ),
        (
            Unused,
            {"a": 0, "b": 1, "spare": 1},
            STAGES + "no stage for scale",
        ),
        (
            Apart,
            AB,
            STAGES + "a is in stage 0, and uses b of stage 1",
        ),
        (
            Transformer,
            {**TWO, "layers.1": 0, "layers.0": 1},
            STAGES + "layers.1 is in stage 0, and uses layers.0 of stage 1",
        ),
        (
            Branches,
            AB,
            STAGES + "the forward of Branches cannot be traced: symbolically traced variables "
            "cannot be used as inputs to control flow (test_pipeline_plan.py, line {line})",
        ),
        (
            Alone,
            AB,
            STAGES + "nothing in stage 0 runs in forward",
        ),
        (
            Apart,
            "auto",
            STAGES + "auto finds 2 module(s) to cut between, and 4 chunks are needed",
        ),
    ],
)
def test_refusals(model, where, sentence):
    settings = pipeline(where, "zbv" if where == "auto" else "1f1b")
    line = Branches.forward.__code__.co_firstlineno + 2

    with pytest.raises(UsageError) as caught:
        plan_split(model(), settings, 2)

    assert str(caught.value) == sentence.format(line=line)


def test_a_refusal_changes_nothing():
    model = Branches()
    before = set(vars(model))

    with pytest.raises(UsageError):
        plan_split(model, pipeline(AB), 2)

    assert set(vars(model)) == before
    assert model.training


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x), None


class Tuples(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Pair()
        self.b = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        both = self.a(x)
        return {"logits": self.norm(self.b(both[0])), "size": x.shape[1], "both": (x, x[:, 0])}


class Crossing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Pair()
        self.b = Last()

    def forward(self, x):
        return self.b(self.a(x))


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, both):
        return self.linear(both[0])


def _told(call):
    with pytest.raises(UsageError) as caught:
        call()
    return str(caught.value)


def _refused():
    """Return the sentences that every rank says while the pipeline runs."""
    world = dist.group.WORLD
    settings = pipeline({"a": 0, "b": 1, "norm": 1}, microbatches=2)
    part = split_model(Tuples(), settings, world, CPU)
    x, target = torch.randn(4, 4), torch.zeros(4, dtype=torch.long)

    def loss(output, target):
        return functional.cross_entropy(output["logits"], target)

    return [
        _told(lambda: train_step(part, [x, x], target, loss)),
        _told(lambda: part(x)),
        _told(lambda: train_step(part, [x[:0]], target, loss)),
        _told(lambda: train_step(part, [x[:3]], target[:3], loss)),
    ]


def test_refusals_while_it_runs():
    repeated = (
        "parallel.pipeline.microbatches: 3 samples do not divide into 2 equal micro-batches, "
        "and norm would see some twice"
    )
    sentences = [
        "Tuples takes 1 input(s) (x), not 2, as it was split",
        "parallel.pipeline: Tuples has no gradients outside a step of the pipeline",
        "the batch has no sample",
        repeated,
    ]

    assert run_warm(_refused, 2) == [sentences] * 2


def _trained(kind):
    """Return how far training and evaluation are from those of one process."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        whole = kind()
    part = split_model(copy.deepcopy(whole), pipeline(AB, microbatches=2), dist.group.WORLD, CPU)
    x, target = torch.randn(4, 4, generator=torch.Generator().manual_seed(2)), torch.arange(4)
    found = train_step(part, [x], target, functional.cross_entropy)
    loss = functional.cross_entropy(whole(x), target)
    loss.backward()
    own = dict(whole.named_parameters())
    off = [float((p.grad - own[n].grad).abs().max()) for n, p in part.named_parameters()]
    off.append(abs(loss.item() - found.item()))
    off.append(float((part.eval()(x) - whole.eval()(x).detach()).abs().max()))
    return max(off) < 1e-6


def test_tuples_go_from_stage_to_stage_as_their_tensors():
    assert run_warm(_trained, 2, Crossing) == [True] * 2


def test_a_forward_with_other_steps_in_evaluation_is_recorded_for_each_mode():
    assert run_warm(_trained, 2, Modes) == [True] * 2


def _taken():
    model = nn.Sequential()
    model.add_module("describe", nn.Linear(4, 4))
    return _told(lambda: split_model(model, pipeline({"*": 0}), dist.group.WORLD, CPU))


def test_names_of_the_pipeline_are_taken():
    sentence = "parallel.pipeline: Sequential.describe has a name that the pipeline needs"

    assert run_warm(_taken, 1) == [sentence]


def _modes():
    """Return the modes of a model of numbered members, one of them in evaluation for good."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0).eval(), nn.Linear(4, 4))
    part = split_model(model, pipeline({"0": 0, "2": 0}), dist.group.WORLD, CPU)
    x = torch.ones(4, 4)
    with torch.no_grad():
        return [m.training for m in part.modules()], torch.allclose(part(x), model(x))


def test_modules_keep_their_modes():
    assert run_warm(_modes, 1) == [([True, True, False, True], True)]


def _vector_loss():
    part = split("deep", pipeline({"*": 0}, microbatches=2))
    x, y = batches("deep", 4, 1)[0]

    def loss(output, target):
        return functional.cross_entropy(output, target, reduction="none")

    return _told(lambda: train_step(part, [x], y, loss))


def test_the_loss_is_one_number():
    sentence = "the loss has shape (2,), and must be one number"

    assert run_warm(_vector_loss, 1) == [sentence]


def _inference():
    """Return what a model with outputs of several kinds yields, beside what it should."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        whole, network = Tuples().eval(), Tuples().eval()
    network.load_state_dict(whole.state_dict())
    settings = pipeline({"a": 0, "b": 1, "norm": 1}, microbatches=4)
    part = split_model(network, settings, dist.group.WORLD, CPU)
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(2))
    expected, found = whole(x), part(x)
    pairs = zip(expected["both"], found["both"], strict=True)
    tensors = [(expected["logits"], found["logits"]), *pairs]
    is_equal = all(torch.allclose(a, b, atol=1e-6) for a, b in tensors)
    return is_equal, list(found), found["size"], type(found["both"]), found["logits"].requires_grad


def test_inference_yields_the_whole_output_everywhere():
    answer = (True, ["logits", "size", "both"], 4, tuple, False)

    assert run_warm(_inference, 2) == [answer] * 2


def _released():
    """Return what the model that was given is left with."""
    network = build("deep")
    part = split("deep", pipeline({"layers.[0-3]": 0, "layers.*": 1}), network=network)
    meta = [name for name, param in network.named_parameters() if param.device.type == "meta"]
    return meta, [name for name, _ in part.named_parameters()]


def test_what_other_stages_hold_is_freed():
    first, second = run_warm(_released, 2)

    assert first == second[::-1]
    assert len(first[0]) == 8


class Phase(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("angle", torch.ones(4))

    def forward(self, x):
        return x * self.angle


class Phased(nn.Module):
    """Two stages call one module that has no parameters."""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 4), Phase())
        self.b = nn.Linear(4, 4)

    def forward(self, x):
        return self.a[1](self.b(self.a(x)))


def _phased():
    part = split_model(Phased(), pipeline(AB, microbatches=2), dist.group.WORLD, CPU)
    with torch.no_grad():
        return part(torch.ones(2, 4)).shape, list(part.state_dict())


def test_what_two_stages_call_stays_with_both():
    assert run_warm(_phased, 2) == [
        ((2, 4), ["a.0.weight", "a.0.bias", "a.1.angle"]),
        ((2, 4), ["b.weight", "b.bias", "a.1.angle"]),
    ]
