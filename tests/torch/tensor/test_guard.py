"""Each function that runs on parts gives what it gives on the whole, gradients included."""

import warnings

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

import msrun
from msrun.errors import UsageError
from msrun.parallel.tensor.guard import VERIFIED, Guard

pytestmark = pytest.mark.torch

SHAPE = (4, 6, 8)
# How a function is called on a tensor of SHAPE: one call a name, or several.
CALLS = {
    "abs": torch.abs,
    "add": lambda x: torch.add(x, x, alpha=2),
    "add_": lambda x: (x * 1).add_(x),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "bfloat16": lambda x: x.bfloat16().float(),
    "cos": torch.cos,
    "div": lambda x: torch.div(x, 3.0),
    "div_": lambda x: (x * 1).div_(3.0),
    "elu": functional.elu,
    "erf": torch.erf,
    "exp": torch.exp,
    "float": lambda x: x.float(),
    "gelu": lambda x: functional.gelu(x) + functional.gelu(x, approximate="tanh"),
    "half": lambda x: x.half().float(),
    "hardtanh": functional.hardtanh,
    "leaky_relu": functional.leaky_relu,
    "log": lambda x: torch.log(x.abs() + 1),
    "log1p": lambda x: torch.log1p(x.abs()),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.5),
    "mul": lambda x: torch.mul(x, x),
    "mul_": lambda x: (x * 1).mul_(2.0),
    "neg": torch.neg,
    "pow": lambda x: torch.pow(x, 3),
    "reciprocal": lambda x: torch.reciprocal(x.abs() + 1),
    "relu": functional.relu,
    "relu_": lambda x: (x * 1).relu_(),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "rsub": lambda x: torch.rsub(x, 1.0),
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "sin": torch.sin,
    "softplus": functional.softplus,
    "sqrt": lambda x: torch.sqrt(x.abs() + 1),
    "square": torch.square,
    "sub": lambda x: torch.sub(x, 1.0),
    "sub_": lambda x: (x * 1).sub_(1.0),
    "tanh": torch.tanh,
    "to": lambda x: x.to(torch.float64).to(torch.float32),
    "true_divide": lambda x: torch.true_divide(x, 2.0),
    "type_as": lambda x: x.type_as(x),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "__add__": lambda x: x + x,
    "__iadd__": lambda x: add_in_place(x * 1, x),
    "__imul__": lambda x: multiply_in_place(x * 1, x),
    "__isub__": lambda x: subtract_in_place(x * 1, x * 2),
    "__mul__": lambda x: x * x,
    "__neg__": lambda x: -x,
    "__pow__": lambda x: x**2,
    "__radd__": lambda x: 1 + x,
    "__rmul__": lambda x: 2 * x,
    "__rpow__": lambda x: 2**x,
    "__rsub__": lambda x: 1 - x,
    "__rtruediv__": lambda x: 1 / (x.abs() + 1),
    "__sub__": lambda x: x - x * 3,
    "__truediv__": lambda x: x / (x.abs() + 1),
    "chunk": lambda x: torch.cat([part * 2 for part in x.chunk(2, -1)], -1),
    "clone": torch.clone,
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "detach": lambda x: x + x.detach(),
    "broadcast_to": lambda x: torch.broadcast_to(x.unsqueeze(0), (3, *SHAPE)),
    "expand": lambda x: x.unsqueeze(0).expand(3, *SHAPE),
    "flatten": lambda x: x.flatten(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "reshape": lambda x: x.reshape(4, 6, 2, 4),
    "split": lambda x: x.split(4, -1)[1],
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "t": lambda x: x.flatten(0, 1).t(),
    "transpose": lambda x: x.transpose(1, -1),
    "unflatten": lambda x: x.unflatten(-1, (2, 4)),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "view": lambda x: x.view(4, 6, 4, 2).view(4, 6, 8),
    "view_as": lambda x: x.view_as(x),
    "addmm": lambda x: torch.addmm(WEIGHT[0], x.flatten(0, 1), WEIGHT),
    "bmm": lambda x: torch.bmm(x, x.transpose(1, 2)),
    "layer_norm": lambda x: functional.layer_norm(x, (8,)),
    "linear": lambda x: functional.linear(x, WEIGHT),
    "matmul": lambda x: torch.matmul(x, WEIGHT),
    "mean": lambda x: x.mean(-1) + x.mean(),
    "softmax": lambda x: functional.softmax(x, dim=-1) + x.softmax(1),
    "sum": lambda x: x.sum(1),
    "__matmul__": lambda x: x @ WEIGHT,
    # On each rank's shard, unless a sharded dim takes part.
    "__getitem__": lambda x: (
        x[:, 1] + x[:, None, -1, :][:, 0] + x[..., 0, :] + x[:, 1:2].sum(1) + x[:, [-1, 0]].sum(1)
    ),
    "unbind": lambda x: sum(x.unbind(1)) + sum(torch.unbind(x.transpose(0, 1))),
    "split in two sizes": lambda x: x.split([2, 4], 1)[1],
    "cat of rows": lambda x: torch.cat((x, x * 2)),
    # Not on the list: torch has them wrong, or not at all, so they run whole.
    "cumsum": lambda x: torch.cumsum(x, dim=-1),
    "unfold": lambda x: x.unfold(-1, 3, 1),
    "roll": lambda x: torch.roll(x, 1, -1),
    "cat": lambda x: torch.cat([x, x * 2], dim=1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "conv2d": lambda x: functional.conv2d(x.unsqueeze(1), FILTER, padding=1),
    "conv2d of channels": lambda x: functional.conv2d(x.unsqueeze(0), FILTERS, stride=2),
    "conv_transpose2d": lambda x: functional.conv_transpose2d(
        x.unsqueeze(1), FILTER.transpose(0, 1)
    ),
    "max_pool2d": lambda x: functional.max_pool2d(x.unsqueeze(0), 2),
    "avg_pool2d": lambda x: functional.avg_pool2d(x, 3, 1, 1),
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "instance_norm": functional.instance_norm,
    "group_norm": lambda x: functional.group_norm(x, 3),
    "cdist": lambda x: torch.cdist(x, x * 0.5),
    "nonzero": lambda x: x * len(torch.nonzero(x)),
    # They draw, so each rank must have the numbers of the whole.
    "dropout": lambda x: functional.dropout(x, 0.5),
    "dropout2d": lambda x: functional.dropout2d(x.unsqueeze(0), 0.5),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.5, training=True),
    "rand_like": lambda x: x * torch.rand_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "conv1d": lambda x: functional.conv1d(x, KERNEL, padding=1),
    "max_pool1d": lambda x: functional.max_pool1d(x, 2),
    "log_softmax": lambda x: functional.log_softmax(x, -1),
    # Their results stay unused: what counts is what they wrote.
    "clamp_": lambda x: written(x, lambda y: y.clamp_(min=0)),
    "copy_": lambda x: written(x, lambda y: y.copy_(x[0] * 2)),
    "masked_fill_": lambda x: written(x, lambda y: y.masked_fill_(y > 0, 0.5)),
    "__setitem__": lambda x: written(x, lambda y: y.__setitem__((slice(None), 0), 0.5)),
    "dropout in place": lambda x: written(x, lambda y: functional.dropout(y, 0.5, inplace=True)),
    "relu in place": lambda x: written(x, lambda y: functional.relu(y, inplace=True)),
    "hardtanh in place": lambda x: written(x, lambda y: functional.hardtanh(y, inplace=True)),
    # A sum that is still pending must not be taken for the whole.
    "item": lambda x: x * x.sum().item(),
    "einsum": lambda x: torch.einsum("bsd,bsd->bd", x, x),
}
OF_HEADS = {"gradients of two layouts": lambda x: add_relative(x.view(4, 6, 4, 2))}
# Of integers, so it has a test of its own.
APART = {"embedding"}
WEIGHT = torch.linspace(-1, 1, 64).view(8, 8)
KERNEL = torch.linspace(-1, 1, 6 * 6 * 3).view(6, 6, 3)
FILTER = torch.linspace(-1, 1, 2 * 3 * 3).view(1, 2, 3, 3).transpose(0, 1).contiguous()
PLACES = torch.linspace(-1, 1, 72).view(6, 2, 6)
FILTERS = torch.linspace(-1, 1, 2 * 4 * 3 * 3).view(2, 4, 3, 3)


