"""Experts that are a `ModuleList` train on ranks of their own as in one process, unmodified."""

import copy
import datetime as dt
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from lists import LISTS, Expert, Loop
from mixtures import (
    CHOICES,
    EXPERTS,
    MODELS,
    RULE,
    WIDTH,
    Language,
    build,
    difference,
    texts,
    token_loss,
)
from ranks import run_warm
from test_expert_state import LAYOUTS, continued, first_step, whole_weights
from test_experts import CONFIGS
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import UsageError
from msrun.parallel import torch_compat
from msrun.parallel.checkpoint.convert import convert
from msrun.parallel.uneven_rows.rows import rows_of

pytestmark = [
    pytest.mark.torch,
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

# Each micro-batch would add to its counts, and its expert has no plan of its own.
ONCE = ("accumulate and recompute", "zero 2", "ep and tp", "zero, ep and tp", "pp")
EP = {"mesh": {"dp": 2, "ep": 2}, "plan": [RULE]}


def worst_of(names, config):
    """Return how far each model is from one process, on the worst rank."""
    ranks, options = CONFIGS[config]
    found = run_warm(differences, ranks, names, {"plan": [RULE], **options})
    return {name: max(of[name] for of in found) for name in names}


def differences(names, config):
    return {name: difference(name, config)[0] for name in names}


def test_lists_of_experts_train_as_in_one_process():
    names = ["list", "list, in place", "list, lonely"]
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


class Three(Loop):
    """Has experts that ranks do not divide."""

    def __init__(self):
        super().__init__()
        self.experts = self.experts[:3]

    def route(self, rows):
        return self.gate(rows)[:, :3].softmax(-1).topk(2)


MODELS["three"] = functools.partial(Language, Three)


def test_ranks_have_unlike_numbers_of_experts():
    config = {"mesh": {"ep": 2}, "plan": [RULE]}
    found = run_warm(differences, 2, ["three"], config)
    assert found == [{"three": pytest.approx(0, abs=2e-6)}] * 2


def too_few():
    rt = msrun.init({"mesh": {"ep": 4}, "plan": [RULE]})
    with pytest.raises(UsageError) as caught:
        rt.shard(build("three"))
    return caught.value.message


def test_fewer_experts_than_ranks_are_refused():
    sentence = (
        "parallel.plan[0].style: layers.0.mlp.experts has 3 experts, fewer than the 4 ranks of "
        "ep (choose ep 3 or less)"
    )
    assert run_warm(too_few, 4) == [sentence] * 4


class Buffered(Expert):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))


