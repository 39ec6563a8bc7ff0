"""Each function that runs on parts gives what it gives on the whole, gradients included."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from function_calls import APART, CALLS, OF_HEADS, SHAPE, SYNONYMS
from ranks import run_warm
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

import msrun
from msrun.errors import UsageError
from msrun.parallel.tensor.guard import ON_SHARDS, VERIFIED, Guard

pytestmark = pytest.mark.torch


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def sweep(placement, *, is_of_heads=False):
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


def test_the_documentation_names_every_function_that_runs_on_shards():
    page = Path(__file__).parents[3] / "docs" / "parallel.md"
    table = page.read_text().partition("What runs on shards")[2].partition("\n\n## ")[0]
    named = set(re.findall(r"`(\w+)`", table))
    # Of several numbers of dims, the first and the last are named.
    shown = {re.sub(r"[123]d(_with_indices)?$", "1d", name) for name in ON_SHARDS | VERIFIED}

    assert {name for name in shown if not name.endswith("_")} <= named


def test_every_function_that_runs_on_each_shard_has_a_call():
    of_torch = ON_SHARDS
    called = {name.partition(" ")[0] for name in CALLS}
    assert called >= of_torch - SYNONYMS


ALL = (Replicate(), Shard(0), Shard(1), Shard(2))


@pytest.mark.parametrize("cuts", [ALL[::3], pytest.param(ALL, marks=pytest.mark.slow)])
def test_functions_on_parts_are_right_and_others_run_whole(cuts):
    whole, gathered = set(), set()
    for cut in cuts:
        for wrong, told in run_warm(sweep, 2, cut):
            assert wrong == []
            whole |= {text.split()[1] for text in told if "computed whole" in text}
            gathered |= {text.split()[-1] for text in told if "gathers" in text}
    assert whole >= {"cumsum", "unfold", "roll", "conv1d", "conv2d", "cdist", "nonzero"}
    assert whole.isdisjoint(VERIFIED)
    assert "softmax" in gathered
    assert gathered <= VERIFIED - {"layer_norm"}
    assert "rms_norm" not in whole


def test_a_view_has_its_gradient_however_its_parts_lie():
    for wrong, _ in run_warm(of_heads, 2):
        assert wrong == []


def of_heads():
    return sweep(Shard(2), is_of_heads=True)


ACTIVATIONS = [
    "celu",
    "elu",
    "gelu",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "logsigmoid",
    "log_softmax",
    "mish",
    "relu",
    "selu",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "softsign",
    "tanh",
]


def transposed_gradients():
    """Return the calls behind a divided Linear whose gradient, transposed, does not reach it."""
    runtime = msrun.init({"mesh": {"tp": -1}, "mode": "manual"})
    mesh = runtime.mesh["tp"]
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    eye = distribute_tensor(torch.eye(SHAPE[-1]), mesh, [Shard(0)], src_data_rank=None)
    wrong = []
    for name in ACTIVATIONS:
        call = CALLS[name]
        plain, part = x.clone().requires_grad_(), x.clone().requires_grad_()
        for given, weight in ((plain, torch.eye(SHAPE[-1])), (part, eye)):
            with warnings.catch_warnings(), Guard(mesh):
                warnings.simplefilter("ignore")
                torch.manual_seed(2)
                found = call(functional.linear(given, weight))
                if found.dim() > 1:
                    found = found.transpose(-2, -1).contiguous()
                try:
                    whole(found.square().sum()).backward()
                except (NotImplementedError, RuntimeError) as error:
                    wrong.append(f"{name}: {error}")
        if part.grad is not None and not torch.allclose(part.grad, plain.grad, atol=1e-5):
            wrong.append(name)
    return wrong


def test_a_gradient_that_a_model_transposes_reaches_a_linear():
    # softplus and elu: the layout had other strides than the part had.
    for wrong in run_warm(transposed_gradients, 2):
        assert wrong == []


@pytest.mark.parametrize("cut", [Shard(0), pytest.param(Shard(2), marks=pytest.mark.slow)])
def test_uneven_parts_are_right_or_refused(cut):
    # A plan makes no such parts, but a view may: 4 and 8 in three.
    for wrong, _ in run_warm(sweep, 3, cut):
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
    network = nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 2))
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
    said = ["msrun: torch gathers what is divided for softmax"]

    assert run_warm(mixed, 2) == 2 * [(True, said)]