def written(x, write):
    y = x * 1
    write(y)
    return y


def add_relative(x):
    """Return the scores of heads, with those of places, as SpeechT5 has them."""
    heads = x.transpose(1, 2).reshape(16, 6, 2)
    scores = torch.bmm(heads, heads.detach().transpose(1, 2))
    places = heads.contiguous().view(16, 6, 2).transpose(0, 1) @ PLACES
    return scores + places.transpose(0, 1)


def add_in_place(x, y):
    x += y
    return x


def subtract_in_place(x, y):
    x -= y
    return x


def multiply_in_place(x, y):
    x *= y
    return x


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def sweep(cuts, *, is_of_heads=False):
    """Return the name and cut of every call that is wrong, and what was said of the others."""
    runtime = msrun.init({"mesh": {"tp": -1}, "mode": "manual"})
    mesh = runtime.mesh["tp"]
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    wrong, told = [], set()
    for name, call in (OF_HEADS if is_of_heads else CALLS).items():
        plain = x.clone().requires_grad_()
        torch.manual_seed(2)
        expected = call(plain)
        (expected.square().sum()).backward()
        for placement in cuts:
            part = distribute_tensor(x, mesh, [placement], src_data_rank=None).requires_grad_()
            with warnings.catch_warnings(record=True) as caught, Guard(mesh):
                warnings.simplefilter("always")
                torch.manual_seed(2)
                try:
                    found = call(part)
                    whole(found.square().sum()).backward()
                except (NotImplementedError, RuntimeError) as error:
                    wrong.append(f"{name} {placement}: {error}")
                    continue
            told |= {str(w.message) for w in caught if "msrun:" in str(w.message)}
            for one, other in ((whole(found), expected), (whole(part.grad), plain.grad)):
                if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-5, atol=1e-6):
                    wrong.append(f"{name} {placement}")
    return wrong, told


