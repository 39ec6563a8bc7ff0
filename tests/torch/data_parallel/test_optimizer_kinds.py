"""Every optimizer of torch learns on parts what it learns in one process, or is refused by name."""

from collections import OrderedDict

import pytest
import torch
from ranks import assert_equal_curves, batches, build, run_warm
from test_grid import MLP, zero
from torch.nn import functional

import msrun
from msrun.errors import UsageError

pytestmark = pytest.mark.torch

DIVIDED = {"zero1": zero(1), "tp": {"mesh": {"tp": 2}, "plan": MLP}}
RIGHT = {
    "ASGD": {},
    "Adadelta": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "SGD": {"lr": 0.1, "momentum": 0.5, "nesterov": True},
}
REFUSED = {
    "Adafactor": "takes norms of whole rows and columns",
    "Muon": "multiplies whole matrices, in a short type whose rounding depends on their parts",
    "Rprop": "writes elements by a mask",
    "SparseAdam": "takes sparse gradients",
}
ONCE = "LBFGS computes the loss several times a step, and rt.step computes it once"


def made(config, kind, options):
    """Return the runtime, a model, and its optimizer of matrices, which is all that Muon takes."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    params = [p for p in network.parameters() if p.dim() > 1 or kind != "Muon"]
    return runtime, network, runtime.optimizer(getattr(torch.optim, kind)(params, **options))


def learned(config, kind, options):
    runtime, network, update = made(config, kind, options)
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    return [
        runtime.step(
            network, update, functional.cross_entropy, *(t.chunk(count)[share] for t in batch)
        ).item()
        for batch in batches("mlp")
    ]


def refused(config, kind):
    try:
        made(config, kind, {})
    except UsageError as error:
        return error.message
    return None


def needs_torch(kind):
    if not hasattr(torch.optim, kind):
        pytest.skip(f"this torch has no {kind}")


@pytest.mark.parametrize("config", DIVIDED)
@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.few(7)
def test_it_learns_what_it_learns_in_one_process(kind, config):
    expected = run_warm(learned, 1, {}, kind, RIGHT[kind])[0]

    assert_equal_curves(run_warm(learned, 2, DIVIDED[config], kind, RIGHT[kind]), expected)
    assert len(set(expected)) == len(expected)


@pytest.mark.parametrize("config", [{}, *DIVIDED.values()], ids=["dp", *DIVIDED])
def test_a_learning_rate_may_be_a_tensor(config):
    expected = run_warm(learned, 1, {}, "Adam", {"lr": 0.01})[0]
    options = {"lr": torch.tensor(0.01), "foreach": False}

    assert_equal_curves(run_warm(learned, 2, config, "Adam", options), expected)


@pytest.mark.parametrize(("config", "divided"), [("zero1", 1.0), ("tp", 2 / 3)])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_needs_whole_parameters_is_refused(kind, config, divided):
    needs_torch(kind)
    count = 3 if kind == "Muon" else 6
    parts = f"{round(divided * count)} of its {count} parameters are sharded"

    assert run_warm(refused, 2, DIVIDED[config], kind) == 2 * [
        f"{kind} {REFUSED[kind]}, and {parts}"
    ]


@pytest.mark.parametrize("kind", ["Adafactor", "Muon", "Rprop"])
def test_it_may_have_what_stays_whole(kind):
    needs_torch(kind)
    expected = run_warm(learned, 1, {}, kind, {})[0]

    tolerance = 1e-4 if kind == "Muon" else 1e-6  # a mean over ranks rounds, and it in bfloat16

    assert_equal_curves(run_warm(learned, 2, {}, kind, {}), expected, tolerance)


def test_what_needs_the_loss_again_is_refused():
    assert run_warm(refused, 1, {}, "LBFGS") == [ONCE]


def refused_in_a_step(config, kind):
    """Give `rt.step` an optimizer that `rt.optimizer` never saw; return why it does not begin."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    update = getattr(torch.optim, kind)(network.parameters())
    with pytest.raises(UsageError) as caught:
        runtime.step(network, update, functional.cross_entropy, *batches("mlp")[0])
    return caught.value.message


def test_a_step_refuses_them_too():
    assert run_warm(refused_in_a_step, 1, {}, "LBFGS") == [ONCE]
    assert run_warm(refused_in_a_step, 2, zero(1), "Rprop") == 2 * [
        "Rprop writes elements by a mask, and 6 of its 6 parameters are sharded"
    ]


def in_a_plain_loop(config):
    """Train by LBFGS, which computes the loss several times; return norms, or the refusal."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    update = torch.optim.LBFGS(network.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    x, y = (part.chunk(runtime.world_size)[runtime.rank] for part in batches("mlp")[0])

    def closure():
        update.zero_grad()
        loss = functional.cross_entropy(network(x), y)
        loss.backward()
        return loss

    try:
        for _ in range(2):
            update.step(closure)
    except UsageError as error:
        return error.message
    return [param.norm().item() for param in network.parameters()]


def test_what_needs_the_loss_again_trains_in_a_plain_loop():
    expected = run_warm(in_a_plain_loop, 1, {})[0]

    assert_equal_curves(run_warm(in_a_plain_loop, 2, {}), expected, 1e-4)


@pytest.mark.parametrize(("config", "divided"), [("zero1", 6), ("tp", 4)])
def test_what_needs_the_loss_again_is_refused_on_shards(config, divided):
    said = f"LBFGS makes one vector of all gradients, and {divided} of its 6 parameters are sharded"
    assert run_warm(in_a_plain_loop, 2, DIVIDED[config]) == [said] * 2


def test_every_optimizer_of_torch_is_known():
    found = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}

    assert found - {"Optimizer"} <= {*RIGHT, *REFUSED, "LBFGS"}


class Wrapping(torch.optim.Optimizer):
    """Steps by another optimizer, and never was one of torch's: as Lookahead of timm."""

    def __init__(self, inner):
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()

    def step(self, closure=None):
        self.inner.step(closure)


