"""Steps on the host beside the next forward: who needs a parameter waits for its module alone."""

import copy
import tempfile
import threading
from argparse import Namespace
from concurrent.futures import Executor, Future

import pytest
import torch
from ranks import MODELS, OPTIMIZERS, batches, build, run_warm
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import msrun
from msrun.errors import ConfigError, UsageError
from msrun.parallel.config_file import read_config
from msrun.parallel.host.overlapped_step import OverlappedStep
from msrun.parallel.local import full_tensor

pytestmark = [
    pytest.mark.own_process,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

WIDTH, ROWS, PATIENCE = 16, 8, 60.0
# Biases stay whole.
HOST = {"optimizer": {"zero": 3, "offload": True, "threshold": "256"}}
OVERLAP = {"optimizer": HOST["optimizer"] | {"offload": "overlap"}}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def begin(rt, executor=None, kind=torch.optim.AdamW):
    """Return a model and its optimizer; with an executor, steps of them overlap in it."""
    torch.manual_seed(3)
    model = rt.shard(Net())
    if executor:
        rt.sharded(model).host_step = OverlappedStep(model, executor)
    return model, rt.optimizer(kind(model.parameters(), lr=0.1))


def step(rt, model, update, seed=5):
    torch.manual_seed(seed)
    return rt.step(model, update, functional.mse_loss, *torch.randn(2, ROWS, WIDTH))


class Gated(Executor):
    """Runs each update in a thread of its own, once its gate is open."""

    def __init__(self):
        self.events, self.gates = [], []

    def submit(self, call):
        future, gate = Future(), threading.Event()
        number = len(self.gates)
        self.gates.append(gate)

        def run():
            if not gate.wait(PATIENCE):
                future.set_exception(TimeoutError(f"nobody opened gate {number}"))
                return
            call()
            self.events.append(f"updated {number}")
            future.set_result(None)

        threading.Thread(target=run, daemon=True).start()
        return future


def test_a_module_waits_for_its_own_parameters_alone():
    with msrun.init(HOST) as rt:
        model, update = begin(rt)
        expected = [step(rt, model, update, seed).item() for seed in (5, 6)]
        gated = Gated()
        model, update = begin(rt, gated)
        losses = [step(rt, model, update, 5).item()]
        assert gated.events == []  # the step is over, and nothing is updated

        def ran(number):
            gated.events.append(f"ran {number}")
            for gate in gated.gates[number + 1 : number + 2]:
                gate.set()

        for number, layer in enumerate(model.layers):
            layer.register_forward_hook(lambda *_, number=number: ran(number))
        gated.gates[0].set()
        losses.append(step(rt, model, update, 6).item())
        for gate in gated.gates:
            gate.set()
        rt.sharded(model).host_step.settle()

    assert gated.events[:6] == ["updated 0", "ran 0", "updated 1", "ran 1", "updated 2", "ran 2"]
    assert losses == expected


class Lazy(Executor):
    """Runs an update when somebody waits for it, so what does not wait sees the values before."""

    def submit(self, call):
        class Later(Future):
            def result(self, timeout=None):
                if not self.done():
                    call()
                    self.set_result(None)
                return super().result(timeout)

        return Later()


def weights(model):
    return [full_tensor(param.detach()).clone() for param in model.parameters()]


def evaluated(at):
    with torch.no_grad():
        return [at.model(torch.ones(1, WIDTH))]


def changed(at):
    with torch.no_grad():
        for param in at.model.parameters():
            param.mul_(0.5)
    return weights(at.model)


def averaged(at):
    params = [
        param.to_local() if hasattr(param, "to_local") else param for param in at.model.parameters()
    ]
    return torch._foreach_mul([param.detach() for param in params], 2.0)


def slower(at):
    for group in at.update.param_groups:
        group["lr"] = 0.0  # of the next step
    return weights(at.model)


def zeroed(at):
    for param in at.model.parameters():
        param.grad.zero_()
    return weights(at.model)


def forgotten(at):
    at.update.zero_grad()
    return weights(at.model)


def clipped(at):
    norm = at.rt.clip_grad_norm_(at.model, 1e-3)
    return [norm, *(full_tensor(param.grad) for param in at.model.parameters()), *weights(at.model)]


def plain(at):
    at.update.step()
    return weights(at.model)


def remembered(at):
    state = dict(at.update.state)
    return [state[param]["exp_avg_sq"].detach().clone() for param in at.model.parameters()]


def saved(at):
    state = at.update.state_dict()["state"]
    return [*at.model.state_dict().values(), *(state[key]["exp_avg"] for key in sorted(state))]


def whole(at):
    return list(at.rt.state_dict(at.model).values())


def copied(at):
    return [copy.deepcopy(layer.bias) for layer in at.model.layers]


def stored(at):
    with tempfile.TemporaryDirectory() as folder:
        at.rt.save(at.model, at.update, step=1, path=f"{folder}/step")
        model, update = begin(at.rt)
        at.rt.load(model, update, path=f"{folder}/step")
    state = dict(update.state)
    return [*weights(model), *(state[param]["exp_avg"] for param in model.parameters())]


def followed(at):
    bias = torch.zeros(WIDTH)
    bias.lerp_(at.model.layers[1].bias.detach(), 0.5)
    with torch.no_grad():
        bias.add_(at.model.layers[2].bias)
        bias.copy_(bias + at.model.layers[0].bias)
    return [bias, torch.tensor(at.model.layers[2].bias.tolist()), at.model.layers[1].weight]


def functions(at):
    bias = at.model.layers[0].bias
    found = [functional.linear(torch.ones(1, WIDTH), torch.eye(WIDTH), bias), torch.cat([bias] * 2)]
    return [*found, bias + 1, 1 + bias, bias[0], bias.data, torch.stack([bias, bias]).sum(), -bias]


def next_steps(at):
    return [step(at.rt, at.model, at.update, seed) for seed in (6, 7)] + weights(at.model)


def watched(at):
    seen = []
    at.update.register_step_post_hook(lambda *_: seen.extend(weights(at.model)))
    step(at.rt, at.model, at.update, 6)
    return seen


LOOKS = [
    *(evaluated, changed, averaged, slower, zeroed, forgotten, clipped, plain, remembered, saved),
    *(stored, followed, whole, copied, functions, next_steps, watched),
]


def seen(rt, executor, look):
    """Return what `look` sees behind a step."""
    model, update = begin(rt, executor)
    before = weights(model)
    step(rt, model, update)
    assert any("msrun_update" in vars(param) for param in model.parameters()) is bool(executor)
    found = look(Namespace(rt=rt, model=model, update=update))
    assert not all(map(torch.equal, before, weights(model)))
    return [full_tensor(value.detach()) for value in found]


def test_whoever_looks_at_a_step_sees_it_done():
    with msrun.init(HOST) as rt:
        wrong = [
            look.__name__
            for look in LOOKS
            if not all(map(torch.equal, seen(rt, None, look), seen(rt, Lazy(), look)))
        ]
    assert wrong == []


def test_what_the_update_raises_is_raised_where_it_is_waited_for():
    class Failing(Executor):
        def submit(self, _):
            future = Future()
            future.set_exception(ValueError("no"))
            return future

    with msrun.init(HOST) as rt:
        model, update = begin(rt, Failing())
        step(rt, model, update)
        with pytest.raises(ValueError, match="no"):
            step(rt, model, update)
        with pytest.raises(ValueError, match="no"):  # of the other modules
            rt.finish()


def test_hooks_of_all_optimizers_see_the_step_of_the_script_alone():
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer)),
        register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer)),
    ]
    with msrun.init(OVERLAP) as rt:
        model, update = begin(rt)
        step(rt, model, update)
        rt.sharded(model).host_step.settle()
    for handle in handles:
        handle.remove()

    assert seen == [update] * 2


