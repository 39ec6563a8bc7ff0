"""Plans by name on small models as people write them: what is sharded, what stays whole, why."""

import copy
import warnings

import pytest
import torch
from plan_stand_ins import (
    MODELS,
    WIDTH,
    Attention,
    FeedForward,
    Language,
    build,
    token_loss,
)
from ranks import Counted, run_warm
from torch import nn

import msrun
from msrun.errors import ConfigError, UsageError
from msrun.parallel.config_file import parse_config
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch


def train(name, config):
    """Return how far losses, gradients and weights are off, collectives, warnings and shapes."""
    model = build(name)
    whole = copy.deepcopy(model)
    plain = torch.optim.SGD(whole.parameters(), lr=0.1)
    rt = msrun.init(config)
    worst = 0.0
    draw = torch.Generator().manual_seed(5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = rt.shard(model)
        update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
        for _ in range(2):
            tokens, target = torch.randint(0, 32, (2, 4, 6), generator=draw)
            plain.zero_grad()
            expected = token_loss(whole(tokens), target)
            expected.backward()
            plain.step()
            part = [t.chunk(count)[share] for t in (tokens, target)]
            with Counted() as counts:
                loss = rt.step(model, update, token_loss, *part)
            worst = max(worst, abs(loss.item() - expected.item()))
    there = dict(whole.named_parameters())
    for param_name, param in model.named_parameters():
        pairs = [(param, there[param_name])]
        if param.requires_grad:
            pairs.append((param.grad, there[param_name].grad))
        for found, expected in pairs:
            worst = max(worst, (full_tensor(found.detach()) - expected).abs().max().item())
    said = sorted({str(w.message) for w in caught if "msrun" in str(w.message)})
    shapes = {
        name: list((param.to_local() if hasattr(param, "to_local") else param).shape)
        for name, param in model.named_parameters()
    }
    return worst, dict(counts.calls), said, shapes


CONFIGS = {
    "tp": (2, {"mesh": {"tp": 2}}),
    "recompute": (2, {"mesh": {"tp": 2}, "recompute": {"modules": ["layers.*"]}}),
    "dp and zero": (4, {"mesh": {"dp": 2, "tp": 2}, "optimizer": {"zero": 1}}),
    "two axes": (4, {"mesh": {"sp": 2, "tp": 2}}),
}


@pytest.mark.sampled
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", MODELS)
def test_auto_tp_equals_one_process(name, config):
    ranks, options = CONFIGS[config]
    plan = ["auto_tp"]
    if config == "two axes":
        plan.append({"match": "layers.*.norm1", "style": "sequence", "axis": "sp"})
    for worst, _, said, _ in run_warm(train, ranks, name, {**options, "plan": plan}):
        assert worst == pytest.approx(0, abs=1e-6)
        assert said == []


def losses(name, config):
    rt = msrun.init(config)
    model = rt.shard(build(name))
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    draw = torch.Generator().manual_seed(5)
    pairs = [torch.randint(0, 32, (2, 4, 6), generator=draw) for _ in range(2)]
    return [rt.step(model, update, token_loss, *pair).item() for pair in pairs]


def test_auto_tp_in_the_stages_of_a_pipeline():
    stages = {"embed": 0, "layers.0": 0, "layers.1": 1, "head": 1}
    pipeline = {"stages": stages, "microbatches": 2}
    config = {"mesh": {"pp": 2, "tp": 2}, "plan": "auto_tp", "pipeline": pipeline}
    expected = run_warm(losses, 1, "grouped", {})[0]
    for found in run_warm(losses, 4, "grouped", config):
        assert found == pytest.approx(expected, abs=1e-6)


def built_on_meta(name, config):
    rt = msrun.init(config)
    with rt.init_on_meta():
        model = build(name)
    model = rt.shard(model)
    whole = dict(build(name).named_parameters())
    params = model.named_parameters()
    return [key for key, param in params if not torch.equal(full_tensor(param), whole[key])]


@pytest.mark.parametrize("name", ["fused", "conv1d", "experts"])
def test_packed_parameters_of_a_model_without_memory_are_filled(name):
    config = {"mesh": {"tp": 2}, "plan": "auto_tp"}

    assert run_warm(built_on_meta, 2, name, config) == [[], []]


# Two layers with two all-reduces forward and two backward, one of the embedding, three of the loss
# of sharded logits and one of its value.
CALLS = {"grouped": 13, "fused": 13, "conv1d": 13, "experts": 15}


@pytest.mark.parametrize("name", MODELS)
def test_no_head_is_gathered(name):
    for _, calls, _, shapes in run_warm(train, 2, name, {"mesh": {"tp": 2}, "plan": "auto_tp"}):
        assert calls == {"all_reduce": CALLS[name]}
        assert shapes["embed.weight"] == [16, WIDTH]
        if name == "grouped":
            assert shapes["layers.0.self_attn.k_proj.weight"] == [4, WIDTH]
            assert shapes["layers.0.mlp.three.weight"] == [WIDTH, 16]
        if name == "experts":
            assert shapes["layers.0.mlp.experts.gate_up_proj"] == [2, 8, WIDTH]


@pytest.mark.parametrize("plan", ["auto_tp", "falcon"])
def test_groups_of_heads_in_one_weight_and_a_head_with_a_shared_bias(plan):
    for worst, calls, said, shapes in run_warm(
        train, 2, "groups", {"mesh": {"tp": 2}, "plan": plan}
    ):
        assert worst == pytest.approx(0, abs=1e-6)
        assert said == []
        assert set(calls) == {"all_reduce"}
        assert shapes["layers.0.self_attn.query_key_value.weight"] == [16, WIDTH]
        assert shapes["embed.weight"] == [16, WIDTH]
        assert shapes["head.bias"] == [16]


def test_own_rules_come_before_a_plan_that_stands_after_them():
    plan = [{"match": "layers.1.mlp.*", "out": ["..."]}, "auto_tp"]
    for worst, _, _, shapes in run_warm(train, 2, "grouped", {"mesh": {"tp": 2}, "plan": plan}):
        assert worst == pytest.approx(0, abs=1e-6)
        assert shapes["layers.0.mlp.one.weight"] == [16, WIDTH]
        assert shapes["layers.1.mlp.one.weight"] == [32, WIDTH]


def told(make, config):
    """Return what `rt.shard` prints on rank 0, or its refusal."""
    import contextlib
    import io

    rt = msrun.init(config)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            rt.shard(make())
        except UsageError as error:
            return str(error)
    return out.getvalue()


def odd():
    return Language(lambda: Attention(key_heads=1), lambda: FeedForward(30))


def test_what_does_not_divide_stays_whole_and_is_named():
    found = run_warm(told, 2, odd, {"mesh": {"tp": 2}, "plan": "llama"})
    names = ", ".join(f"layers.0.self_attn.{part}_proj" for part in "qkv")

    assert found[0].splitlines() == [
        "msrun: llama shards over tp 2: 1 embedding, 1 vocab",
        f"msrun: llama leaves whole: {names} and 5 more: 1 heads do not divide by 2",
    ]


def narrow():
    return nn.Linear(3, 5)


def test_a_model_in_which_nothing_divides_is_refused():
    found = run_warm(told, 2, narrow, {"mesh": {"tp": 2}, "plan": "auto_tp"})

    assert found[0].startswith("parallel.plan: auto_tp finds nothing in Linear to shard over tp 2")


class Sizes:
    num_attention_heads = 3


class SmallMLP(nn.Module):
    """Has the configuration of the model, as modules of transformers do."""

    def __init__(self):
        super().__init__()
        self.config = Sizes()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Mixer(SmallMLP):
    pass


class OwnPlan(nn.Module):
    def __init__(self, kind, styles):
        super().__init__()
        self.inner = kind()
        self._tp_plan = {f"inner.{name}": style for name, style in styles.items()}

    def forward(self, x):
        return self.inner(x)


def mlp_with_plan():
    return OwnPlan(SmallMLP, {"up": "colwise", "down": "rowwise"})


def mixer_with_plan():
    return OwnPlan(Mixer, {"down": "rowwise"})


@pytest.mark.parametrize(
    ("make", "styles"), [(mlp_with_plan, "1 colwise, 1 rowwise"), (mixer_with_plan, "1 rowwise")]
)
def test_heads_of_a_model_divide_its_attention_alone(make, styles):
    found = run_warm(told, 2, make, {"mesh": {"tp": 2}, "plan": "auto_tp"})

    assert found[0].splitlines() == [f"msrun: auto_tp shards over tp 2: {styles}"]


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.utils.spectral_norm(nn.Linear(WIDTH, 32))  # the older one, by a hook
        self.down = nn.Linear(32, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).relu())


