"""Small models as people write them, for tests of plans by name."""

import torch
from torch import nn
from torch.nn import functional

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


class UnflattenedAttention(FusedAttention):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        y = functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.proj(y.transpose(1, 2).flatten(2))


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


def unflattened():
    return Language(UnflattenedAttention, layers=1)


def three():
    return Language(lambda: Attention(3, 3), layers=1)


class GroupedAttention(nn.Module):
    """Groups of two queries, a key and a value in one weight, as Falcon has it."""

    def __init__(self, heads=4, groups=2):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, groups, WIDTH // heads
        self.query_key_value = nn.Linear(WIDTH, (heads + 2 * groups) * self.head_dim)
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        size = self.num_heads // self.num_kv_heads
        parts = self.query_key_value(x).view(*x.shape[:2], -1, size + 2, self.head_dim)
        query = parts[..., :-2, :]
        key, value = (
            torch.broadcast_to(parts[..., [at], :], query.shape).flatten(2, 3) for at in (-2, -1)
        )
        heads = (part.transpose(1, 2) for part in (query.flatten(2, 3), key, value))
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.dense(y.transpose(1, 2).reshape(x.shape))


class ParallelLayer(Layer):
    """Adds attention to the output of its other half in place, as Falcon does."""

    def forward(self, x):
        y = self.mlp(self.norm2(x))
        y += self.self_attn(self.norm1(x))
        return x + y


class Scores(nn.Module):
    """Has the bias of its head under a second name, as BERT has it."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 32)
        self.bias = nn.Parameter(torch.randn(32) * 0.2)
        self.head.bias = self.bias

    def forward(self, x):
        return self.head(x)


class GroupedLanguage(Language):
    """Says of no module that it is the head, which its embedding and `Scores` share."""

    def __init__(self):
        super().__init__()
        layers = [ParallelLayer(GroupedAttention(), FeedForward()) for _ in range(2)]
        self.layers, self.head = nn.ModuleList(layers), Scores()
        self.head.head.weight = self.embed.weight

    def get_output_embeddings(self):
        return None

    def forward(self, tokens):
        x = self.embed(tokens)
        x += x.mean(1, keepdim=True).detach()  # in place, as BLIP adds its positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MODELS = {
    "grouped": Language,
    "fused": lambda: Language(FusedAttention),
    "conv1d": lambda: Language(ConvAttention),
    "experts": lambda: Language(Attention, Mixture),
    "lora": adapted,
}
OTHERS = {
    "groups": GroupedLanguage,
    # Of which heads do not divide.
    "unflat": unflattened,
    "three": three,
}


def token_loss(logits, target):
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def build(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return {**MODELS, **OTHERS}[name]()
