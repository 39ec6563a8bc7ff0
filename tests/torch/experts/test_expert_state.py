"""State of shared-out experts: checkpoints, weights, memory, verification, initialisation."""

import copy

import pytest
import torch
from mixtures import EXPERTS, RULE, WIDTH, build, difference, texts, token_loss
from ranks import run_warm

import msrun
from msrun.parallel.checkpoint.convert import convert
from msrun.parallel.local import full_tensor, local_part

pytestmark = [
    pytest.mark.torch,
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

LAYOUTS = {
    "one": (1, {}),
    "ep": (2, {"mesh": {"ep": 2}, "plan": [RULE]}),
    "dp and ep": (4, {"mesh": {"dp": 2, "ep": 2}, "plan": [RULE]}),
    "zero": (4, {"mesh": {"dp": 2, "ep": 2}, "plan": [RULE], "optimizer": {"zero": 3}}),
    "dp": (2, {"mesh": {"dp": 2}}),
}
QUICK = ("one", "zero")


def step_from(config, path, name, *, is_first):
    """Train a step, after loading unless it is the first, which is saved; return the loss."""
    rt = msrun.init(config)
    model = rt.shard(build(name))
    update = rt.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    if not is_first:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        rt.load(model, update, path=path)
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    losses = []
    for pair in texts(3)[: 1 if is_first else 3]:
        part = [t.chunk(count)[share] for t in pair]
        losses.append(rt.step(model, update, token_loss, *part).item())
    if is_first:
        rt.save(model, update, step=1, path=path)
    return losses


def first_step(config, path, name="top 2"):
    return step_from(config, path, name, is_first=True)


def later_steps(config, path, name="top 2"):
    return step_from(config, path, name, is_first=False)


def continued(layouts, folder, name="top 2"):
    """Return the losses after a checkpoint of one layout was loaded in another."""
    found = {}
    for saver in layouts:
        path = str(folder / saver)
        ranks, config = LAYOUTS[saver]
        run_warm(first_step, ranks, config, path, name)
        for loader in layouts:
            readers, other = LAYOUTS[loader]
            found[saver, loader] = run_warm(later_steps, readers, other, path, name)[0]
    return found


def test_checkpoints_go_to_one_process_and_back(tmp_path):
    found = continued(QUICK, tmp_path)

    assert found == dict.fromkeys(found, pytest.approx(found["one", "one"], abs=2e-6))


@pytest.mark.slow
def test_checkpoints_go_from_any_layout_to_any_other(tmp_path):
    found = continued(LAYOUTS, tmp_path)

    assert found == dict.fromkeys(found, pytest.approx(found["one", "one"], abs=2e-6))


def whole_weights(config, name="top 2"):
    """Return the whole state dict, after a step."""
    rt = msrun.init(config)
    model = rt.shard(build(name))
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    part = [t.chunk(count)[share] for t in texts(1)[0]]
    rt.step(model, update, token_loss, *part)
    return rt.state_dict(model)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep", "dp and ep", "zero"])
def test_whole_weights_are_those_of_one_process(layout, tmp_path):
    [expected] = run_warm(whole_weights, 1, {})
    ranks, config = LAYOUTS[layout]
    found = run_warm(whole_weights, ranks, config)[0]

    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-6), name

    path = tmp_path / "saved"
    run_warm(first_step, ranks, config, str(path))
    convert(path, tmp_path / "weights.safetensors")
    assert (tmp_path / "weights.safetensors").stat().st_size > 0


def held():
    """Return the bytes of the experts that a rank holds, and those of all."""
    rt = msrun.init(LAYOUTS["ep"][1])
    model = build("top 2")
    whole = {name: p.nbytes for name, p in model.named_parameters() if "experts" in name}
    model = rt.shard(model)
    params = {name: p for name, p in model.named_parameters() if "experts" in name}
    own = sum(local_part(p).untyped_storage().nbytes() for p in params.values())
    copied = copy.deepcopy(model)
    x = texts(1)[0][0]
    is_alike = torch.equal(copied(x), model(x))
    return own, sum(whole.values()), is_alike


@pytest.mark.slow
def test_a_rank_holds_its_experts_alone():
    for own, whole, is_alike in run_warm(held, 2):
        assert own == whole // 2
        assert is_alike


def made_on_meta(config):
    rt = msrun.init(config)
    with rt.init_on_meta():
        model = build("top 2")
    model = rt.shard(model)
    whole = dict(build("top 2").named_parameters())
    params = model.named_parameters()
    return [key for key, param in params if not torch.equal(full_tensor(param), whole[key])]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep", "dp and ep", "zero"])
def test_experts_of_a_model_without_memory_are_filled(layout):
    ranks, config = LAYOUTS[layout]

    assert run_warm(made_on_meta, ranks, config) == [[]] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep", "dp and ep", "zero"])
def test_steps_with_experts_are_verified(layout):
    ranks, config = LAYOUTS[layout]
    found = run_warm(difference, ranks, "top 2", {**config, "verify": 2})

    assert max(worst for worst, _, _ in found) < 2e-6


def sizes(layout):
    ranks, config = LAYOUTS[layout]
    return run_warm(difference, ranks, "top 2", config)


@pytest.mark.slow
def test_tokens_travel_and_gradients_of_experts_do_not():
    tokens, choices, layers = 8 * 6 // 2, 2, 2
    for _, (calls, sent), shapes in sizes("ep"):
        assert shapes["layers.0.mlp.experts.gate_up_proj"] == [EXPERTS // 2, 16, WIDTH]
        # Counts; rows with their weights there; rows back; the gradients of all but counts.
        assert calls["all_to_all_single"] == layers * (1 + 2 + 2)
        # Rows leave once and return once, forward and backward; what arrives differs by rank.
        assert sent["all_to_all_single"] > 0
    together = sum(sent["all_to_all_single"] for _, (_, sent), _ in sizes("ep"))
    pairs = 2 * tokens * choices * layers  # of both ranks
    counts = 2 * (EXPERTS + 2 * 2) * 8 * layers  # for each expert, and two for each rank
    assert together == counts + pairs * 4 * (WIDTH + 1 + WIDTH) * 2
