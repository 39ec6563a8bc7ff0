"""Experts that are a `ModuleList` train on ranks of their own as in one process, unmodified."""

import copy

import pytest
import torch
from delayed_rows import Delayed
from lists import LISTS, Expert, Loop
from mixtures import (
    CHOICES,
    RULE,
    WIDTH,
    build,
    difference,
    texts,
)
from ranks import run_warm
from test_expert_state import LAYOUTS, continued, first_step, whole_weights
from test_experts import CONFIGS
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.checkpoint.convert import convert
from msrun.parallel.uneven_rows.rows import rows_of

pytestmark = [
    pytest.mark.torch,
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
    # Some samples choose no expert, and all of a part may be such.
    pytest.mark.filterwarnings("ignore:msrun. some parts of the batch"),
]

# Each micro-batch would add to its counts, and its expert has no plan of its own.
ONCE = ("accumulate and recompute", "zero 2", "ep and tp", "zero, ep and tp", "pp")


def worst_of(names, config):
    """Return how far each model is from one process, on the worst rank."""
    ranks, options = CONFIGS[config]
    found = run_warm(differences, ranks, names, {"plan": [RULE], **options})
    return {name: max(of[name] for of in found) for name in names}


def differences(names, config):
    return {name: difference(name, config)[0] for name in names}


def test_lists_of_experts_train_as_in_one_process():
    names = ["list", "list, in place", "list, lonely"]
    names += ["list, before", "list, looked at", "list, twice", "list, both"]
    assert worst_of(names, "dp and ep") == dict.fromkeys(names, pytest.approx(0, abs=2e-6))


def test_what_is_behind_the_experts_is_gathered_behind_them_by_ranks_that_call_none():
    """Else one rank waits for the weights of the shared expert, and another one for rows."""
    config = {"mesh": {"ep": 4}, "optimizer": {"zero": 3, "modules": ["*.shared"]}, "plan": [RULE]}
    for found in run_warm(differences, 4, ["list, lonely"], config):
        assert found == {"list, lonely": pytest.approx(0, abs=2e-6)}


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_lists_of_every_loop_train_as_in_one_process(config):
    names = [name for name in LISTS if name != "list, in place" or config not in ONCE]
    assert worst_of(names, config) == dict.fromkeys(names, pytest.approx(0, abs=2e-6))


@pytest.mark.slow
def test_checkpoints_of_lists_go_from_any_layout_to_any_other(tmp_path):
    found = continued(LAYOUTS, tmp_path, "list")

    assert found == dict.fromkeys(found, pytest.approx(found["one", "one"], abs=2e-6))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep", "dp and ep", "zero"])
def test_whole_weights_of_lists_are_those_of_one_process(layout, tmp_path):
    [expected] = run_warm(whole_weights, 1, {}, "list")
    ranks, config = LAYOUTS[layout]
    found = run_warm(whole_weights, ranks, config, "list")[0]

    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-6), name

    path = tmp_path / "saved"
    run_warm(first_step, ranks, config, str(path), "list")
    convert(path, tmp_path / "weights.safetensors")
    assert (tmp_path / "weights.safetensors").stat().st_size > 0


def stored(param):
    return param.detach().untyped_storage().nbytes()


def held(config):
    """Return what a rank has of each expert, whether names and a copy are those of one process."""
    rt = msrun.init(config)
    model = build("list")
    names, whole = [*dict(model.named_parameters())], copy.deepcopy(model.state_dict())
    model = rt.shard(model)
    experts = model.layers[0].mlp.experts
    own = [sum(map(stored, expert.parameters())) for expert in experts]
    x = texts(1)[0][0]
    before = model(x).detach()
    is_alike = "optimizer" in config or torch.equal(copy.deepcopy(model)(x), before)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(whole)
    is_alike = is_alike and torch.equal(model(x), before)
    return own, names == [*dict(model.named_parameters())], is_alike


def made_on_meta(config):
    rt = msrun.init(config)
    with rt.init_on_meta():
        model = build("list")
    model = rt.shard(model)
    whole = dict(build("list").named_parameters())
    found = []
    for key, param in model.named_parameters():
        rows = rows_of(param)
        part = param.detach() if not hasattr(param, "full_tensor") else param.full_tensor()
        if not torch.equal(part, rows.cut(whole[key]) if rows else whole[key]):
            found.append(key)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep", "dp and ep", "zero"])