def test_a_computed_weight_is_refused_by_name():
    plan = [{"match": "up", "style": "colwise"}]

    assert run_warm(told, 2, Normed, {"mesh": {"tp": 2}, "plan": plan})[0].startswith(
        "parallel.plan[0].style: colwise of up (Linear), which computes its weight "
        "from other parameters"
    )


class NormedPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 32))
        self.down = nn.utils.parametrizations.weight_norm(nn.Linear(32, WIDTH))

    def forward(self, x):
        return self.down(self.up(x).relu())


def test_computed_weights_are_sharded_by_plans_that_ship():
    found = run_warm(told, 2, NormedPair, {"mesh": {"tp": 2}, "plan": "auto_tp"})

    assert found[0].splitlines() == ["msrun: auto_tp shards over tp 2: 1 colwise, 1 rowwise"]


# Of each layer: two of lora_B backward, one of lora_A forward, and one since the query's lora_B
# stands between query and key, which then do not share their input.
CALLS["lora"] = 13 + 2 * 4


@pytest.mark.parametrize(
    "plan",
    [
        "auto_tp",
        [
            {"match": "*.[qkv]_proj", "style": "colwise"},
            {"match": "*.o_proj", "style": "rowwise"},
        ],
    ],
)
def test_a_lora_layer_is_sharded_with_its_adapters(plan):
    for worst, calls, said, shapes in run_warm(lora, 2, plan):
        assert worst == pytest.approx(0, abs=1e-6)
        assert said == []
        assert set(calls) == {"all_reduce"}
        assert shapes["layers.0.self_attn.q_proj.base_layer.weight"] == [8, WIDTH]
        assert shapes["layers.0.self_attn.q_proj.lora_B.default.weight"] == [8, 2]
        assert shapes["layers.0.self_attn.q_proj.lora_A.default.weight"] == [2, WIDTH]
        assert shapes["layers.0.self_attn.o_proj.lora_A.default.weight"] == [2, 8]