def test_optimizers_that_are_not_known_are_refused():
    class Own(torch.optim.SGD):
        pass

    with msrun.init(OVERLAP) as rt:
        model, update = begin(rt, kind=Own)
        with pytest.raises(UsageError) as refused:
            step(rt, model, update)
    assert refused.value.message == (
        "parallel.optimizer.offload: overlap updates each parameter by itself, in a thread, and "
        "Own is not known to do so (choose SGD, Adam, AdamW, Adamax, NAdam, RAdam, Adagrad, "
        "Adadelta, RMSprop)"
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"compile": {"modules": ["layers.*"]}}, "compiled modules read parameters unseen"),
        ({"verify": 1}, "verify compares weights after each step"),
        (
            {"mesh": {"pp": 2, "dp": 1}, "pipeline": {"stages": "auto", "microbatches": 2}},
            "a pipeline has no forward of the whole model to overlap",
        ),
    ],
)
def test_what_cannot_overlap_is_refused(other, said):
    with pytest.raises(ConfigError) as refused:
        read_config(OVERLAP | other)
    assert f"parallel.optimizer: offload overlap: {said}" in refused.value.message


PLAN = [
    {"match": "layers.*.up", "style": "colwise"},
    {"match": "layers.*.down", "style": "rowwise"},
]
LAYOUTS = {
    "zero 1": ({"zero": 1}, {}),
    "zero 2, accumulate": ({"zero": 2}, {"accumulate": 2}),
    "zero 3": ({"zero": 3}, {}),
    "zero 3, threshold": ({"zero": 3, "threshold": "1KiB"}, {}),
    "zero 3, recompute": ({"zero": 3}, {"recompute": {"modules": ["layers.*"]}}),
    "zero 3, dp x tp": ({"zero": 3}, {"mesh": {"dp": 2, "tp": 2}, "plan": PLAN}),
    "zero 3, cp": (
        {"zero": 3},
        {"mesh": {"dp": 1, "cp": 2}, "plan": [{"match": "*", "style": "context"}]},
    ),
    "zero 3, bf16": ({"zero": 3}, {"precision": "bf16"}),
    "zero 3, fp16": ({"zero": 3}, {"precision": "fp16"}),
    "zero 3, place": ({"zero": 3}, {"place": {"position": "cpu"}}),
}


