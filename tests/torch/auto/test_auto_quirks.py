"""What a forward does beside computing is done under a plan too, or refused in one sentence."""

from __future__ import annotations

import copy
import math

import auto_quirks
import numpy as np
import pytest
import torch
from auto_quirks import REFUSED, RIGHT, Dropping, Evaluating, Quirk, Reading, Structured, given
from ranks import run_warm
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import msrun
from msrun.parallel.auto.execute import Executor
from msrun.parallel.auto.tracing.trace import trace
from msrun.parallel.search.cost.topology import PRESETS
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.eliminate import solve
from msrun.parallel.search.solve.problem import Edge, Problem, Setting

PLANS = 4
STEPS = 2

pytestmark = pytest.mark.torch


def drawn(problem, rng):
    """Return a plan at random: the best when costs are."""
    edges = [
        Edge(
            edge.source,
            edge.target,
            np.where(np.isinf(edge.seconds), np.inf, rng.random(edge.seconds.shape)),
        )
        for edge in problem.edges
    ]
    chosen = solve(Problem(nodes=list(problem.nodes), edges=edges))[1]
    pairs = zip(problem.nodes, chosen, strict=True)
    return {node.name: tuple(node.rows[at].tolist()) for node, at in pairs}


def learned(net, forward, x):
    """Return losses, gradients and buffers of steps without an optimizer."""
    losses = []
    for _ in range(STEPS):
        loss = forward(x.clone())
        loss.backward()
        losses.append(loss.detach())
    whole = [
        p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in params(net)
    ]
    return [*losses, *whole, *(buffer.clone() for buffer in net.buffers())]


def params(net):
    return [param for param in net.parameters() if param.grad is not None]


def model(name):
    torch.manual_seed(0)
    return RIGHT[name]().double()


def run_plans(name, sizes):
    """Return the largest error of each of several plans."""
    x = given().double()
    net = model(name)
    want = learned(net, net, x)
    traced = trace(model(name), (x,))
    assert not traced.refused
    setting = Setting(sizes=sizes, topology=PRESETS["cpu"])
    problem = build(traced.program, setting)
    rules = {node.name: node.rule for node in problem.nodes}
    mesh, rng = init_device_mesh("cpu", sizes), np.random.default_rng(len(name))
    errors = []
    for _ in range(PLANS):
        net = model(name)
        plan = drawn(problem, rng)
        run = Executor(net, traced, rules, plan, setting=setting, mesh=mesh, seed=0)
        found = learned(net, run, x)
        pairs = zip(want, found, strict=True)
        errors.append(max(float((a - b).abs().max() / (a.abs().max() + 1e-3)) for a, b in pairs))
    return errors


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.few(8)
def test_plans_do_what_the_forward_does(name):
    # A product in bfloat16 is rounded on other numbers of terms.
    bound = 2e-2 if "Autocast" in name else 1e-12
    for errors in run_warm(run_plans, 2, name, (2,)):
        assert max(errors) < bound, errors


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_plans_on_two_axes_do_what_the_forward_does(name):
    bound = 2e-2 if "Autocast" in name else 1e-12
    for errors in run_warm(run_plans, 4, name, (2, 2)):
        assert max(errors) < bound, errors


def said(kind, config=None):
    """Return what refuses to shard a model."""
    torch.manual_seed(0)
    with pytest.raises(msrun.ModelError) as caught:
        msrun.init(config or {"mode": "auto", "mesh": {"dp": 1}}).shard(kind(), sample=(given(),))
    return caught.value.message


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_no_plan_can_do_is_refused(kind):
    (message,) = run_warm(said, 1, kind)
    assert message == f"parallel.mode: auto cannot run {REFUSED[kind]}"


def test_a_number_made_of_tensors_is_refused():
    (message,) = run_warm(said, 1, auto_quirks.ReturnsNumber)
    assert "computes from tensors" in message or "cannot be traced" in message


def test_functions_over_samples_and_shapes_by_values_are_refused():
    (message,) = run_warm(said, 1, auto_quirks.Mapped)
    assert message == (
        "search: the forward of the model uses torch.func or torch.vmap, which mode auto does not "
        "follow"
    )
    (message,) = run_warm(said, 1, auto_quirks.Chosen)
    assert message.startswith("search: the shape of nonzero depends on values of tensors")


def hook_removed_later():
    """Return what the first call after a change of hooks says."""
    torch.manual_seed(0)
    rt, net = msrun.init({"mode": "auto", "mesh": {"dp": 2}}), Dropping()
    hook = net.down.register_forward_hook(lambda _, __, output: output * 2)
    net = rt.shard(net, sample=(given(),))
    hook.remove()
    update = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(msrun.ModelError) as caught:
        rt.step(net, update, given())
    return caught.value.message


def test_hooks_that_are_removed_after_the_trace_are_refused():
    for message in run_warm(hook_removed_later, 2):
        hooks = "hooks of down that were registered or removed after rt.shard"
        assert message == f"parallel.mode: auto cannot run {hooks}"


