"""Plans by name on small models as people write them: what is sharded, what stays whole, why."""

import copy
import warnings

import pytest
import torch
from ranks import Counted, run_warm
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import msrun
from msrun.errors import ConfigError, UsageError
from msrun.parallel.config_file import parse_config
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch

WIDTH = 16


class Attention(nn.Module):
    """Attention with members of Llama's names; two heads of keys for four of queries."""

    def __init__(self, heads=4, key_heads=2):
        super().__init__()
        self.head_dim, self.num_heads, self.num_key_value_heads = 4, heads, key_heads
        self.q_proj = nn.Linear(WIDTH, heads * 4)
        self.k_proj = nn.Linear(WIDTH, key_heads * 4)
        self.v_proj = nn.Linear(WIDTH, key_heads * 4)
        self.o_proj = nn.Linear(heads * 4, WIDTH)

    def forward(self, x):
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (
            part(x).view(shape).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        half = self.head_dim // 2
        q = q + torch.cat((-q[..., half:], q[..., :half]), -1)
        k = torch.cat([k[:, :, :1], k[:, :, 1:]], 2)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1).contiguous())


class FusedAttention(nn.Module):
    """Query, key and value in one weight, as vision transformers have it."""

    def __init__(self, heads=4):
        super().__init__()
        self.num_heads, self.head_dim = heads, WIDTH // heads
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Conv1D(nn.Module):
    """A linear layer with its weight as (in, out), as GPT-2 has it."""

    def __init__(self, columns, rows):
        super().__init__()
        self.nf = columns
        self.weight = nn.Parameter(torch.randn(rows, columns) * 0.2)
        self.bias = nn.Parameter(torch.randn(columns) * 0.2)

    def forward(self, x):
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view(*x.size()[:-1], self.nf)


class ConvAttention(nn.Module):
    """Query, key and value are split off one output."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.split_size = 4, WIDTH
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)

    def forward(self, x):
        parts = self.c_attn(x).split(self.split_size, dim=2)
        q, k, v = (part.view(*x.shape[:-1], -1, 4).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1).contiguous())


class FeedForward(nn.Module):
    """Members of no known name."""

    def __init__(self, inside=32):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, inside), nn.Linear(WIDTH, inside)
        self.three = nn.Linear(inside, WIDTH)

    def forward(self, x):
        return self.three(functional.silu(self.one(x)) * self.two(x))


class GroupExperts(nn.Module):
    """Experts in 3-D parameters; every token goes to the expert of its largest score."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 16, WIDTH) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(2, WIDTH, 8) * 0.2)

    def forward(self, x, index, weight):
        out = torch.zeros_like(x)
        for expert in range(2):
            (rows,) = torch.where(index == expert)
            gate, up = functional.linear(x[rows], self.gate_up_proj[expert]).chunk(2, -1)
            y = functional.linear(functional.silu(gate) * up, self.down_proj[expert])
            out.index_add_(0, rows, y * weight[rows, None])
        return out


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), GroupExperts()

    def forward(self, x):
        rows = x.reshape(-1, WIDTH)
        weight, index = self.gate(rows).softmax(-1).max(-1)
        return self.experts(rows, index, weight).view_as(x)


class ScaledEmbedding(nn.Embedding):
    """Multiplies what it looks up, as Gemma's does."""

    def forward(self, tokens):
        return super().forward(tokens) * 3.0


class Layer(nn.Module):
    def __init__(self, attention, feed_forward):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attn, self.mlp = attention, feed_forward

    def forward(self, x):
        x = x + self.self_attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    """A language model with a scaled embedding, which is its head."""

    def __init__(self, make=Attention, feed_forward=FeedForward, layers=2):
        super().__init__()
        self.embed = ScaledEmbedding(32, WIDTH)
        self.layers = nn.ModuleList([Layer(make(), feed_forward()) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.2)

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MODELS = {
    "grouped": Language,
    "fused": lambda: Language(FusedAttention),
    "conv1d": lambda: Language(ConvAttention),
    "experts": lambda: Language(Attention, Mixture),
}


def token_loss(logits, target):
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def build(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return MODELS[name]()


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


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = parametrizations.weight_norm(nn.Linear(WIDTH, 32))
        self.down = nn.Linear(32, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).relu())


def test_a_computed_weight_is_refused_by_name():
    plan = [{"match": "up", "style": "colwise"}]

    assert run_warm(told, 2, Normed, {"mesh": {"tp": 2}, "plan": plan})[0].startswith(
        "parallel.plan[0].style: colwise of up (ParametrizedLinear), which computes its weight "
        "from other parameters"
    )


class Adapted(nn.Module):
    """A layer of LoRA: the sum of a frozen one and of two small ones."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(requires_grad=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * 2.0


def adapted():
    model = Language()
    for layer in model.layers:
        for name in ("q_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    return model


MODELS["lora"] = adapted
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
