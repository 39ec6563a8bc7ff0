"""Replicas that drift apart are refused by name, and those that may differ are not."""

import warnings

import pytest
import torch
from ranks import MODELS, OPTIMIZERS, Counted, batches, build, run_ranks, run_warm, token_loss
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import msrun
from msrun.parallel.collectives import all_reduce
from msrun.parallel.local import local_part

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank"),
]

PLAN = [{"match": "fc1", "style": "colwise"}, {"match": "fc2", "style": "rowwise"}]


def steps(network, runtime, update, after=None, *, use_loop=False):
    """Train; return the step in which ranks disagreed and what was said."""
    share, parts = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    for step, batch in enumerate(batches("mlp", steps=4), 1):
        x, y = (part.chunk(parts)[share] for part in batch)
        before = [local_part(param).detach().clone() for param in network.parameters()]
        try:
            if use_loop:
                update.zero_grad()
                functional.cross_entropy(network(x), y).backward()
                update.step()
            else:
                runtime.step(network, update, functional.cross_entropy, x, y)
        except msrun.RanksDisagreeError as error:
            now = [local_part(param) for param in network.parameters()]
            assert all(map(torch.equal, before, now))
            return step, error.message
        if after:
            after(network, runtime)
    return None


def redraw(network, runtime):
    torch.manual_seed(runtime.rank)
    network.fc3.reset_parameters()


def load_on_first(network, runtime):
    if runtime.rank == 0:
        network.load_state_dict({n: t + 1e-3 for n, t in network.state_dict().items()})


def permute(network, runtime):
    """Give each rank other places for the same values."""
    with torch.no_grad():
        network.fc2.weight.copy_(network.fc2.weight.roll(runtime.rank, 1))


def noise(network, _):
    with torch.no_grad():
        network.fc1.bias.add_(1e-3 * torch.randn(32))


def drift(before, after, use_loop):
    runtime = msrun.init()
    network = runtime.shard(build("mlp"))
    if before:
        before(network, runtime)
    update = OPTIMIZERS["adamw"](network.parameters())
    if use_loop:
        update = runtime.optimizer(update)
    return steps(network, runtime, update, after, use_loop=use_loop)


EQUAL = ", which must be equal on all ranks"
ALL = "fc1.weight (rank 0), fc1.bias (rank 0), fc2.weight (rank 0), fc2.bias (rank 0) and 2 more"


@pytest.mark.sampled
@pytest.mark.parametrize("use_loop", [False, True])
@pytest.mark.parametrize(
    ("ranks", "changes", "step", "names"),
    [
        (2, (redraw, None), 1, "fc3.weight (rank 1), fc3.bias (rank 1)"),
        (4, (load_on_first, None), 1, ALL),
        (2, (permute, None), 1, "fc2.weight (rank 1)"),
        (2, (None, noise), 3, "fc1.bias (rank 1)"),
    ],
)
def test_replicas_that_part_are_refused_by_name(ranks, changes, step, names, use_loop):
    said = f"ranks have other values of {names}{EQUAL}"

    assert run_warm(drift, ranks, *changes, use_loop) == [(step, said)] * ranks


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"optimizer": {"zero": 1, "threshold": 256}}, "fc1.bias"),
        ({"optimizer": {"zero": 3, "threshold": 256}}, "fc1.bias"),
        ({"mesh": {"dp": 2, "tp": 2}, "plan": PLAN}, "fc3.bias"),
        ({"mesh": {"dp": 2, "tp": 2}, "plan": PLAN}, "fc1.bias"),
        ({"mesh": {"dp": 2, "tp": 2}, "plan": PLAN, "optimizer": {"zero": 1, "threshold": 256}},
         "fc3.bias"),
        ({"mesh": {"tp": 4}, "plan": PLAN}, "fc3.bias"),
        ({"optimizer": {"zero": 2, "shard_size": 2}}, "fc2.weight"),
    ],
)  # fmt: skip
def test_replicated_parts_are_compared_under_every_configuration(config, name):
    for found in run_warm(parted, 4, config, name):
        assert found == (1, name)