def test_a_rank_holds_the_members_of_its_own(layout):
    ranks, config = LAYOUTS[layout]
    size = sum(param.nbytes for param in Expert().parameters())
    for rank, (own, has_names, is_alike) in enumerate(run_warm(held, ranks, config)):
        first = rank % 2 == 0
        assert own == [size * first, size * first, size * (not first), size * (not first)]
        assert has_names
        assert is_alike
    assert run_warm(made_on_meta, ranks, config) == [[]] * ranks


def test_ranks_have_unlike_numbers_of_experts():
    config = {"mesh": {"ep": 2}, "plan": [RULE]}
    found = run_warm(differences, 2, ["three"], config)
    assert found == [{"three": pytest.approx(0, abs=2e-6)}] * 2


def overlapped(path, name):
    """Return how often rank 1 waited for the shared expert of rank 0."""
    rt = msrun.init({"mesh": {"ep": 2}, "plan": [RULE]})
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), LISTS[name]())
    delayed = Delayed(path)
    delayed.watch(model[1])
    model = rt.shard(model)
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, target = torch.randn(2, 4, 3, WIDTH)
    rt.step(model, update, functional.mse_loss, x, target)  # it tries the mixture
    delayed.begun = delayed.beside = 0
    with torch_compat.dispatching(delayed.dispatch):
        rt.step(model, update, functional.mse_loss, x, target)
    return delayed.waited


@pytest.mark.parametrize("name", ["list, after", "list, before"])
def test_a_shared_expert_runs_while_rows_travel_and_while_their_gradients_do(tmp_path, name):
    assert run_warm(overlapped, 2, str(tmp_path / "store"), name) == [0, 2]


class Dropping(nn.Linear):
    """Draws random numbers from the second step on."""

    share = 0.0

    def forward(self, x):
        return functional.dropout(super().forward(x), self.share, self.share > 0)


def dropped():
    """Return what is said of a shared expert that draws numbers it did not draw before."""
    rt = msrun.init({"mesh": {"ep": 2}, "plan": [RULE]})
    mixture = LISTS["list, before"]()
    mixture.shared = Dropping(WIDTH, WIDTH)
    model = rt.shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), mixture))
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, target = torch.randn(2, 4, 3, WIDTH)
    rt.step(model, update, functional.mse_loss, x, target)
    mixture.shared.share = 0.5
    with pytest.raises(ModelError, match="draws random numbers, and drew none") as refused:
        rt.step(model, update, functional.mse_loss, x, target)
    return refused.value.hint


def test_a_shared_expert_that_draws_numbers_later_on_is_refused():
    assert run_warm(dropped, 2) == ["call it after the experts"] * 2


class Favourites(Loop):
    """All tokens choose the first experts, so that other ranks compute no row."""

    def route(self, rows):
        weights, _ = self.gate(rows).softmax(-1).topk(CHOICES)
        return weights, torch.arange(CHOICES).expand(len(rows), -1)


class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mix, self.head = nn.Linear(WIDTH, WIDTH), Favourites(), nn.Linear(WIDTH, 3)

    def forward(self, x, labels):
        return {
            "loss": functional.cross_entropy(
                self.head(self.mix(self.first(x))).flatten(0, 1), labels
            )
        }


def losses_of_favourites(config):
    rt = msrun.init(config)
    torch.manual_seed(0)
    model = rt.shard(OwnLoss())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    draw = torch.Generator().manual_seed(1)
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    found = []
    for _ in range(3):
        x = torch.randn(8, 4, WIDTH, generator=draw).chunk(count)[share]
        labels = torch.randint(0, 3, (8, 4), generator=draw).chunk(count)[share]
        found.append(rt.step(model, update, {"x": x, "labels": labels.flatten()}).item())
    return found


def test_rank_without_rows_for_its_experts_takes_the_loss_of_a_model_as_the_others_do():
    expected = run_warm(losses_of_favourites, 1, {})[0]

    for found in run_warm(losses_of_favourites, 2, {"mesh": {"ep": 2}, "plan": [RULE]}):
        assert found == pytest.approx(expected, rel=1e-5)