def hooked(kind, register):
    """Return what refuses a model with a hook."""
    torch.manual_seed(0)
    net = kind()
    register(net)
    with pytest.raises(msrun.ModelError) as caught:
        msrun.init({"mode": "auto", "mesh": {"dp": 1}}).shard(net, sample=(given(),))
    return caught.value.message


def with_backward_hook(net):
    net.up.register_full_backward_hook(lambda *_: None)


def with_pre_hook(net):
    net.register_forward_pre_hook(lambda _, args: (args[0] * 2,))


def with_own_call(net):
    class Called(type(net)):
        def __call__(self, x):
            return super().__call__(x * 0.5)

    net.__class__ = Called


def test_call_of_the_model_that_no_plan_runs_is_refused():
    (message,) = run_warm(hooked, 1, Dropping, with_own_call)
    assert message == "parallel.mode: auto cannot run the __call__ of Called, the model itself,"


def test_hooks_that_no_plan_runs_are_refused():
    (message,) = run_warm(hooked, 1, Dropping, with_backward_hook)
    assert message == "parallel.mode: auto cannot run the backward hook of up"
    (message,) = run_warm(hooked, 1, Dropping, with_pre_hook)
    pre_hook = "the forward pre-hook of Dropping, the model itself,"
    assert message == f"parallel.mode: auto cannot run {pre_hook}"


def hooks_run():
    """Return how often a hook of the model ran, and its output; then the same of one process."""
    rt, x = msrun.init({"mode": "auto", "mesh": {"dp": 2}}), given()
    found = []
    for shard in (True, False):
        torch.manual_seed(0)
        net, calls = Dropping().eval(), []
        net.register_forward_hook(lambda _, __, output, calls=calls: calls.append(1) or output * 2)
        for module in (net.up, net.down):
            module.register_forward_hook(lambda _, __, output: output + 1)
        net.up.weight.tag = "kept"
        if shard:
            part = x.chunk(2)[rt.rank]
            net = rt.shard(net, sample=(part,))
            calls.clear()
        loss = net(part if shard else x)
        loss.backward()
        assert net.up.weight.tag == "kept"
        gradients = [float(net.get_parameter(n).grad.norm()) for n in ("up.weight", "down.weight")]
        found.append((len(calls), loss.item(), *gradients))
    return found


def test_hooks_of_the_model_and_its_parameters_run_once():
    for found, want in run_warm(hooks_run, 2):
        assert want[0] == 1
        assert found == pytest.approx(want, rel=1e-6)


CHANGES = {
    "attribute": (
        "Reading.temperature changed from 1.0 to 0.9",
        lambda n: setattr(n, "temperature", 0.9),
    ),
    "object": (
        "Reading.config.scale changed from 1.0 to 2.0",
        lambda n: setattr(n.config, "scale", 2.0),
    ),
    "class": (
        "Reading.class_scale changed from nothing to 3.0",
        lambda n: setattr(n, "class_scale", 3.0),
    ),
    "tensor": (
        "Reading.plain changed from a tensor to another tensor",
        lambda n: n.plain.mul_(2),
    ),
}


def changed(name):
    """Return what the step after a change says."""
    torch.manual_seed(0)
    rt = msrun.init({"mode": "auto", "mesh": {"dp": 1}})
    net = rt.shard(Reading(), sample=(given(),))
    net(given())
    if name == "global":
        auto_quirks.SCALE = 0.5
    else:
        CHANGES[name][1](net)
    try:
        with pytest.raises(msrun.ModelError) as caught:
            net(given())
    finally:
        auto_quirks.SCALE = 1.0
    return caught.value.message


@pytest.mark.parametrize("name", [*CHANGES, "global"])
def test_a_plain_value_that_changed_is_refused(name):
    (message,) = run_warm(changed, 1, name)
    begin = "auto_quirks.SCALE changed from 1.0 to 0.5" if name == "global" else CHANGES[name][0]
    assert message == f"{begin} after rt.shard; mode auto traced the forward with the first"


def evaluated(kind):
    """Return what evaluation gives, or says."""
    torch.manual_seed(0)
    rt, net = msrun.init({"mode": "auto", "mesh": {"dp": 1}}), kind()
    own = copy.deepcopy(net).eval()
    net = rt.shard(net, sample=(given(),))
    net(given())
    net.eval()
    try:
        return math.isclose(net(given()).item(), own(given()).item(), rel_tol=1e-6)
    except msrun.ModelError as error:
        return error.message


def test_evaluation_is_that_of_one_process_or_refused():
    assert run_warm(evaluated, 1, Dropping) == [True]
    (message,) = run_warm(evaluated, 1, Evaluating)
    assert message.startswith("the forward does something else in evaluation (")


