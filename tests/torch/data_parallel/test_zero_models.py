"""Models that `fully_shard` refuses, as people write them, train under ZeRO or are named."""

import pytest
import torch
from ranks import OPTIMIZERS, assert_equal_curves, batches, run_warm
from test_grid import zero
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError, UsageError
from msrun.parallel.data_parallel.gathered.used_outside import units_used_outside
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch


class Nested(nn.Module):
    """Lists in a list, and a dict of modules."""

    def __init__(self):
        super().__init__()
        pairs = [nn.ModuleList([nn.Linear(16, 16), nn.LayerNorm(16)]) for _ in range(2)]
        self.layers = nn.ModuleList([*pairs, nn.ModuleDict({"last": nn.Linear(16, 16)})])
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        for linear, norm in self.layers[:2]:
            x = x + norm(linear(x))
        return self.head(self.layers[2]["last"](x))


class Scalar(nn.Module):
    """A temperature in a block, as CLIP has one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 10)])
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.layers[1](self.layers[0](x).relu()) * self.logit_scale.exp()


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, padding=1)
        self.head = nn.Linear(24, 10)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.head(self.conv(x.view(-1, 4, 2, 2)).flatten(1))


class Types(nn.Module):
    """Blocks of one type with norms of another, and both types beside the blocks."""

    def __init__(self):
        super().__init__()
        block = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16).double(), nn.Linear(16, 10))
        self.layers = nn.ModuleList([block])
        self.factor = nn.Parameter(torch.ones(10, dtype=torch.float64))
        self.offset = nn.Parameter(torch.zeros(10))
        block[1].register_forward_pre_hook(lambda _, args: (args[0].double(),))
        block[1].register_forward_hook(lambda *results: results[-1].float())

    def forward(self, x):
        return self.layers[0](x) * self.factor.float() + self.offset


class Lists(nn.Module):
    """Parameters in lists and dicts of their own."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(16, 16) / 4) for _ in range(2)])
        self.biases = nn.ParameterDict({"last": nn.Parameter(torch.zeros(10))})
        self.head = nn.Linear(16, 10, bias=False)

    def forward(self, x):
        for weight in self.weights:
            x = x @ weight
        return self.head(x) + self.biases["last"]


class Outside(nn.Module):
    """Uses the weight of one layer without calling it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        first = self.first
        return self.head(functional.linear(x, first.weight, first.bias))


class Observed(Outside):
    """Writes the maximum of a weight to a buffer, as an observer of quantization does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        first = self.first
        with torch.no_grad():
            self.largest.copy_(first.weight.amax())
        return super().forward(x)


class Seen(nn.Module):
    """Uses parts of its blocks and of its head, and its code says so."""

    class Layer(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = nn.Linear(16, width)

        def forward(self, x):
            return self.linear(x)

        def bent(self, x):
            return self.linear(x).relu()

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(16) for _ in range(4)])
        self.head = self.Layer(10)

    def forward(self, x):
        x = self.layers[0].linear(x)
        for layer in self.layers[1:3]:
            x = x + layer(x)
        return self.head.bent(self.layers[-1].bent(x)) + self.head.linear.bias


