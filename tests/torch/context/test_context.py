"""Style `context`: ranks with parts of each sequence learn what one process learns."""

import math
from functools import partial

import pytest
import torch
from context_models import (
    TOKENS,
    Apart,
    Fixed,
    Paired,
    Table,
    Text,
    batches,
    build,
    loss_fn,
    trained,
)
from ranks import Counted, run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ConfigError, ModelError
from msrun.parallel.config_file import read_config
from msrun.parallel.context.attention import bytes_by_heads
from msrun.parallel.layout import resolve

pytestmark = [
    pytest.mark.torch,
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

RULE = {"match": "*", "style": "context"}
RING = {**RULE, "kind": "ring"}
TWO = {"mesh": {"cp": 2}, "plan": [RULE]}
KEEP = torch.ones(4, TOKENS, dtype=torch.bool)
KEEP[0, 5:] = KEEP[2, :1] = False
# Documents of unequal lengths, also across the parts of ranks.
NUMBERS = torch.tensor(
    [[0, 0, 0, 1, 1, 1, 1, 2], [0] * 8, [0, 1, 1, 1, 2, 2, 2, 2], [0] * 4 + [1] * 4]
)
PAIRS = (NUMBERS[:, :, None] == NUMBERS[:, None, :]).tril()
MODELS = {
    "positions by a range": (Text, None),
    "positions by a table": (Table, None),
    "positions of all tokens": (Fixed, None),
    "two heads of keys": (partial(Text, key_heads=2), None),
    "one head of keys, all see all": (partial(Text, key_heads=1, is_causal=False), None),
    "a mask of keys": (partial(Text, is_causal=False), KEEP),
    "a mask of pairs": (partial(Paired, is_causal=False), PAIRS),
}
# Of every head, for masks of whole sequences on each rank; for all samples.
MORE = {
    "a mask of pairs of whole sequences": (partial(Paired, is_causal=False), PAIRS[:, None]),
    "one of every head": (partial(Paired, is_causal=False), PAIRS[:, None].repeat(1, 4, 1, 1)),
}
CONFIGS = {
    "cp 2": (2, TWO),
    "cp 4": (4, {**TWO, "mesh": {"cp": 4}}),
    "ring, cp 4": (4, {"mesh": {"cp": 4}, "plan": [RING]}),
    "ring, dp 2, cp 2, zero 3": (
        4,
        {"mesh": {"dp": 2, "cp": 2}, "plan": [RING], "optimizer": {"zero": 3}},
    ),
    "ring, recompute": (2, {**TWO, "plan": [RING], "recompute": {"modules": ["blocks.?"]}}),
    "dp 2, cp 2": (4, {**TWO, "mesh": {"dp": 2, "cp": 2}}),
    "dp 2, cp 2, zero 3": (4, {**TWO, "mesh": {"dp": 2, "cp": 2}, "optimizer": {"zero": 3}}),
    "zero 1": (2, {**TWO, "optimizer": {"zero": 1}}),
    "accumulate 2": (2, {**TWO, "accumulate": 2}),
    "recompute": (2, {**TWO, "recompute": {"modules": ["blocks.*.?*"]}}),
    "recompute of blocks": (2, {**TWO, "recompute": {"modules": ["blocks.?"]}}),
    "cp 2, tp 2": (
        4,
        {
            "mesh": {"cp": 2, "tp": 2},
            "plan": [
                {"match": "blocks.*.up", "style": "colwise"},
                {"match": "blocks.*.down", "style": "rowwise"},
                RULE,
            ],
        },
    ),
}


def assert_equal(found, expected):
    losses, weights = found
    assert losses.tolist() == pytest.approx(expected[0].tolist(), abs=1e-10)
    for name, weight in expected[1].items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def alone():
    """Return what one process learns, by model; each is trained once."""
    known = {}

    def of(name):
        if name not in known:
            known[name] = run_warm(trained, 1, {}, *(MODELS | MORE)[name])[0]
        return known[name]

    return of


@pytest.mark.sampled
@pytest.mark.parametrize("rule", [RULE, RING], ids=["by heads", "ring"])
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_with_parts_of_sequences_equal_one_process(name, rule, alone):
    for found in run_warm(trained, 2, {**TWO, "plan": [rule]}, *MODELS[name]):
        assert_equal(found, alone(name))


@pytest.mark.slow
@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("name", MODELS | MORE)
def test_parts_of_sequences_with_other_techniques_equal_one_process(name, case, alone):
    ranks, config = CONFIGS[case]
    for found in run_warm(trained, ranks, config, *(MODELS | MORE)[name]):
        assert_equal(found, alone(name))


@pytest.mark.sampled
@pytest.mark.parametrize("rule", [RULE, RING], ids=["by heads", "ring"])
def test_a_plan_may_divide_the_heads_beside_parts_of_sequences(rule):
    apart = [{"match": f"blocks.*.{name}", "style": "colwise"} for name in ("q", "k", "v", "up")]
    back = [{"match": f"blocks.*.{name}", "style": "rowwise"} for name in ("out", "down")]
    config = {"mesh": {"cp": 2, "tp": 2}, "plan": [*apart, *back, rule]}
    (expected,) = run_warm(trained, 1, {}, Apart)
    for found in run_warm(trained, 4, config, Apart):
        assert_equal(found, expected)


class Changed(Text):
    """A model that does something else with the tokens behind its last block."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.heads = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        places = self.places(torch.arange(x.shape[1]))
        y = self.words(x) + places
        for block in self.blocks:
            y = block(y)
        return self.head(self.change(self, y))


def eager(_, y):
    return (y @ y.mT / 4).softmax(-1) @ y


def rotated(_, y):
    return torch.cat([y[:, -1:], y[:, :-1]], dim=1)


def dropped(_, y):
    return functional.scaled_dot_product_attention(
        y[:, None], y[:, None], y[:, None], dropout_p=0.1
    )


def masked(_, y):
    tokens = y.shape[1]
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    q = y.unflatten(2, (4, 4)).transpose(1, 2)
    return functional.scaled_dot_product_attention(q, q, q, mask).transpose(1, 2).flatten(2)


def masked_twice(_, y):
    """Give a mask of keys and is_causal, of which torch takes one."""
    q = y.unflatten(2, (4, 4)).transpose(1, 2)
    seen = (y.sum(-1) < 1e9)[:, None, None]
    found = functional.scaled_dot_product_attention(q, q, q, seen, is_causal=True)
    return found.transpose(1, 2).flatten(2)


def repeated(_, y):
    def attend(y):
        q = y.unflatten(2, (4, 4)).transpose(1, 2)
        return functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)

    return torch.utils.checkpoint.checkpoint(attend, y, use_reentrant=False)


def without_the_first(_, y):
    z = y * 1
    z[:, 0] = 0
    return z


def pooled_in_a_buffer(_, y):
    z = y.new_zeros(y.shape)
    z[..., :8] = y[..., :8]
    return z + z.mean(1, keepdim=True)


def pooled_behind_a_write(_, y):
    z = y * 1
    z[..., :8].mul_(2)
    z[..., 8:] = 0
    return z + z.mean(1, keepdim=True)


def in_front_of_the_last(_, y):
    z = y.new_zeros(y.shape[0], y.shape[1] + 1, y.shape[2])
    z[:, 1:].copy_(y)
    return z[:, : y.shape[1]]


def shifted(_, y):
    numbers = y.argmax(-1)
    before = torch.zeros_like(numbers)
    before[:, 1:] = numbers[:, :-1]
    return y + before.unsqueeze(-1)


MIXING = {
    "has a slice over tokens": without_the_first,
    "a mean over tokens": pooled_in_a_buffer,
    "mean over tokens (test_context": pooled_behind_a_write,
    "a write to some tokens": in_front_of_the_last,
    "a slice over tokens (test_context": shifted,
    "conv1d over tokens": lambda model, y: model.conv(y.mT).mT,
    "mean over tokens": lambda _, y: y + y.mean(1, keepdim=True),
    "cumsum over tokens": lambda _, y: y.cumsum(1),
    "max over tokens": lambda _, y: y / y.abs().max(),
    "does not run on a part": lambda _, y: y + torch.ones(7, 16),
    "lstm": lambda model, y: model.lstm(y)[0],
    "multi_head_attention_forward": lambda model, y: model.heads(y, y, y)[0],
    "layer_norm over tokens": lambda _, y: functional.layer_norm(y, y.shape[1:]),
    "flip over tokens": lambda _, y: y.flip(1),
    "matmul of pairs of tokens": eager,
    "slice over tokens": rotated,
    "values that the model made": lambda _, y: y + torch.linspace(0, 1, y.shape[1])[:, None],
    "dropout 0.1": dropped,
    "mask of shape (4, 4)": masked,
    "is_causal and a mask": masked_twice,
    "function of torch.utils.checkpoint": repeated,
    "mul by a number of the tokens of the part": lambda _, y: y * math.log(y.shape[1]),
    "a div by a number of the tokens of the part": lambda _, y: (
        y * (torch.arange(n := y.shape[1]) / n)[:, None]
    ),
    "decision by an argmax over tokens": lambda _, y: y if y.argmax(1).max() > 0 else 2 * y,
    "1 heads of queries": lambda _, y: (
        functional.scaled_dot_product_attention(*[y.view(len(y), -1, 1, 16).transpose(1, 2)] * 3)
        .transpose(1, 2)
        .flatten(2)
    ),
}


def in_two_halves(_, y):
    z = y.new_empty(y.shape)
    z[..., :8].copy_(y[..., :8])
    z[..., 8:].copy_(y[..., 8:] * 2)
    return z


def assigned_by_halves(_, y):
    z = torch.zeros(y.shape, dtype=y.dtype)
    z[..., 8:] = y[..., 8:]
    z[..., 0] = 1.0
    return y + z


def filled_by_a_mask(_, y):
    z = y * 1
    z[y > 0.5] = 0.5
    z[:, :, ::2] = y[:, :, 1::2]
    return z


WRITING = [in_two_halves, assigned_by_halves, filled_by_a_mask]


def trained_with_writes(config):
    return [trained(config, partial(Changed, change)) for change in WRITING]


def test_tensors_that_a_model_fills_keep_their_tokens():
    (expected,) = run_warm(trained_with_writes, 1, {})
    for found in run_warm(trained_with_writes, 2, TWO):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)


def refusals():
    """Return what is said of each model, and whether its weights changed."""
    found = {}
    with msrun.init({**TWO, "plan": [{**RULE, "kind": "all_to_all"}]}) as rt:
        for name, change in MIXING.items():
            torch.manual_seed(0)
            model = rt.shard(Changed(change))
            optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            before = model.head.weight.detach().clone()
            with pytest.raises(ModelError) as error:
                rt.step(model, optimizer, loss_fn, *batches()[0])
            found[name] = error.value.message, torch.equal(before, model.head.weight)
    return found


def test_what_mixes_tokens_is_refused_by_name_before_a_weight_changes():
    (found, _) = run_warm(refusals, 2)
    wrong = {
        name: said
        for name, (said, _) in found.items()
        if name.replace("2 heads", "1 heads") not in said
    }
    assert wrong == {}
    assert all(is_unchanged for _, is_unchanged in found.values())


def sample_by_sample(output, target):
    """Return a mean of losses of samples, of which each has its own number of targets."""
    pairs = zip(output, target, strict=True)
    return sum(functional.cross_entropy(one, other) for one, other in pairs) / len(target)


def divided_by_samples(output, target):
    odds = functional.one_hot(target.clamp(min=0), output.shape[-1]).to(output) * 0.9 + 0.01
    return functional.kl_div(output.log_softmax(-1), odds, reduction="batchmean")


def summed_by_samples(output, target):
    every = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return every / len(target)


def losses_of_samples(config):
    """Return losses of steps with ignored targets, and what is said of other losses."""
    with msrun.init(config) as rt:
        model = rt.shard(build(Text))
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = batches()[0]  # of one sample, one rank has no target
        losses = [rt.step(model, optimizer, sample_by_sample, x, y).item() for _ in range(2)]
        model = rt.shard(build(Text))
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        if "mesh" not in config:
            return losses, []
        said = []
        for loss_fn in (divided_by_samples, summed_by_samples):
            with pytest.raises(ModelError) as error:
                rt.step(model, optimizer, loss_fn, x, y)
            said.append(error.value.message)
        return losses, said


def test_a_loss_of_each_sample_counts_its_targets_on_all_ranks():
    ((expected, _),) = run_warm(losses_of_samples, 1, {})
    for losses, said in run_warm(losses_of_samples, 2, TWO):
        assert losses == pytest.approx(expected, abs=1e-10)
        assert "a kl_div that is divided by samples, and not by tokens" in said[0]
        assert "may mean a mean or a sum over the whole batch" in said[1]


class Losing(Text):
    """Computes its loss, of targets some of which are ignored."""

    def forward(self, words, target):
        return loss_fn(super().forward(words), target)


def losses_of_model(config, *, is_passed):
    with msrun.init(config) as rt:
        model = rt.shard(build(Losing))
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = (t.chunk(rt.layout.size("dp"))[rt.coordinate.get("dp", 0)] for t in batches()[0])
        y = y.clamp(min=0) if is_passed else y  # of any number, none knows how many targets count
        batch = (lambda loss, _: loss, x, y, y) if is_passed else ({"words": x, "target": y},)
        return [rt.step(model, optimizer, *batch).item() for _ in range(2)]


@pytest.mark.parametrize(
    ("name", "is_passed"), [("dp 2, cp 2", False), ("accumulate 2", False), ("cp 2", True)]
)
def test_a_model_that_computes_its_loss_counts_targets_on_all_ranks(name, is_passed):
    (expected,) = run_warm(partial(losses_of_model, is_passed=is_passed), 1, {})
    ranks, config = CONFIGS[name]
    for losses in run_warm(partial(losses_of_model, is_passed=is_passed), ranks, config):
        assert losses == pytest.approx(expected, abs=1e-10)


def evaluated():
    """Return outputs of whole sequences, a gradient of a plain loop, and what is refused."""
    with msrun.init(TWO) as rt:
        model = rt.shard(build(Text))
        x, y = batches()[0]
        loss_fn(model(x), y).backward()
        gradient = model.words.weight.grad.clone()
        with torch.no_grad():
            output = model.eval()(x)
        said = []
        for bad in (x[:, :7], x[:, 0], x.flatten(), x[:, :2]):
            with pytest.raises(ModelError) as error:
                model(bad)
            said.append(error.value.message)
        return output, gradient, said


def test_a_model_called_by_the_script_takes_and_gives_whole_sequences():
    model, (x, y) = build(Text), batches()[0]
    output = model(x)
    loss_fn(output, y).backward()
    for found, gradient, said in run_warm(evaluated, 2):
        torch.testing.assert_close(found, output.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient, model.words.weight.grad, rtol=0, atol=1e-12)
        assert "7 tokens in dim 1 of the batch can not be split into 2 parts" in said[0]
        assert "no tensor with two dims" in said[1]
        # Of one token a part, nothing tells them from what all tokens share.
        assert "2 tokens in dim 1 of the batch leave one for each of 2 parts" in said[3]


def sent(config, name):
    """Return the bytes of collectives of that name in forward and backward."""
    with msrun.init(config) as rt:
        model = rt.shard(build(partial(Text, heads=4, key_heads=1)))
        x, y = batches()[0]
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with Counted() as counted:
            rt.step(model, optimizer, loss_fn, x, y)
        return counted.bytes[name]


def test_bytes_of_all_to_alls_follow_the_formula():
    layers, passes = 2, 2
    expected = layers * passes * bytes_by_heads(((4, 4, TOKENS // 2, 4), 1), 2, 8)
    assert run_warm(sent, 2, TWO, "all_to_all_single") == [expected, expected]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_around_a_ring_follow_the_formula(ranks):
    layers, tensor = 2, 4 * (TOKENS // ranks) * 4 * 8  # one head of keys or values
    config = {"mesh": {"cp": ranks}, "plan": [RING]}
    # Keys and values forward, backward, and their gradients home.
    around = layers * (3 * ranks - 2) * 2 * tensor
    assert run_warm(sent, ranks, config, "send") == [around] * ranks
    halves = layers * 2 * (4 + 1 + 1 + 4) * tensor
    assert run_warm(sent, ranks, config, "all_to_all_single") == [halves] * ranks


def saved(config):
    """Return the bytes that a step keeps for its backward pass, beside weights."""
    kept = {}
    with msrun.init(config) as rt:
        model = rt.shard(build(Text))
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def keep(x):
            storage = x.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            rt.step(model, optimizer, loss_fn, *batches()[0])
    return sum(kept.values())


@pytest.mark.slow
@pytest.mark.parametrize("rule", [RULE, RING], ids=["by heads", "ring"])
def test_activations_of_a_rank_fall_with_the_number_of_ranks(rule):
    alone = run_warm(saved, 1, {})[0]
    for ranks in (2, 4):
        found = run_warm(saved, ranks, {"mesh": {"cp": ranks}, "plan": [rule]})
        assert max(found) <= 1.15 * alone / ranks


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"mesh": {"dp": 2}, "plan": [RULE]}, "axis cp, which is not in mesh (dp)"),
        ({"mesh": {"cp": 2, "dp": 1}, "plan": [RULE]}, "must be the next after dp"),
        ({"mesh": {"cp": 2}}, "no rule of parallel.plan uses this axis"),
        ({**TWO, "verify": 1}, "parallel.verify does not know parts of sequences"),
        ({**TWO, "dropout": "exact"}, "parallel.dropout: exact does not know"),
        ({**TWO, "reduce": {"op": "sum"}}, "parallel.reduce.op: sum does not know"),
        ({**TWO, "reduce": {"exclude": ["x"]}}, "parallel.reduce.exclude does not know"),
        ({**TWO, "plan": [RULE, RULE]}, "context stands in plan[0] already"),
        ({**TWO, "plan": [{**RULE, "axis": "tp"}]}, "style context divides the axis cp"),
        ({**TWO, "plan": [{"match": "*", "style": "colwise", "kind": "auto"}]}, "kind: belongs to"),
        (
            {"mesh": {"cp": 2}, "plan": [{"match": "up", "params": {"weight": ["cp"]}}]},
            "an operator",
        ),
        ({**TWO, "mode": "auto"}, "style: context: mode auto plans whole sequences"),
    ],
)
def test_configurations_without_a_meaning_are_refused(config, words):
    with pytest.raises(ConfigError) as error:
        resolve(read_config(config), 2)
    assert words in error.value.message