class Parts(Dropping):
    def forward(self, x, *, power=2, shift=None):
        loss = super().forward(x) * power
        return loss if shift is None else loss + shift


def modes_and_arguments():
    """Return modes of modules after `rt.shard`, and what calls with other arguments say."""
    torch.manual_seed(0)
    rt, net = msrun.init({"mode": "auto", "mesh": {"dp": 1}}), Parts()
    net.up.eval()
    net = rt.shard(net, sample=(given(),))
    modes = (net.training, net.up.training, net.down.training)
    messages = []
    for change in (
        lambda: net(given(), power=3),
        lambda: net(given(), shift=torch.ones(())),
        lambda: net(given(), given()),
        lambda: net(x=given()) and net.up.train() and net(given()),
    ):
        with pytest.raises(msrun.ModelError) as caught:
            change()
        messages.append(caught.value.message)
    return modes, messages


def test_modes_stay_and_other_arguments_are_refused():
    ((modes, messages),) = run_warm(modes_and_arguments, 1)
    assert modes == (True, False, True)
    assert messages[0] == "the model got power, which the sample of rt.shard had not"
    assert messages[1] == "the model got shift, which the sample of rt.shard had not"
    assert messages[2].startswith("the forward of the model takes other inputs: too many")
    assert messages[3].startswith("up was in eval mode when mode auto traced it")


def structured(mesh):
    """Return an output with everything that a model may return."""
    torch.manual_seed(0)
    rt = msrun.init({"mode": "auto", "mesh": mesh})
    part = given().chunk(rt.layout.size("dp"))[rt.coordinate.get("dp", 0)]
    net = rt.shard(DroppingStructured(), sample=(part,))
    output = net(part)
    with pytest.raises(msrun.ModelError) as caught:
        output["cache"].keys()
    answer, others = output["more"]
    plain = output["count"], answer.note, answer.missing, others[1:]
    return plain, output["loss"].item(), caught.value.message


class DroppingStructured(Structured):
    def forward(self, x):
        return super().forward(functional.dropout(x, 1e-9, training=True))


def test_outputs_of_any_structure_come_back():
    torch.manual_seed(0)
    want = Quirk(), given()
    for plain, loss, message in run_warm(structured, 2, {"dp": 2}):
        assert plain == (3, "twice", None, (None, torch.float32))
        net, x = want
        assert loss == pytest.approx(float(net.down(net.up(x)).square().mean().detach()))
        assert message == "parallel.mode: auto does not compute the Cache that the model returns"


class Rows(torch.nn.Module):
    """A table with sparse gradients."""

    def __init__(self, kind):
        super().__init__()
        self.table, self.head = kind(32, 16, sparse=True), torch.nn.Linear(16, 8)

    def forward(self, x):
        found = self.table(x)
        return self.head(found if found.dim() == 2 else found.mean(1))


def looked_up(kind, config, name="SGD"):
    """Return losses, or what refuses the optimizer."""
    torch.manual_seed(0)
    rt, net = msrun.init(config), Rows(kind).double()
    words = torch.randint(0, 32, (16, 4), generator=torch.Generator().manual_seed(1))
    count, share = rt.layout.axes.get("dp", 1), rt.coordinate.get("dp", 0)
    x, y = (part.chunk(count)[share] for part in (words, words[:, 0] % 8))
    net = rt.shard(net, sample=(x,))
    try:
        optimizer = rt.optimizer(getattr(torch.optim, name)(net.table.parameters(), lr=0.5))
    except msrun.ModelError as error:
        return error.message
    return [rt.step(net, optimizer, functional.cross_entropy, x, y).item() for _ in range(3)]


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_sparse_gradients_learn_what_they_do_in_one_process(kind):
    auto = {"mode": "auto", "mesh": {"dp": 2}}
    (losses,) = run_warm(looked_up, 1, kind, {})
    for found in run_warm(looked_up, 2, kind, auto):
        assert found == pytest.approx(losses, rel=1e-9)
    for said in run_warm(looked_up, 2, kind, auto, "SparseAdam"):
        assert isinstance(said, list) or said.startswith("SparseAdam takes sparse gradients")


class Pairs(torch.nn.Module):
    """Scores of all pairs of samples, as CLIP has them; an executor runs it, since it drops."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 8)

    def forward(self, x):
        h = functional.dropout(self.up(x), 1e-9, training=self.training)
        return h @ h.t()


def paired():
    rt = msrun.init({"mode": "auto", "mesh": {"dp": 2}})
    with pytest.raises(msrun.ModelError) as caught:
        rt.shard(Pairs(), sample=(given().chunk(2)[rt.rank],))
    return caught.value.message


def test_outputs_of_pairs_of_samples_are_refused():
    said = (
        "parallel.mode: auto gives a rank samples of the whole batch, and an output of Pairs has "
        "the shape [4, 4] for those of one rank and [8, 8] for all"
    )
    assert run_warm(paired, 2) == [said] * 2