class SeenAlone(nn.Module):
    """Uses the weight of a layer that is no member of a list, before it is called."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.first(x @ self.first.weight))


class Method(nn.Module):
    """Calls another method of its blocks than forward."""

    class Layer(nn.Linear):
        def transform(self, x):
            return self(x).relu() + self.bias

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(16, 16), self.Layer(16, 10)])

    def forward(self, x):
        for layer in self.layers:
            x = layer.transform(x)
        return x


RIGHT = (Nested, Scalar, ChannelsLast, Types, Lists, Seen, SeenAlone)


def built(kind):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return kind()


def learned(config, kind, loss_fn=functional.cross_entropy):
    runtime = msrun.init(config)
    try:
        network = runtime.shard(built(kind))
        update = runtime.optimizer(OPTIMIZERS["adamw"](network.parameters()))
        loss_fn = loss_fn if loss_fn is functional.cross_entropy else loss_fn(network)
        share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
        return [
            runtime.step(network, update, loss_fn, *(t.chunk(count)[share] for t in batch)).item()
            for batch in batches("mlp")
        ]
    except UsageError as error:
        return error.message


@pytest.mark.few(12)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("kind", RIGHT)
def test_it_learns_what_it_learns_in_one_process(kind, level, ranks):
    expected = run_warm(learned, 1, {}, kind)[0]

    assert_equal_curves(run_warm(learned, ranks, zero(level), kind), expected)


NOT_GATHERED = (
    "parallel.optimizer.zero: a parameter was used outside of the forward of its module, where "
    "level {} has not gathered it: of {}"
)


@pytest.mark.parametrize("kind", [Outside, Observed])
@pytest.mark.parametrize("level", [1, 3])
def test_a_parameter_outside_of_its_module_is_refused(level, kind):
    found = run_warm(learned, 2, zero(level), kind)

    assert found == 2 * [NOT_GATHERED.format(level, "first, head")]


def test_a_method_of_a_block_may_use_what_stays_gathered():
    """Below level 3 a layer that was called stays so."""
    assert_equal_curves(run_warm(learned, 2, zero(1), Method), run_warm(learned, 1, {}, Method)[0])
    assert run_warm(learned, 2, zero(3), Method) == 2 * [
        NOT_GATHERED.format(3, "layers.0, layers.1")
    ]


class WritesInput(nn.Module):
    """Has a layer that writes what the layer before it returned."""

    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x.mul_(0.5) if x.requires_grad else x)

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(self.Layer(16, 16), self.Layer(16, 10))

    def forward(self, x):
        return self.layers(x)


def in_plain_loops(level, kinds):
    """Return the sentence of each kind of model in a loop of the script."""
    found = []
    for kind in kinds:
        model = msrun.init(zero(level)).shard(kind())
        with pytest.raises(UsageError) as caught:
            model(torch.ones(2, 16)).sum().backward()
        found.append(caught.value.message)
    return found


@pytest.mark.parametrize("level", [1, 3])
def test_plain_loops_are_told_the_same(level):
    sentence = (
        "parallel.optimizer.zero: a module writes its input in place, which is a view of what "
        "torch watches there"
    )
    outside = NOT_GATHERED.format(level, "first, head")
    assert run_warm(in_plain_loops, 2, level, [WritesInput, Outside]) == 2 * [[sentence, outside]]


def test_what_code_uses_by_itself_is_no_unit():
    layers = {f"layers.{at}" for at in range(4)}
    assert units_used_outside(Seen(), layers) == {"layers.0", "layers.3"}
    assert units_used_outside(SeenAlone(), {"first", "head"}) == {"first"}
    assert units_used_outside(Nested(), {"layers.0.0", "layers.2.last", "head"}) == set()


def test_parameters_of_no_unit_are_gathered_all_through_forward():
    config = zero(3, modules=["head"])

    assert_equal_curves(run_warm(learned, 2, config, Outside), run_warm(learned, 1, {}, Outside)[0])


def penalized(network):
    """Return a loss with a penalty on weights, whole ones."""

    def loss_fn(output, target):
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in network.parameters()]
        penalty = sum(weight.square().sum() for weight in whole)
        return functional.cross_entropy(output, target) + 0.1 * penalty

    return loss_fn


def carelessly_penalized(network):
    """Return the same as scripts write it for one process."""

    def loss_fn(output, target):
        penalty = sum(weight.square().sum() for weight in network.parameters())
        return functional.cross_entropy(output, target) + 0.1 * penalty

    return loss_fn


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_penalty_on_whole_weights(level):
    expected = run_warm(learned, 1, {}, Outside, penalized)[0]
    config = zero(level, modules=["head"])

    assert_equal_curves(run_warm(learned, 2, config, Outside, penalized), expected)


def test_a_penalty_on_parts_is_refused():
    expected = run_warm(learned, 1, {}, Lists, carelessly_penalized)[0]

    assert_equal_curves(run_warm(learned, 2, zero(1), Lists, carelessly_penalized), expected)
    assert run_warm(learned, 2, zero(3), Lists, carelessly_penalized) == 2 * [
        NOT_GATHERED.format(3, "head")
    ]


def test_mixed_types_and_a_type_to_compute_in_are_refused():
    sentence = (
        "parallel.optimizer.dtype: layers.0.1.weight is torch.float64 and other parameters of "
        "layers.0 are torch.float32"
    )
    assert run_warm(learned, 2, zero(2, dtype="bfloat16"), Types) == [sentence] * 2


def test_a_list_as_a_unit_is_refused():
    config = zero(2, modules=["layers.0"])

    assert run_warm(learned, 2, config, Nested) == 2 * [
        "parallel.optimizer.modules: layers.0 is a ModuleList, which has no forward"
    ]


def test_a_model_without_a_forward_is_refused():
    sentence = (
        "parallel.optimizer.zero: ModuleList has no forward, before which its parameters could be "
        "gathered"
    )
    assert run_warm(learned, 2, zero(1), nn.ModuleList) == [sentence] * 2


class Dropping(nn.Module):
    """Drops layers at random, as encoders of transformers do in training."""

    def __init__(self, rate):
        super().__init__()
        self.layers, self.layerdrop = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)]), rate

    def forward(self, x):
        for layer in self.layers:
            if not (self.training and torch.rand([]) < self.layerdrop):
                x = x + layer(x)
        return x


def dropping(config, rate):
    try:
        model = msrun.init(config).shard(Dropping(rate), sample=(torch.ones(4, 16),))
    except UsageError as error:
        return error.message, error.hint
    return type(model).__name__


def test_layers_dropped_at_random_are_refused_where_ranks_gather_them():
    sentence = (
        "parallel.optimizer.zero: Dropping drops layers at random (layerdrop 0.1), and all ranks "
        "must gather the same ones"
    )
    expected = [(sentence, "set layerdrop to 0, or choose zero 0")] * 2
    assert run_warm(dropping, 2, zero(3), 0.1) == expected
    assert run_warm(dropping, 2, zero(3), 0.0) == ["FSDPDropping"] * 2
    assert run_warm(dropping, 2, {}, 0.1) == ["Dropping"] * 2


def test_stages_refuse_layers_dropped_at_random():
    stages = {"layers.0": 0, "layers.1": 1}
    config = {"mesh": {"pp": 2}, "pipeline": {"stages": stages, "microbatches": 2}}
    for message, hint in run_warm(dropping, 2, config, 0.1):
        assert message.startswith(
            "parallel.pipeline.stages: forward reads the value of a tensor (__bool__), which other "
            "stages do not have (test_zero_models.py, line "
        )
        assert hint.endswith("; layers dropped at random (layerdrop) need a rate of 0")


def compiled(config):
    model = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 10)), backend="eager")
    try:
        msrun.init(config).shard(model)
    except UsageError as error:
        return error.message
    return None


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (zero(1), "optimizer.zero"),
        ({"mesh": {"tp": 2}, "plan": [{"match": "*", "style": "colwise"}]}, "plan"),
        (
            {"mesh": {"pp": 2}, "pipeline": {"stages": {"0": 0, "1": 1}, "microbatches": 2}},
            "pipeline",
        ),
    ],
)
def test_what_torch_compile_returned_is_refused(config, key):
    expected = f"parallel.{key}: rt.shard got what torch.compile returned, of which it can shard "
    assert run_warm(compiled, 2, config) == [expected + "nothing that is compiled"] * 2


class Converting(nn.Module):
    """Converts a layer in its forward, as the router of Switch Transformers does."""

    def __init__(self):
        super().__init__()
        self.router, self.head = nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x):
        chosen = self.router.to(torch.float64)(x.double()).softmax(-1)
        return self.head(x * chosen.to(x.dtype))


def converting(config):
    runtime = msrun.init(config)
    model = runtime.shard(Converting())
    before = [full_tensor(param.detach()).clone() for param in model.parameters()]
    update = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ModelError) as caught:
        runtime.step(model, update, functional.cross_entropy, *batches("mlp")[0])
    after = [full_tensor(param.detach()).float() for param in model.parameters()]
    return caught.value.message, all(map(torch.equal, before, after))


@pytest.mark.parametrize("level", [1, 3])
def test_a_forward_that_changes_the_type_of_a_parameter_is_refused(level):
    sentence = (
        "parallel.optimizer.zero: router.weight is another tensor than in rt.shard, or has another "
        "type, as in torch.func.functional_call or after model.to(dtype), and its module would "
        "compute with the one that is gathered"
    )
    assert run_warm(converting, 2, zero(level)) == [(sentence, True)] * 2
