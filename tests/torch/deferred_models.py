"""Models that their constructors build in many ways, with memory and without."""

from __future__ import annotations

import copy
import math
import warnings

import torch
from ranks import MLP, ConvNet, Transformer, build
from torch import nn
from torch.nn import Parameter, init

from msrun.parallel.deferred.fill import fill, find
from msrun.parallel.deferred.init import DeferredInit
from msrun.parallel.local import is_sharded

CPU = torch.device("cpu")


def tensors(model):
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def deferred(make, seed=3):
    torch.manual_seed(seed)
    with DeferredInit():
        return make()


def filled(model):
    fill(model, find(model), CPU)
    return model


def plain(make, seed=3):
    torch.manual_seed(seed)
    return make(), torch.get_rng_state()


def assert_equal_bits(model, expected):
    wanted = tensors(expected)
    assert tensors(model).keys() == wanted.keys()
    for name, tensor in tensors(model).items():
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor
        assert whole.dtype == wanted[name].dtype, name
        assert whole.requires_grad == wanted[name].requires_grad, name
        assert torch.equal(whole, wanted[name]), name


def initialized(change):
    """Return what builds a model whose weights are all initialized a second time."""

    def change_module(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            change(module.weight)
        if isinstance(module, nn.Linear) and module.bias is not None:
            init.zeros_(module.bias)

    return lambda: Transformer().apply(change_module)


def with_old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(4, 5))


def loaded():
    model, other = MLP(), MLP()
    model.load_state_dict(other.state_dict())
    return model


class Scaled(nn.Module):
    """Changes all weights once more when all are there."""

    def __init__(self, cast=None):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        with torch.no_grad():
            for layer in self.layers:
                layer.weight[1:3].normal_()
                layer.weight /= layer.weight.norm()
        if cast:
            self.to(cast)


MODELS = {
    "mlp": MLP,
    "conv": ConvNet,
    "tied transformer": Transformer,
    "attention": lambda: nn.MultiheadAttention(16, 4, add_bias_kv=True, kdim=8),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, batch_first=True), num_layers=2
    ),
    "lstm": lambda: nn.LSTM(4, 8, num_layers=2, bidirectional=True),
    "embedding": lambda: nn.Embedding(10, 4, padding_idx=2),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)),
    "old weight norm": with_old_weight_norm,
    "orthogonal parametrization": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 5)),
    "normal": initialized(lambda weight: init.normal_(weight, std=0.02)),
    "truncated": initialized(lambda weight: init.trunc_normal_(weight, std=0.02)),
    "truncated and rejected": initialized(lambda w: init.trunc_normal_(w, std=0.1, a=-0.1, b=0.1)),
    "orthogonal": initialized(init.orthogonal_),
    "kaiming": initialized(init.kaiming_normal_),
    "sparse": initialized(lambda weight: init.sparse_(weight, 0.3)),
    "own generator": initialized(
        lambda weight: init.normal_(weight, generator=torch.Generator().manual_seed(5))
    ),
    "scaled": Scaled,
    "cast": lambda: Scaled(torch.bfloat16),
    "moved": lambda: Scaled().to("cpu").to(CPU, torch.float64),
    "seeded inside": lambda: nn.ModuleList([MLP(), build("conv"), MLP()]),
    "copied": lambda: copy.deepcopy(MLP()),
    "loaded": loaded,
}


OUTSIDE = torch.arange(12.0).view(4, 3)


def sinusoids():
    table, places = torch.zeros(20, 8), torch.arange(20.0).unsqueeze(1)
    rates = torch.exp(torch.arange(0, 8, 2).float() * (-math.log(1e4) / 8))
    table[:, 0::2] = torch.sin(places * rates)
    table[:, 1::2] = torch.cos(places * rates)
    return table.unsqueeze(0).transpose(0, 1)


def rotations():
    rates = torch.outer(torch.arange(6), 1e4 ** -(torch.arange(0, 8, 2)[:4].float() / 8))
    return torch.polar(torch.ones_like(rates), rates).conj()


def edited():
    table = torch.zeros(4, 3)
    table[0] = 1.0
    table[[1, 2]] = torch.rand(2, 3)
    table[table > 0.5] = -1.0
    return table.t()


def forked():
    before = torch.rand(3)
    with torch.random.fork_rng():
        torch.manual_seed(9)
        inside = torch.rand(3)
    return before + inside + torch.rand(3)


def two_generators():
    one, other = (torch.Generator().manual_seed(1) for _ in range(2))
    return torch.stack([torch.rand(3, generator=g) for g in (one, other, one, one, other)])


def onto_itself():
    table = torch.rand(3, 4)
    torch.mul(table, 2, out=table)
    table.copy_(table)
    return table.add_(table)


def in_double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return torch.rand(3)
    finally:
        torch.set_default_dtype(before)


BUFFERS = {
    "mask": lambda: torch.full((5, 5), -torch.inf).triu(1)[None],
    "sinusoids": sinusoids,
    "rotations": rotations,
    "edited": edited,
    "forked": forked,
    "two generators": two_generators,
    "onto itself": onto_itself,
    "in double": in_double,
    "expanded": lambda: torch.arange(7).expand((2, -1)),
    "from Python": lambda: torch.tensor([[1.0, 2.0]]) * torch.as_tensor(3) + torch.Tensor([1, 2]),
    "from numpy": lambda: torch.from_numpy(torch.arange(6.0).view(2, 3).numpy().T.copy()),
    "from outside": lambda: OUTSIDE[1:] * 2 + OUTSIDE.clone()[:3],
    "to Python": lambda: torch.tensor([x.item() for x in torch.linspace(0, 1, 6)]),
    "to a list": lambda: torch.tensor([*torch.rand(3).tolist(), torch.rand(1)[0]]),
    "asked for a random number": lambda: torch.full((2,), float(torch.rand(3)[1])),
    "of unknown size": lambda: torch.rand(20).gt(0.5).nonzero(),
    "asked where it is": lambda: torch.ones(2) if torch.ones(1).is_cpu else torch.zeros(3),
    "on the same device": lambda: torch.rand(3, device=torch.rand(1).device),
    "of new tensors": lambda: torch.rand(3).new_tensor([1.0, 2.0]) + torch.rand(2).new_ones(2),
    "drawn by values": lambda: torch.bernoulli(torch.rand(9)) + torch.multinomial(torch.rand(9), 9),
    "svd": lambda: torch.linalg.svd(torch.rand(4, 3))[0],
    "no meta kernel": lambda: torch.full((2,), float(torch.equal(torch.ones(2), torch.ones(2)))),
}


class Holder(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.register_buffer("buffer", make())
        self.drawn = Parameter(torch.rand(3))