class Bare(Wrapping):
    """The same without hooks, as AcceleratedOptimizer and ScheduleFreeWrapper."""

    def __init__(self, inner):
        super().__init__(inner)
        del self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks

    def zero_grad(self, *, set_to_none=True):
        self.inner.zero_grad(set_to_none)


def learned_by(kind, *, drifts=False):
    """Return losses with an optimizer that wraps another, and a scheduler of it."""
    runtime = msrun.init()
    network = runtime.shard(build("mlp"))
    update = kind(torch.optim.SGD(network.parameters(), lr=0.1))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(update, 0.9)]
    update = runtime.optimizer(update)
    schedulers.append(torch.optim.lr_scheduler.ExponentialLR(update, 0.9))
    losses, share = [], runtime.rank
    for x, y in batches("mlp"):
        part = [t.chunk(runtime.world_size)[share] for t in (x, y)]
        losses.append(runtime.step(network, update, functional.cross_entropy, *part).item())
        for scheduler in schedulers:
            scheduler.step()
        if drifts:
            with torch.no_grad():
                network.fc1.bias.add_(0.1 * runtime.rank)
    return losses


def drifting(kind):
    with pytest.raises(UsageError) as caught:
        learned_by(kind, drifts=True)
    return caught.value.message


def test_an_optimizer_without_hooks_is_followed():
    assert_equal_curves(run_warm(learned_by, 2, Bare), run_warm(learned_by, 1, Wrapping)[0])
    assert run_warm(drifting, 2, Bare) == 2 * [
        "ranks have other values of fc1.bias (rank 1), which must be equal on all ranks"
    ]


def wrapped(config, kind=Wrapping):
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    try:
        runtime.optimizer(kind(torch.optim.SGD(network.parameters(), lr=0.1)))
    except UsageError as error:
        return error.message, error.hint
    return None


@pytest.mark.parametrize("kind", [Wrapping, Bare])
@pytest.mark.parametrize("config", DIVIDED.values(), ids=DIVIDED)
def test_an_optimizer_without_hooks_is_refused_for_sharded_parameters(config, kind):
    sentence = (
        f"{kind.__name__} has none of the hooks of torch's optimizers, by which sharded "
        "parameters and stages save its state"
    )
    hint = f"give rt.optimizer what {kind.__name__} wraps, or train without zero, plan and pipeline"
    assert run_warm(wrapped, 2, config, kind) == [(sentence, hint)] * 2


# Name -> the options of timm's optimizer, and what is said of sharded parameters; None learns.
OF_TIMM = {
    "AdamP": ({}, "AdamP projects whole matrices, and "),
    "Adopt": ({}, None),
    "LaProp": ({}, None),
    "Lars": ({}, None),
    "Lion": ({}, None),
    "MADGRAD": ({}, None),
    "Mars": ({}, "Mars takes norms of whole parameters, and "),
    "NvNovoGrad": ({}, "NvNovoGrad takes norms of whole parameters, and "),
    "SGDP": ({"momentum": 0.9}, "SGDP projects whole matrices, and "),
}


def by_others(config, library, kind, options):
    """Train by an optimizer of another library; return losses, or what is said."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    make = getattr(pytest.importorskip(library, exc_type=ImportError), kind)
    try:
        update = runtime.optimizer(make(network.parameters(), lr=1e-2, **options))
        return [
            runtime.step(
                network, update, functional.cross_entropy, *(t.chunk(count)[share] for t in batch)
            ).item()
            for batch in batches("mlp", steps=3)
        ]
    except UsageError as error:
        return error.message


def compare_with_one_process(config, library, kind, options, said):
    pytest.importorskip(library, exc_type=ImportError)
    found = run_warm(by_others, 2, config, library, kind, options)
    if said is None or not config:
        expected = run_warm(by_others, 1, {}, library, kind, options)[0]
        assert_equal_curves(found, expected)
        assert len(set(expected)) == len(expected)
    else:
        assert [text.startswith(said) for text in found] == [True] * 2


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, *DIVIDED.values()], ids=["dp", *DIVIDED])
@pytest.mark.parametrize("kind", OF_TIMM)
def test_one_of_timm_learns_or_is_refused_by_name(kind, config):
    compare_with_one_process(config, "timm.optim", kind, *OF_TIMM[kind])


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, *DIVIDED.values()], ids=["dp", *DIVIDED])
def test_adafactor_of_transformers_learns_or_is_refused_by_name(config):
    options = {"relative_step": False, "scale_parameter": False}
    said = "Adafactor takes norms of whole rows and columns, and "

    compare_with_one_process(config, "transformers.optimization", "Adafactor", options, said)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, *DIVIDED.values()], ids=["dp", *DIVIDED])
def test_lamb_learns_where_all_parameters_are_of_one_kind(config):
    said = (
        "Lamb cannot update sharded parameters: it needs an operation of plain and sharded tensors "
        "together (_foreach_norm)"
    )

    compare_with_one_process(config, "timm.optim", "Lamb", {}, said if "mesh" in config else None)