def test_every_function_on_the_list_has_a_call():
    assert set(CALLS) >= VERIFIED - APART


def test_functions_on_parts_are_right_and_others_run_whole():
    for wrong, told in run_warm(sweep, 2, (Replicate(), Shard(0), Shard(1), Shard(2))):
        assert wrong == []
        whole = {text.split()[1] for text in told if "computed whole" in text}
        gathered = {text.split()[-1] for text in told if "gathers" in text}
        assert whole >= {"cumsum", "unfold", "roll", "conv1d", "conv2d", "cdist", "nonzero"}
        assert whole.isdisjoint(VERIFIED)
        assert {"softmax", "layer_norm"} <= gathered <= VERIFIED


def test_a_view_has_its_gradient_however_its_parts_lie():
    for wrong, _ in run_warm(of_heads, 2):
        assert wrong == []


def of_heads():
    return sweep((Shard(2),), is_of_heads=True)


def test_uneven_parts_are_right_or_refused():
    # A plan makes no such parts, but a view may: 4 and 8 in three.
    for wrong, _ in run_warm(sweep, 3, (Shard(0), Shard(2))):
        assert [entry for entry in wrong if "uneven" not in entry] == []


def written_plain():
    """Return what is wrong of plain tensors and outputs into which parts are written."""
    runtime = msrun.init({"mesh": {"tp": -1}, "mode": "manual"})
    mesh = runtime.mesh["tp"]
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    wrong = []
    for placement in (Replicate(), Shard(0), Shard(2)):
        part = distribute_tensor(x.clone(), mesh, [placement], src_data_rank=None).requires_grad_()
        with warnings.catch_warnings(), Guard(mesh):
            warnings.simplefilter("ignore")
            added, other = torch.ones(SHAPE), torch.ones(SHAPE)
            alias = other
            added.add_(part)
            other *= part
            sums = torch.zeros_like(part.detach())
            torch.cumsum(part.detach(), -1, out=sums)
            (added.square() + alias).sum().backward()
            with torch.no_grad():
                part.clamp_(min=0)
        expected = ((added, x + 1), (alias, x), (whole(part.grad), 2 * (x + 1) + 1))
        expected += ((whole(sums), x.cumsum(-1)), (whole(part), x.clamp(min=0)))
        wrong += [
            f"{index} {placement}"
            for index, (found, right) in enumerate(expected)
            if not torch.allclose(found, right, atol=1e-6)
        ]
    return wrong


def test_what_is_written_is_what_others_see():
    assert run_warm(written_plain, 2) == [[], []]


def reshaped():
    runtime = msrun.init({"mesh": {"tp": -1}, "mode": "manual"})
    mesh = runtime.mesh["tp"]
    part = distribute_tensor(torch.ones(2, 4), mesh, [Shard(1)], src_data_rank=None)
    with pytest.raises(UsageError) as caught, Guard(mesh):
        part.unsqueeze_(0)
    return caught.value.message


