"""Shared-out experts beside other features: loops by hand, types, schedules, frozen ones."""

import copy
import warnings

import pytest
import torch
from mixtures import RULE, build, difference, texts, token_loss
from ranks import run_warm

import msrun
from msrun.errors import UsageError
from msrun.parallel.local import full_tensor

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

EP = {"mesh": {"dp": 2, "ep": 2}, "plan": [RULE]}
UNITS = ["embed", "layers.0", "layers.1", "head"]


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "interleaved_zb", "zbv", "dualpipev"])
def test_experts_in_the_stages_of_every_schedule(schedule):
    places = {
        "gpipe": [0, 0, 1, 1],
        "interleaved": [[0, 0], [1, 0], [0, 1], [1, 1]],
        "interleaved_zb": [[0, 0], [1, 0], [0, 1], [1, 1]],
        "zbv": [[0, 0], [1, 0], [1, 1], [0, 1]],
        "dualpipev": [[0, 0], [1, 0], [1, 1], [0, 1]],
    }
    stages = dict(zip(UNITS, places[schedule], strict=True))
    pipeline = {"stages": stages, "microbatches": 4, "schedule": schedule}
    config = {"mesh": {"pp": 2, "ep": 2}, "plan": [RULE], "pipeline": pipeline}

    assert max(worst for worst, _, _ in run_warm(difference, 4, "top 2", config)) < 2e-6


def by_hand(config):
    """Train without rt.step, in two parts; return how far gradients are from one process."""
    model = build("top 2")
    whole = copy.deepcopy(model)
    rt = msrun.init(config)
    model = rt.shard(model)
    tokens, target = texts(1)[0]
    token_loss(whole(tokens), target).backward()
    share, count = rt.coordinate["dp"], rt.layout.size("dp")
    part = [tensor.chunk(count)[share].chunk(2) for tensor in (tokens, target)]
    with rt.no_sync(model):
        (token_loss(model(part[0][0]), part[1][0]) / 2).backward()
    (token_loss(model(part[0][1]), part[1][1]) / 2).backward()
    there = dict(whole.named_parameters())
    gaps = [
        (full_tensor(param.grad) - there[name].grad).abs().max().item()
        for name, param in model.named_parameters()
    ]
    norm = rt.clip_grad_norm_(model, 0.5)
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    model.eval()
    with torch.no_grad():
        gaps.append((model(tokens[:2]) - whole(tokens[:2])).abs().max().item())
    return max(*gaps, abs(float(norm - expected)))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_loop_by_hand(zero):
    found = run_warm(by_hand, 4, {**EP, "optimizer": {"zero": zero}})

    assert max(found) < 2e-6


def frozen(config):
    """Return whether a step leaves frozen experts alone and is that of one process."""
    model = build("top 2")
    for name, param in model.named_parameters():
        if "layers.0.mlp.experts" in name or "embed" in name:
            param.requires_grad_(requires_grad=False)
    whole = copy.deepcopy(model)
    rt = msrun.init(config)
    model = rt.shard(model)
    tokens, target = texts(1)[0]
    token_loss(whole(tokens), target).backward()
    share, count = rt.coordinate["dp"], rt.layout.size("dp")
    update = rt.optimizer(torch.optim.SGD([p for p in model.parameters() if p.requires_grad]))
    rt.step(model, update, token_loss, *(t.chunk(count)[share] for t in (tokens, target)))
    there = dict(whole.named_parameters())
    return [
        name
        for name, param in model.named_parameters()
        if (param.grad is None) != (there[name].grad is None)
        or (
            param.grad is not None
            and (full_tensor(param.grad) - there[name].grad).abs().max() > 1e-6
        )
    ]


@pytest.mark.parametrize("zero", [0, 3])
def test_frozen_experts(zero):
    assert run_warm(frozen, 4, {**EP, "optimizer": {"zero": zero}}) == [[]] * 4