def parted(config, name):
    """Have rank 3 change one parameter; return what is refused."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    if runtime.rank == 3:
        with torch.no_grad():
            local_part(network.get_parameter(name)).add_(0.5)
    found = steps(network, runtime, OPTIMIZERS["sgd"](network.parameters()))
    return found[0], found[1].split()[5]


def equal(config, model, count):
    runtime = msrun.init(config)
    network = runtime.shard(build(model))
    update = OPTIMIZERS["adamw"](network.parameters())
    share, parts = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    loss_of = MODELS[model][1]
    for batch in batches(model, steps=count):
        part = (t.chunk(parts)[share] for t in batch)
        runtime.step(network, update, loss_of, *part)
        runtime.sharded(network).compare_replicas()


LAYERS = [
    {"match": "layers.*.[qkv]", "style": "colwise"},
    {"match": "layers.*.o", "style": "rowwise"},
    {"match": "norm", "style": "sequence"},
]


@pytest.mark.sampled
@pytest.mark.parametrize("model", ["conv", "transformer"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"optimizer": {"zero": 1}},
        {"optimizer": {"zero": 3, "shard_size": 2, "threshold": 512}},
        {"mesh": {"dp": 2, "tp": 2}, "plan": LAYERS},
        {"mesh": {"dp": 2, "tp": 2}, "plan": LAYERS, "optimizer": {"zero": 2}},
    ],
)
@pytest.mark.few(3)
def test_replicas_stay_equal_to_the_bit(config, model):
    if "plan" in config and model == "conv":
        config = {"mesh": {"dp": 4}, "optimizer": {"zero": 2}}

    assert run_warm(equal, 4, config, model, 8) == [None] * 4


class Average(nn.Module):
    """Keeps a moving average of its inputs, that of its own rank or of all."""

    def __init__(self, *, of_all):
        super().__init__()
        self.of_all = of_all
        self.body = nn.Linear(16, 10)
        self.register_buffer("average", torch.zeros(16), persistent=False)
        self.register_buffer("is_seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))

    def forward(self, x):
        mean = x.mean(0)
        if self.of_all:
            mean = all_reduce(mean, "dp", "mean")
        self.average = self.average.lerp(mean, 0.1)
        return self.body(x - self.average)


def averaged(config, whose):
    warnings.filterwarnings("ignore", message="msrun: the loss depends on a mean over samples")
    runtime = msrun.init(config)
    network = runtime.shard(Average(of_all=whose == "all"))
    return steps(network, runtime, OPTIMIZERS["sgd"](network.parameters()))


def test_buffers_that_forward_writes_from_its_own_samples_are_refused():
    said = "ranks have other values of average (rank 1)" + EQUAL

    assert run_warm(averaged, 2, {}, "own") == [(1, said)] * 2
    assert run_warm(averaged, 2, {"batch_norm": "local"}, "own") == [None] * 2
    assert run_warm(averaged, 2, {}, "all") == [None] * 2


def own_parameters():
    runtime = msrun.init({"reduce": {"exclude": ["fc2.*"]}})
    network = build("mlp")
    with torch.no_grad():
        network.fc2.bias.add_(runtime.rank)
    network = runtime.shard(network)
    return steps(network, runtime, OPTIMIZERS["sgd"](network.parameters()))


def test_parameters_that_ranks_train_alone_may_differ():
    assert run_warm(own_parameters, 2) == [None] * 2


def rounded():
    """Have rank 1 differ in the last place, as another device would."""
    runtime = msrun.init()
    network = runtime.shard(build("mlp"))
    if runtime.rank == 1:
        with torch.no_grad():
            weight = network.fc1.weight
            weight.copy_(torch.nextafter(weight, torch.ones_like(weight)))
    with pytest.warns(UserWarning, match="replicas differ by rounding"):
        runtime.sharded(network).compare_replicas()
    runtime.sharded(network).compare_replicas()  # it is said once


def test_a_difference_in_the_last_place_is_a_warning():
    run_warm(rounded, 2)


def saved(folder):
    runtime = msrun.init({"checkpoint": {"dir": folder}})
    network = runtime.shard(build("mlp"))
    redraw(network, runtime)
    with pytest.raises(msrun.RanksDisagreeError):
        runtime.save(network, step=1)


def test_a_checkpoint_of_replicas_that_differ_is_refused(tmp_path):
    run_warm(saved, 2, str(tmp_path))

    assert not list(tmp_path.iterdir())


def compared():
    """Return the all-reduces of each of 12 steps."""
    runtime = msrun.init({"accumulate": 4})
    network = runtime.shard(build("transformer"))
    update = OPTIMIZERS["adamw"](network.parameters())
    counts = []
    for x, y in batches("transformer", steps=12):
        with Counted() as counted:
            runtime.step(network, update, token_loss, x, y)
        counts.append(counted.calls["allreduce_"])
    return counts


def test_only_few_steps_compare_and_they_send_one_small_all_reduce():
    counts = run_warm(compared, 2)[0]

    assert counts == [counts[1] + (step in (1, 3, 10)) for step in range(1, 13)]


def with_head(config, where):
    """Train a model and a head that `rt.shard` does not know; return what is refused."""
    runtime = msrun.init(config)
    network, head = runtime.shard(build("mlp")), nn.Linear(10, 4)
    frozen = nn.Linear(3, 3).requires_grad_(requires_grad=False)
    groups = [
        {"params": [*network.parameters(), *frozen.parameters()]},
        {"params": [*head.parameters()]},
    ]
    update = torch.optim.SGD(groups[: 1 if where == "later" else 2], lr=0.1)

    def step():
        loss_of = lambda out, y: functional.cross_entropy(head(out), y)  # noqa: E731
        runtime.step(network, update, loss_of, torch.ones(4, 16), torch.ones(4, dtype=torch.long))

    try:
        if where == "optimizer":
            runtime.optimizer(update)
            return None
        if where == "later":
            step()
            update.add_param_group(groups[1])
        step()
    except msrun.errors.ModelError as error:
        return error.message
    return None


@pytest.mark.sampled
@pytest.mark.parametrize("where", ["optimizer", "step", "later"])
@pytest.mark.parametrize("config", [{}, {"optimizer": {"zero": 3}}])
def test_an_optimizer_of_parameters_outside_of_the_model_is_refused(config, where):
    said = (
        "SGD holds a parameter of shape (4, 10) in group 1 that is in no model of rt.shard, so "
        "each data-parallel rank would train it alone"
    )

    assert run_warm(with_head, 1, config, where) == [None]
    assert run_warm(with_head, 2, config, where) == [said] * 2


def trained_beside():
    """Train a model that the script has sharded by torch, beside that of `rt.shard`."""
    with msrun.init({}) as rt:
        model, own = rt.shard(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4))
        updates = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, own)]
        x = torch.ones(2, 4)
        for _ in range(3):
            for part, update in zip((model, own), updates, strict=True):
                update.zero_grad()
                part(x).square().mean().backward()
                update.step()
        return own.weight.full_tensor().tolist()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_a_model_that_the_script_sharded_on_a_mesh_without_names_is_left_to_it():
    one, other = run_ranks(trained_beside, 2)
    assert one == other