def lora(plan):
    return train("lora", {"mesh": {"tp": 2}, "plan": plan})


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        (
            {"plan": "mixtrall"},
            "parallel.plan: 'mixtrall' is no plan (did you mean mixtral? choose auto_tp, bart, ",
        ),
        ({"plan": ["xyz"]}, "parallel.plan[0]: 'xyz' is no plan (choose auto_tp, "),
        (
            {"mode": "auto", "plan": "llama"},
            "parallel.plan[0]: mode auto finds a plan, not llama (choose semi_auto)",
        ),
        (
            {"plan": [{"match": "a", "style": "rowwise", "parts": 3}]},
            "parallel.plan[0].parts: belongs to style colwise",
        ),
    ],
)
def test_a_wrong_name_is_one_sentence(tree, sentence):
    with pytest.raises(ConfigError) as caught:
        parse_config(tree)

    assert caught.value.message.startswith(sentence)


def test_a_path_is_no_name():
    assert parse_config({"plan": "plans/llama.json"}).plan == "plans/llama.json"
    assert parse_config({"plan": "llama"}).plan == ["llama"]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        # Three heads in two parts, and query, key and value taken for one.
        ("grouped", {"match": "layers.*.[qkvo]_proj", "style": "colwise"}),
        ("fused", {"match": "layers.*.qkv", "style": "colwise"}),
        ("unflat", {"match": "layers.*.qkv", "style": "colwise"}),
        ("unflat", {"match": "layers.*.qkv", "style": "colwise", "parts": 3}),
    ],
)
def test_heads_that_do_not_divide_are_computed_whole(name, rule):
    config = {"mesh": {"tp": 2}, "plan": [rule]}
    for worst, _, said, _ in run_warm(train, 2, name if name != "grouped" else "three", config):
        assert worst == pytest.approx(0, abs=1e-6)
        assert bool(said) == (rule.get("parts") is None)


def strategy(path):
    config = {"dir": path, "strategy": f"{path}/layout.json"}
    rt = msrun.init({"mesh": {"tp": 2}, "plan": "auto_tp", "checkpoint": config})
    with pytest.raises(UsageError) as caught:
        rt.shard(build("fused"))
    return caught.value.message


def test_a_strategy_file_cannot_tell_packed_parameters(tmp_path):
    assert run_warm(strategy, 2, str(tmp_path))[0] == (
        "parallel.checkpoint.strategy: layers.0.self_attn.qkv.weight packs several projections in "
        "one dim, which a strategy file cannot say"
    )