def trained(config, optimizer):
    """Return losses and weights after steps with a scheduler."""
    rt = msrun.init(config)
    model = rt.shard(build("transformer"))
    update = rt.optimizer(OPTIMIZERS[optimizer](model.parameters()))
    rates = torch.optim.lr_scheduler.LinearLR(update)
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    losses = []
    for batch in batches("transformer"):
        part = [t.chunk(count)[share] for t in batch]
        losses.append(rt.step(model, update, MODELS["transformer"][1], *part, max_norm=0.5).item())
        rates.step()
    found = {name: full_tensor(p.detach()) for name, p in model.named_parameters()}
    rt.close()
    return losses, found


def both(names):
    """Return of each layout whether steps that overlap give the same."""
    found = {}
    for name in names:
        zero, other = LAYOUTS[name]
        for optimizer in OPTIMIZERS:
            losses, whole = trained(other | {"optimizer": zero | {"offload": True}}, optimizer)
            others, after = trained(other | {"optimizer": zero | {"offload": "overlap"}}, optimizer)
            same = all(torch.equal(weight, after[key]) for key, weight in whole.items())
            found[name, optimizer] = losses == others and same
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_layout_is_the_same_to_the_bit():
    of_four = [name for name in LAYOUTS if "dp x" in name]
    of_two = [name for name in LAYOUTS if name not in of_four]
    for ranks, names in ((2, of_two), (4, of_four)):
        for found in run_warm(both, ranks, names, timeout=300):
            assert [name for name, is_same in found.items() if not is_same] == []