def test_a_new_shape_in_place_is_refused():
    sentence = "unsqueeze_ changes the shape of a divided tensor in place, from [2, 4] to [1, 2, 4]"
    assert run_warm(reshaped, 2) == [sentence, sentence]


def embedded():
    runtime = msrun.init({"mesh": {"tp": -1}, "mode": "manual"})
    mesh = runtime.mesh["tp"]
    torch.manual_seed(0)
    table, ids = torch.randn(8, 6), torch.randint(0, 8, (4, 6))
    wrong = []
    plain = table.clone().requires_grad_()
    functional.embedding(ids, plain).square().sum().backward()
    for rows in (Replicate(), Shard(0), Shard(1)):
        for cut in (Replicate(), Shard(0), Shard(1)):
            weight = distribute_tensor(table, mesh, [rows], src_data_rank=None).requires_grad_()
            index = distribute_tensor(ids, mesh, [cut], src_data_rank=None)
            with Guard(mesh):
                found = functional.embedding(index, weight)
                whole(found.square().sum()).backward()
            same = torch.allclose(whole(found), functional.embedding(ids, table))
            if not same or not torch.allclose(whole(weight.grad), plain.grad):
                wrong.append(f"{rows} {cut}")
    return wrong


def test_embedding():
    assert run_warm(embedded, 2) == [[], []]


def attended():
    """Return what is wrong of attention by heads, by batch, by sequence, masked and dropped."""
    runtime = msrun.init({"mesh": {"tp": -1}, "mode": "manual"})
    mesh = runtime.mesh["tp"]
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    mask = torch.rand(2, 4, 6, 6) > 0.2
    wrong = []
    bias = torch.randn(1, 4, 6, 6)
    for options in (
        {},
        {"is_causal": True},
        {"attn_mask": mask},
        {"attn_mask": mask[:, :1]},
        {"attn_mask": bias},
        {"attn_mask": bias[0, 0], "scale": 0.3},
        {"dropout_p": 0.5},
        {"dropout_p": 0.5, "attn_mask": mask[:1], "scale": 0.3},
        {"dropout_p": 0.5, "is_causal": True},
    ):
        for placement in (Replicate(), Shard(0), Shard(1), Shard(2), Shard(3)):
            torch.manual_seed(9)
            inputs = [t.clone().requires_grad_() for t in (q, k, v)]
            expected = functional.scaled_dot_product_attention(*inputs, **options)
            expected.square().sum().backward()
            torch.manual_seed(9)
            parts = [
                distribute_tensor(t, mesh, [placement], src_data_rank=None).requires_grad_()
                for t in (q, k, v)
            ]
            with warnings.catch_warnings(), Guard(mesh):
                warnings.simplefilter("ignore")
                found = functional.scaled_dot_product_attention(*parts, **options)
                whole(found.square().sum()).backward()
            pairs = [
                (found, expected),
                *((p.grad, i.grad) for p, i in zip(parts, inputs, strict=True)),
            ]
            if not all(torch.allclose(whole(a), b, atol=1e-5) for a, b in pairs):
                wrong.append(f"{list(options)} {placement}")
    return wrong


def test_attention():
    assert run_warm(attended, 2) == [[], []]


def mixed():
    """Run a module that no rule names between two that have one."""
    runtime = msrun.init(
        {
            "mesh": {"tp": 2},
            "plan": [{"match": "0", "style": "colwise"}, {"match": "2", "style": "rowwise"}],
        }
    )
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    expected = network(x)
    expected.square().sum().backward()
    gradients = [param.grad.clone() for param in network.parameters()]
    network.zero_grad()
    network = runtime.shard(network)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        network(x)
        found = network(x)
    found.square().sum().backward()
    is_right = torch.allclose(found, expected, atol=1e-6) and all(
        torch.allclose(whole(param.grad), gradient, atol=1e-5)
        for param, gradient in zip(network.parameters(), gradients, strict=True)
    )
    return is_right, [str(warning.message) for warning in caught]


def test_a_module_without_a_rule_may_stand_between_two_with_one_and_what_it_gathers_is_said_once():
    said = ["msrun: torch gathers what is divided for layer_norm"]

    assert run_warm(mixed, 2) == 2 * [(True, said)]
