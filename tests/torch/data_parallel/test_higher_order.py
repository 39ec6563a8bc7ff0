"""Models with `torch.cond`, and hooks of all modules, are as in one process or refused by name."""

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as modules

import msrun
from msrun.errors import ModelError

pytestmark = [
    pytest.mark.torch,
    # torch warns so in one process, too.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

PLAN = [{"match": "first", "style": "colwise"}, {"match": "second", "style": "rowwise"}]
STAGES = {"stages": {"first": 0, "second": 0, "head": 1}, "microbatches": 2}
CONFIGS = {
    "dp": {},
    "accumulate": {"accumulate": 2},
    "zero 3": {"optimizer": {"zero": 3}},
    "tp": {"mesh": {"tp": 2}, "plan": PLAN},
    "pp": {"mesh": {"pp": 2}, "pipeline": STAGES},
    "auto": {"mode": "auto", "mesh": {"dp": 2}},
    "verify layers": {"verify": {"modules": ["*"]}},
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 10)

    def hidden(self, x):
        return self.second(functional.relu(self.first(x)))

    def forward(self, x):
        return self.head(self.hidden(x))


class Between(Net):
    """Chooses between two functions of a tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("is_even", torch.tensor(1, dtype=torch.bool))

    def forward(self, x):
        args = (self.hidden(x),)
        return self.head(torch.cond(self.is_even, torch.sin, torch.cos, args))


class Around(Net):
    """Calls modules in the functions that it chooses between."""

    def forward(self, x):
        pred = torch.ones((), dtype=torch.bool)
        return self.head(torch.cond(pred, self.hidden, lambda y: self.hidden(y) * 2, (x,)))


def louder(module, args, output):  # noqa: ARG001 - a hook of all modules
    return output * 1.1


def steeper(module, inputs, outputs):  # noqa: ARG001 - a hook of all modules
    return tuple(None if gradient is None else gradient * 1.3 for gradient in inputs)


HOOKS = {
    "forward": (modules.register_module_forward_hook, louder),
    "backward": (modules.register_module_full_backward_hook, steeper),
}


def _losses(config, make, hook=None):
    torch.manual_seed(3)
    runtime = msrun.init(config)
    generator = torch.Generator().manual_seed(1)
    steps = [
        (
            torch.randn(8, 16, generator=generator),
            torch.randint(0, 10, (8,), generator=generator),
        )
        for _ in range(3)
    ]
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.axes.get("dp", 1)
    parts = [[tensor.chunk(count)[share] for tensor in batch] for batch in steps]
    needs_sample = runtime.config.mode == "auto" or runtime.config.pipeline
    try:
        model = runtime.shard(make(), parts[0][:1] if needs_sample else None)
        handle = HOOKS[hook][0](HOOKS[hook][1]) if hook else None
        update = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        try:
            return [
                runtime.step(model, update, functional.cross_entropy, *part).item()
                for part in parts
            ]
        finally:
            if handle:
                handle.remove()
    except ModelError as error:
        return error.message


@pytest.mark.sampled
@pytest.mark.parametrize("make", [Between, Around])
@pytest.mark.parametrize("case", ["dp", "accumulate", "verify layers"])
def test_a_choice_of_functions(make, case):
    expected = run_warm(_losses, 1, {}, make)[0]
    for found in run_warm(_losses, 2, CONFIGS[case], make):
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("case", "key"), [("zero 3", "parallel.optimizer.zero"), ("tp", "parallel.plan")]
)
def test_a_choice_between_modules_that_are_sharded_is_refused(case, key):
    for found in run_warm(_losses, 2, CONFIGS[case], Around):
        assert isinstance(found, str)
        assert found.startswith(f"{key}: torch.cond or another operator that compiles what it ")


@pytest.mark.sampled
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("case", ["dp", "zero 3", "tp", "accumulate"])
def test_hooks_of_all_modules(case, hook):
    expected = run_warm(_losses, 1, {}, Net, hook)[0]
    for found in run_warm(_losses, 2, CONFIGS[case], Net, hook):
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("case", ["pp", "auto"])
def test_hooks_of_all_modules_are_refused_where_the_model_is_not_called(case):
    for found in run_warm(_losses, 2, CONFIGS[case], Net, "forward"):
        assert "a hook of torch.nn.modules.module, such as of register_module_" in found