def summed(config):
    """Return how far gradients that are added are from those of one process, per rank."""
    model = build("top 2")
    whole = copy.deepcopy(model)
    rt = msrun.init(config)
    model = rt.shard(model)
    tokens, target = texts(1)[0]
    token_loss(whole(tokens), target).backward()
    share, count = rt.coordinate["dp"], rt.layout.size("dp")
    update = rt.optimizer(torch.optim.SGD(model.parameters()))
    rt.step(model, update, token_loss, *(t.chunk(count)[share] for t in (tokens, target)))
    there = dict(whole.named_parameters())
    return max(
        (full_tensor(param.grad) - count * there[name].grad).abs().max().item()
        for name, param in model.named_parameters()
    )


@pytest.mark.parametrize("zero", [0, 3])
def test_gradients_that_are_added(zero):
    found = run_warm(summed, 4, {**EP, "optimizer": {"zero": zero}, "reduce": {"op": "sum"}})

    assert max(found) < 1e-5


def half(config, is_autocast):
    """Return losses in bfloat16, and those of one process in float32."""
    model = build("top 2")
    whole = copy.deepcopy(model)
    rt = msrun.init(config)
    model = rt.shard(model)
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    share, count = rt.coordinate["dp"], rt.layout.size("dp")
    plain = torch.optim.SGD(whole.parameters(), lr=0.1)
    gaps = []
    for tokens, target in texts(3):
        plain.zero_grad()
        expected = token_loss(whole(tokens), target)
        expected.backward()
        plain.step()
        part = [t.chunk(count)[share] for t in (tokens, target)]
        with torch.autocast("cpu", enabled=is_autocast):
            gaps.append(rt.step(model, update, token_loss, *part).item() - expected.item())
    return max(map(abs, gaps))


@pytest.mark.parametrize(
    ("options", "is_autocast"),
    [
        ({"optimizer": {"zero": 3, "dtype": "bfloat16"}}, False),
        ({}, True),
        ({"optimizer": {"zero": 2}, "reduce": {"dtype": "bfloat16"}}, False),
    ],
)
def test_experts_in_bfloat16(options, is_autocast):
    assert max(run_warm(half, 4, {**EP, **options}, is_autocast)) < 0.05


def test_an_axis_of_one_rank_changes_nothing():
    found = run_warm(difference, 2, "top 2", {"mesh": {"dp": 2, "ep": 1}, "plan": [RULE]})
    assert max(worst for worst, _, _ in found) < 2e-6
    assert all("all_to_all_single" not in calls for _, (calls, _), _ in found)
    [(worst, _, _)] = run_warm(difference, 1, "top 2", {"mesh": {"ep": -1}, "plan": [RULE]})
    assert worst < 1e-6


def uneven():
    """Return what is said of experts that ranks do not divide."""
    rt = msrun.init({"mesh": {"ep": 3}, "plan": [RULE]})
    with pytest.raises(UsageError) as caught:
        rt.shard(build("top 2"))
    return caught.value.message


def test_experts_that_ranks_do_not_divide_are_refused():
    sentence = (
        "parallel.plan[0]: layers.0.mlp.experts.gate_up_proj [4, 16, 8] can not be split by "
        "strategy: dim 0 of 4 in 3 parts (ep)"
    )
    assert run_warm(uneven, 3) == [sentence] * 3

    assert run_warm(uneven, 3) == [sentence] * 3


def last_batch(config):
    """Return how far losses of an epoch with a small last batch are from one process."""
    tokens, target = torch.cat(texts(2), 1)[:, :13]
    data = torch.utils.data.TensorDataset(tokens, target)
    model = build("top 2")
    rt = msrun.init(config)
    model = rt.shard(model)
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = 8 // rt.layout.size("dp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = rt.loader(data, batch)
        return [rt.step(model, update, token_loss, *pair).item() for pair in loader]


def test_an_uneven_last_batch():
    [expected] = run_warm(last_batch, 1, {})
    for found in run_warm(last_batch, 4, EP):
        assert found == pytest.approx(expected, abs=2e-6)
