"""Style `context` beside experts on ranks: tokens of parts travel to the experts of all ranks."""

import pytest
import torch
import torch.distributed as dist
from context_models import WIDTH, Block, Text, batches, loss_fn, trained
from ranks import run_warm
from test_context import RING, RULE, assert_equal
from test_context_pipeline import assert_stages_equal
from test_context_transformers import SIZES, TEXTS, transformers
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ConfigError, ModelError
from msrun.parallel.config_file import read_config
from msrun.parallel.layout import resolve
from msrun.parallel.local import full_tensor

pytestmark = [
    pytest.mark.torch,
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

EXPERTS = {"match": "*.experts", "style": "experts", "axis": "ep"}


def shared(rule=RULE, **more):
    return {"mesh": {"ep": 2, "cp": 2}, "plan": [EXPERTS, rule], **more}


def staged(schedule="1f1b", rule=RULE, microbatches=4, **more):
    settings = {"stages": "auto", "schedule": schedule, "microbatches": microbatches}
    return shared(rule, **{"mesh": {"pp": 2, "ep": 2, "cp": 2}, "pipeline": settings, **more})


STAGED = {
    "1f1b": staged(),
    "zbv, zero 1": staged("zbv", optimizer={"zero": 1}),
    "ring, interleaved, recompute": staged(
        "interleaved", RING, recompute={"modules": ["blocks.?"]}
    ),
    "ring, gpipe, zero 3": staged("gpipe", RING, optimizer={"zero": 3}),
    "whole experts": staged(mesh={"pp": 2, "ep": 1, "cp": 2}),
}
CONFIGS = {
    "ep 2, cp 2": (4, shared()),
    "whole experts": (2, shared(mesh={"ep": 1, "cp": 2})),
    "ring, zero 1, accumulate, recompute": (
        4,
        shared(RING, optimizer={"zero": 1}, accumulate=2, recompute={"modules": ["*.?"]}),
    ),
    "dp 2, zero 3": (8, shared(mesh={"dp": 2, "ep": 2, "cp": 2}, optimizer={"zero": 3})),
}


class Experts(nn.Module):
    """Counts rows by a range, as dispatches do, and has as many as a part has tokens."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, WIDTH, 8) / 4)
        self.down = nn.Parameter(torch.randn(4, 8, WIDTH) / 4)

    def forward(self, tokens, index, weights):
        rows = torch.arange(len(tokens))
        inside = functional.silu(torch.einsum("tw,twi->ti", tokens[rows], self.up[index[:, 0]]))
        y = torch.einsum("ti,tiw->tw", inside, self.down[index[:, 0]])
        return y * weights[:, :1]


class Routed(Block):
    def __init__(self):
        super().__init__(4, 4, is_causal=True)
        self.gate, self.experts = nn.Linear(WIDTH, 4), Experts()

    def forward(self, x, mask=None):
        x = super().forward(x, mask)
        tokens = x.view(-1, WIDTH)
        weights, index = self.gate(tokens).softmax(-1).topk(1)
        return x + self.experts(tokens, index, weights).view(x.shape)


class Mixture(Text):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Routed(), Routed()])


@pytest.mark.parametrize(
    "case",
    [
        *("ep 2, cp 2", "whole experts"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in [*CONFIGS][2:]),
    ],
)
def test_tokens_of_parts_travel_to_experts_as_in_one_process(case):
    expected = run_warm(trained, 1, {}, Mixture)[0]
    ranks, config = CONFIGS[case]
    for found in run_warm(trained, ranks, config, Mixture):
        assert_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", STAGED)
def test_stages_send_tokens_of_parts_to_experts_as_in_one_process(case):
    expected = run_warm(trained, 1, {}, Mixture)[0]
    ranks = 4 * STAGED[case]["mesh"]["ep"]
    assert_stages_equal(run_warm(trained, ranks, STAGED[case], Mixture), expected)


class Averaged(Experts):
    def forward(self, tokens, index, weights):
        return super().forward(tokens - tokens.mean(0), index, weights)


class MixtureOfMeans(Mixture):
    def __init__(self):
        super().__init__()
        self.blocks[1].experts = Averaged()


def refused_whole():
    with pytest.raises(ModelError) as error:
        trained(shared(mesh={"ep": 1, "cp": 2}), MixtureOfMeans)
    return error.value.message


def test_whole_experts_that_mix_tokens_of_a_part_are_refused():
    for said in run_warm(refused_whole, 2):
        assert said.startswith("blocks.1.experts of style experts over ep: what it computes of a")


def learned(config, texts):
    """Return losses and weights of Mixtral after steps on the same texts."""
    with msrun.init(config) as rt:
        torch.manual_seed(3)
        settings = transformers.MixtralConfig(
            **SIZES,
            num_local_experts=4,
            sliding_window=None,
            experts_implementation="eager",
            use_cache=False,
        )
        sample = texts if "pipeline" in config else None
        model = rt.shard(transformers.MixtralForCausalLM(settings).double(), sample=sample)
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        ranks, rank = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
        part = {key: tensor.tensor_split(ranks)[rank] for key, tensor in texts.items()}
        losses = [rt.step(model, optimizer, part) for _ in range(3)]
        weights = {key: full_tensor(p.detach()) for key, p in model.named_parameters()}
        return torch.stack(losses).double(), weights


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "padded"])
def test_parts_of_texts_with_experts_on_ranks_equal_whole_texts(kind):
    losses, weights = run_warm(learned, 1, {}, TEXTS[kind])[0]
    for ranks, config in CONFIGS.values():
        for found, after in run_warm(learned, ranks, config, TEXTS[kind]):
            torch.testing.assert_close(found, losses, rtol=0, atol=4e-6)
            for key, weight in weights.items():
                torch.testing.assert_close(after[key], weight, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "padded"])
def test_stages_with_parts_of_texts_and_experts_equal_whole_texts(kind):
    losses, weights = run_warm(learned, 1, {}, TEXTS[kind])[0]
    for config in (staged(microbatches=2), staged("gpipe", RING, 2)):
        for found, after in run_warm(learned, 8, config, TEXTS[kind]):
            torch.testing.assert_close(found, losses, rtol=0, atol=4e-6)
            for key, weight in after.items():
                torch.testing.assert_close(weight, weights[key], rtol=0, atol=1e-6)


class Balanced(Mixture):
    """Adds to a token what its router gave to all of the part."""

    def forward(self, x):
        y = super().forward(x)
        return y + self.blocks[0].gate(self.words(x)).mean((0, 1)).sum()


class Listed(Text):
    """Has its experts in a list."""

    def __init__(self):
        super().__init__()
        self.blocks[0].experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def refused_list():
    """Return what each rank says of a list of experts that one stage has."""
    with msrun.init(staged()) as rt, pytest.raises(msrun.UsageError) as error:
        rt.shard(Listed(), sample=(batches()[0][0],))
    return error.value.message


def test_a_list_of_experts_in_stages_is_refused_on_all_ranks():
    for said in run_warm(refused_list, 8):
        assert "context does not follow tokens to the experts of the list blocks.0" in said


def refusals():
    """Return what is said of a balance, and of a list of experts, and the ranks of `ep`."""
    with msrun.init(shared()) as rt:
        with pytest.raises(ModelError) as listed:
            rt.shard(Listed())
        model = rt.shard(Balanced())
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ModelError) as error:
            rt.step(model, optimizer, loss_fn, *(tensor[:2] for tensor in batches()[0]))
        said = error.value.message, listed.value.message
        return said, dist.get_process_group_ranks(rt.group("ep"))


def test_balance_of_a_part_is_refused_and_neighbours_share_experts():
    layout = resolve(read_config(shared()), 4)
    assert list(layout.groups("ep")) == [(0, 1), (2, 3)]
    for rank, (said, group) in enumerate(run_warm(refusals, 4)):
        assert "a mean over tokens" in said[0]
        assert "context does not follow tokens to the experts of the list blocks.0" in said[1]
        assert tuple(group) in layout.groups("ep")
        assert rank in group


def test_another_order_of_axes_is_refused():
    with pytest.raises(ConfigError, match="must be the next after dp"):
        resolve(read_config(shared(mesh={"cp": 2, "ep": 2})), 4)