class Across(Expert):
    """Normalises over the rows that it gets."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


class Pair(Expert):
    def forward(self, x):
        return super().forward(x), x


class Scaled(Expert):
    def forward(self, x, factor=1):
        return super().forward(x) * factor


class Chain(Loop):
    """The second expert of a token gets what the first one returned."""

    def mix(self, rows, _, index):
        for place in range(index.size(1)):
            found = torch.zeros_like(rows)
            for number, expert in enumerate(self.experts):
                row = torch.where(index[:, place] == number)[0]
                found[row] = expert(rows[row])
            rows = rows + found
        return rows


class Reading(Loop):
    """Computes with a parameter of an expert itself."""

    def mix(self, rows, weights, index):
        return super().mix(rows, weights, index) + self.experts[0].down.bias


class Moody(Loop):
    """Calls fewer experts from call to call, by a count outside of its module."""

    numbers = itertools.count(1)

    def mix(self, rows, weights, index):
        last = -next(self.numbers)
        return super().mix(rows[:last], weights, index[:last]).sum(0)


class Scaling(Loop):
    kind = Scaled

    def mix(self, rows, *_):
        return sum(expert(rows, factor=0.5) for expert in self.experts)


class Normed(Loop):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)


class Unlike(Loop):
    def __init__(self):
        super().__init__()
        self.experts[1] = nn.Linear(WIDTH, WIDTH)


class Shared(Loop):
    def __init__(self):
        super().__init__()
        self.experts[1] = self.experts[0]


class Tied(Loop):
    """Has one weight in two experts."""

    def __init__(self):
        super().__init__()
        self.experts[1].down.weight = self.experts[0].down.weight


def of_kind(one):
    return type("OfKind", (Loop,), {"kind": one})


OF = "layers.0.mlp.experts of style experts over ep"
MIXTURE = (
    "layers.0.mlp: its forward ran twice, since its experts are a list of which ranks have parts, "
    "and called its modules otherwise the second time"
)
SHARING = f"{OF}: members have no parameters, or share them with each other or other modules"
CASES = {
    "buffered": (
        of_kind(Buffered),
        f"{OF}: 0 has the buffer scale, which one rank alone would change",
    ),
    "across": (
        of_kind(Across),
        (
            f"{OF}: what an expert computes of a row depends on other rows, some of which come "
            "from other ranks"
        ),
    ),
    "pair": (
        of_kind(Pair),
        f"{OF}: an expert returns a tuple for 1 rows: it has to return one tensor with as many",
    ),
    "scaling": (
        Scaling,
        (
            f"{OF}: an expert was called with (24, 8), float; it takes up to 3 tensors (rows, ..., "
            "width) with as many rows each"
        ),
    ),
    "chain": (
        Chain,
        (
            f"{OF}: what expert {{}} gets depends on what another one returned, or differs when "
            "the forward around them runs again"
        ),
    ),
    "reading": (
        Reading,
        (
            "layers.0.mlp.experts.0.down.bias is of an expert of a list, which one rank of ep has: "
            "add of it would be another on each rank"
        ),
    ),
    "moody": (Moody, MIXTURE),
    "normed": (
        Normed,
        (
            f"{OF}: norm is a batch norm beside the experts, and ranks without rows for experts "
            "would meet there at another time"
        ),
    ),
    "unlike": (
        Unlike,
        (
            f"{OF}: 1 (Linear) has other parameters than 0 (Expert), and ranks have experts of one "
            "kind"
        ),
    ),
    "shared": (Shared, SHARING),
    "tied": (Tied, SHARING),
}


def evaluate(rt, model):
    tokens, target = (tensor.chunk(2)[rt.rank] for tensor in texts(1)[0])
    model = rt.shard(model)
    with torch.no_grad():
        token_loss(model(tokens), target)


def said(names):
    """Return what is said of each model, on this rank."""
    found = {}
    for name in names:
        rt = msrun.init({"mesh": {"ep": 2}, "plan": [RULE]})
        torch.manual_seed(3)
        model = Language(CASES[name][0])
        with pytest.raises(UsageError) as caught:
            evaluate(rt, model)
        found[name] = caught.value.message
    return found


def test_lists_that_ranks_cannot_share_are_refused():
    for found in run_warm(said, 2, list(CASES)):
        for name, (_, sentence) in CASES.items():
            assert found[name] in {sentence.format(number) for number in range(EXPERTS)}


LIST = "the experts of the list layers.0.mlp.experts (parallel.plan[0])"
# Keys beside a list, and how each is refused.
BESIDE = {
    "verify": ({"verify": {"steps": 1}}, f"verify: one process has no part of {LIST}"),
    "dtype": (
        {"optimizer": {"zero": 1, "dtype": "bfloat16"}},
        f"optimizer.dtype: casts what is gathered, and not {LIST}",
    ),
    "offload": (
        {"optimizer": {"zero": 1, "offload": True}},
        f"optimizer.offload: keeps on the host what is gathered, and not {LIST}",
    ),
    "dropout": ({"dropout": "exact"}, f"dropout: exact draws masks of samples, and not of {LIST}"),
    "bf16": ({"precision": "bf16"}, "precision: was not compared over the axis ep (leave out one)"),
    "fp16": ({"precision": "fp16"}, "precision: was not compared over the axis ep (leave out one)"),
    "compile": (
        {"compile": {"modules": ["layers.*"]}},
        "compile: was not compared over the axis ep (leave out one)",
    ),
}


def said_beside():
    """Return what is said of each key, on this rank."""
    found = {}
    for name, (options, _) in BESIDE.items():
        with pytest.raises(UsageError) as caught:
            begin(options)
        found[name] = caught.value.message.removeprefix("parallel: ")
    return found


def begin(options):
    rt = msrun.init({**EP, **options})
    try:
        rt.shard(build("list"))
    finally:
        rt.close()


def test_what_knows_no_experts_of_a_list_is_refused():
    expected = {name: sentence for name, (_, sentence) in BESIDE.items()}
    for found in run_warm(said_beside, 4):
        assert {name: x.removeprefix("parallel.") for name, x in found.items()} == expected


class Delayed:
    """Lets rows of rank 1 leave only once the shared expert of rank 0 runs, and gradients so too.

    Args:
        path: Of a file that both ranks see.
    """

    def __init__(self, path):
        self.store, self.begun, self.beside, self.waited = dist.FileStore(path, 2), 0, 0, 0

    def watch(self, experts):
        """Watch the shared expert, forward and backward."""
        experts.shared.register_forward_pre_hook(lambda *_: self.compute())
        experts.shared.register_full_backward_hook(lambda *_: self.compute())

    def compute(self):
        if self.begun > self.beside and dist.get_rank() == 0:
            self.beside = self.begun
            self.store.set(str(self.begun), "")

    def dispatch(self, func, _, args, kwargs):
        if "all_to_all_single" in func.name():
            self.begun += 1
            # Counts, rows, results; the gradients of results, of rows.
            if dist.get_rank() == 1 and self.begun in (2, 5):
                self.store.wait([str(self.begun)], dt.timedelta(seconds=30))
                self.waited += 1
        return func(*args, **kwargs)


def overlapped(path):
    """Return how often rank 1 waited for the shared expert of rank 0."""
    rt = msrun.init({"mesh": {"ep": 2}, "plan": [RULE]})
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), LISTS["list, after"]())
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


def test_a_shared_expert_runs_while_rows_travel_and_while_their_gradients_do(tmp_path):
    assert run_warm(overlapped, 2, str(tmp_path / "store")) == [0, 2]


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
