"""Models whose forward mixes samples: noticed in the first step, and only those."""

import io
import warnings
from functools import partial

import pytest
import torch
from mixing_functions import (
    BY_ORDER,
    BY_POSITION,
    MIXING,
    RIGHT,
    WIDTH,
    first_sample_is_the_reference,
    in_chunks,
    normal,
)
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError
from msrun.parallel.losses.sample_watch import SampleWatch

pytestmark = pytest.mark.torch

SAMPLES = 4
NOTICED = MIXING | BY_POSITION | BY_ORDER


class Network(nn.Module):
    """Two layers with a function between; it returns its loss if it gets a target."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.between = between

    def forward(self, x, target=None):
        output = self.last(self.between(self.first(x)).reshape(len(x), WIDTH))
        return output if target is None else functional.cross_entropy(output, target)


def batch(samples=SAMPLES):
    torch.manual_seed(1)
    return torch.randn(samples, WIDTH), torch.arange(samples) % 5


def noticed(between, *, is_cut=True):
    torch.manual_seed(0)
    x, target = batch()
    model = Network(between)
    with SampleWatch((x, target), SAMPLES) as watch:
        loss = model(x, target)
    return watch.read(loss, is_cut=is_cut)


@pytest.mark.parametrize("between", NOTICED, ids=lambda function: function.__name__)
def test_a_model_that_mixes_samples_is_noticed(between):
    error = noticed(between)

    assert error is not None
    assert NOTICED[between] in error.message
    assert "verify: first_step" in error.hint


def filled_by_columns(h):
    output = torch.zeros_like(h)
    output[:, :2] = h[:, :2]
    output[..., 2:] = h[:, 2:].square()
    return output


def filled_by_stacks(h):
    output = h.new_zeros(2, len(h), WIDTH)
    output[0], output[1, :] = h, 2 * h
    return output.sum(0)


def filled_as_a_whole(h):
    output = torch.empty_like(h)
    output.copy_(h)
    return output


def added_to_nothing(h):
    output = torch.zeros_like(h)
    output += h
    return output


def with_written_values(h):
    h = h * 2
    h[:, 0] = 1.0
    h[h > 1] = 0.5
    return h


# Functions that keep samples apart, on (samples, WIDTH).
KEEPING = {
    "prelu": lambda h: functional.prelu(h, torch.tensor([0.1])),
    "threshold in place": lambda h: functional.threshold_(h.clone(), 0.1, 0.0),
    "logaddexp": lambda h: torch.logaddexp(h, h),
    "sinh": torch.sinh,
    "erfcx": torch.special.erfcx,
    "addcmul": lambda h: torch.addcmul(h, h, h),
    "of complex numbers": lambda h: torch.view_as_real(h * torch.tensor(1j)).sum(-1),
    "glu": lambda h: functional.glu(torch.cat([h, h], 1)),
    "unbind": lambda h: torch.stack([h, h]).unbind(0)[1],
    "unbind of stacked columns": lambda h: torch.stack(h.unbind(1), 1),
    "select": lambda h: h.unsqueeze(1).select(1, 0),
    "narrow": lambda h: torch.cat([h, h], 1).narrow(1, 0, WIDTH),
    "pad": lambda h: functional.pad(h, (1, 1))[:, 1:-1],
    "filled by columns": filled_by_columns,
    "filled by stacks": filled_by_stacks,
    "filled as a whole": filled_as_a_whole,
    "added to nothing": added_to_nothing,
    "with written values": with_written_values,
}


@pytest.mark.parametrize("keeps", KEEPING.values(), ids=KEEPING)
def test_what_keeps_samples_apart_is_followed(keeps):
    error = noticed(lambda h: normal(keeps(h)))

    assert error is not None
    assert "a std over samples" in error.message
    assert noticed(keeps) is None


@pytest.mark.parametrize("between", RIGHT, ids=lambda function: function.__name__)
def test_a_model_that_does_not_is_right(between):
    assert noticed(between) is None


def test_a_penalty_that_is_linear_in_a_mean_is_right():
    x, target = batch()
    layer = nn.Linear(WIDTH, 5)
    with SampleWatch((x, target), SAMPLES) as watch:
        output = layer(x)
        loss = functional.cross_entropy(output, target) + 0.1 * output.square().mean(0).sum()
    assert watch.read(loss, is_cut=True) is None


@pytest.mark.parametrize("places", [torch.vmap, torch.func.functional_call])
def test_transformed_functions_are_run_as_they_are(places):
    x, target = batch()
    layer = nn.Linear(WIDTH, 5)
    with SampleWatch((x, target), SAMPLES) as watch:
        if places is torch.vmap:
            output = torch.vmap(lambda row: layer(row - row.mean(0)).relu())(x)
        else:
            output = torch.func.functional_call(layer, dict(layer.named_parameters()), (x,))
        loss = functional.cross_entropy(output, target)
    assert watch.read(loss, is_cut=True) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_kinds_of_tensors_are_not_followed():
    x, target = batch()
    layer = nn.Linear(WIDTH, 5)
    with SampleWatch((x, target), SAMPLES) as watch:
        texts = [row.expand(2 + index, -1) for index, row in enumerate(x)]
        output = layer(torch.nested.as_nested_tensor(texts).relu().transpose(1, 2).transpose(1, 2))
        means = torch.stack([text.mean(0) for text in output.unbind()])
        loss = functional.cross_entropy(means, target)
    assert watch.read(loss, is_cut=True) is None


def test_inputs_by_their_own_statistics_are_noticed():
    x, target = batch()
    layer = nn.Linear(WIDTH, 5)
    with SampleWatch((x, target), SAMPLES) as watch, torch.no_grad():
        x = normal(x)
    with watch:
        loss = functional.cross_entropy(layer(x), target)
    assert "a std over samples" in watch.read(loss, is_cut=True).message


def test_without_micro_batches_it_is_a_warning():
    with pytest.warns(UserWarning, match=r"a std over samples .*verify: first_step"):
        assert noticed(normal, is_cut=False) is None


def trained(config, between, *, has_loss=True):
    """Return the refusal or the warnings of two steps, and whether weights changed."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    model = rt.shard(Network(between))
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = [param.detach().clone() for param in model.parameters()]
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in range(2):
                share = rt.coordinate.get("dp", 0)
                x, target = (part.chunk(2)[share] for part in batch(4 * SAMPLES))
                if has_loss:
                    rt.step(model, optimizer, functional.cross_entropy, x, target)
                else:
                    rt.step(model, optimizer, {"x": x, "target": target})
        except ModelError as error:
            said.append(error.message)
    said += [str(item.message) for item in caught if "over samples" in str(item.message)]
    is_same = all(
        torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)
    )
    rt.close()
    return said, is_same


@pytest.mark.parametrize("has_loss", [True, False], ids=["loss function", "own loss"])
@pytest.mark.parametrize(
    "config",
    [{"accumulate": 2}, {"accumulate": 2, "optimizer": {"zero": 3}}],
    ids=["dp", "zero 3"],
)
def test_all_ranks_refuse_before_weights_change(config, has_loss):
    found = run_warm(partial(trained, has_loss=has_loss), 2, config, normal)

    for said, is_same in found:
        assert len(said) == 1
        assert "a std over samples (mixing_functions.py" in said[0]
        assert is_same


@pytest.mark.parametrize("config", [{}, {"optimizer": {"zero": 3}}], ids=["dp", "zero 3"])
def test_data_parallel_ranks_warn_once(config):
    found = run_warm(trained, 2, config, normal)

    for said, is_same in found:
        assert len(said) == 1
        assert said[0].startswith("msrun: the loss depends on a std over samples")
        assert not is_same


@pytest.mark.parametrize("accumulate", [1, 2])
def test_statistics_of_parts_are_accepted_if_they_are_meant(accumulate):
    config = {"batch_norm": "local", "accumulate": accumulate}

    assert run_warm(trained, 2, config, normal) == [([], False)] * 2


def of_loader(between, config, samples=SAMPLES):
    """Return what is said of steps on batches of `rt.loader`, and whether weights changed."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    model = rt.shard(Network(between))
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = [param.detach().clone() for param in model.parameters()]
    x, target = batch(4 * SAMPLES)
    rows = [{"x": row, "target": label} for row, label in zip(x, target, strict=True)]
    said = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for found in rt.loader(rows, batch_size=samples):
            try:
                rt.step(model, optimizer, found)
            except ModelError as error:
                said = error.message
    said += "".join(str(item.message) for item in caught if "by their position" in str(item))
    is_same = all(map(torch.equal, before, (p.detach() for p in model.parameters())))
    rt.close()
    return said, is_same


@pytest.mark.parametrize("config", [{}, {"optimizer": {"zero": 1}}], ids=["dp", "zero 1"])
def test_samples_by_position_are_refused_where_a_loader_knows_them(config):
    taken = "the loss depends on samples by their position (mixing_functions.py, line"
    for said, is_same in run_warm(of_loader, 2, first_sample_is_the_reference, config):
        assert said.startswith(taken)
        assert is_same
    assert run_warm(of_loader, 2, in_chunks, config) == [("", False)] * 2


def test_dims_that_cannot_be_told_apart_are_a_warning():
    found = run_warm(of_loader, 2, first_sample_is_the_reference, {}, WIDTH)
    for said, is_same in found:
        assert said.startswith("msrun: the loss depends on samples by their position")
        assert not is_same


def test_verify_compares_instead():
    found = run_warm(trained, 2, {"verify": "first_step"}, normal)

    for said, is_same in found:
        assert len(said) == 1
        assert "one process" in said[0]
        assert "over samples" not in said[0]
        assert is_same


class Keeping(Network):
    """Keeps what it computed, as for a plot."""

    def forward(self, x, target=None):
        self.kept = super().forward(x)
        return self.kept if target is None else functional.cross_entropy(self.kept[:], target)


def saved(config, *, has_loss):
    """Return how many tensors of two steps were saved and loaded without code."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    model = rt.shard(Keeping(torch.relu))
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loaded = 0
    for _ in range(2):
        x, target = batch()
        if has_loss:
            rt.step(model, optimizer, functional.cross_entropy, x, target)
        else:
            rt.step(model, optimizer, {"x": x, "target": target})
        for tensor in (x, target, model.kept, model.kept.detach()):
            file = io.BytesIO()
            torch.save(tensor, file)
            file.seek(0)
            loaded += torch.equal(torch.load(file, weights_only=True), tensor)
    rt.close()
    return loaded


@pytest.mark.parametrize("has_loss", [True, False], ids=["loss function", "own loss"])
def test_tensors_that_a_step_looked_at_are_saved_without_classes_of_ours(has_loss):
    assert run_warm(partial(saved, has_loss=has_loss), 2, {}) == [8, 8]


class Straight(nn.Module):
    """Two layers without a residual, the first of which is written."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).relu_())


def said_of(functions, config):
    """Return what is said of a step for each function between two layers."""
    rt = msrun.init(config)
    said = []
    for between in functions:
        torch.manual_seed(0)
        network = Network(between)
        network.first = Straight()
        model = rt.shard(network)
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x, target = batch(2 * SAMPLES)
        try:
            rt.step(model, optimizer, {"x": x, "target": target})
            said.append("")
        except ModelError as error:
            said.append(error.message)
    rt.close()
    return said


def rules(styles, **options):
    return [{"match": f"first.{name}", "style": style, **options} for name, style in styles.items()]


@pytest.mark.few(1)
@pytest.mark.parametrize("functions", [NOTICED, RIGHT], ids=["noticed", "right"])
def test_layers_of_a_plan_keep_what_is_known_of_samples(functions):
    """Tensors become DTensors, others and none, and are written by layers in place."""
    plan = rules({"up": "colwise", "down": "rowwise"})
    config = {"accumulate": 2}

    said, _ = run_warm(said_of, 2, list(functions), config | {"mesh": {"tp": 2}, "plan": plan})

    assert said == run_warm(said_of, 1, list(functions), config)[0]
    assert all(said) == (functions is NOTICED)


class HalfLabelled(Straight):
    """Returns a loss that is another one for the second half of its samples."""

    def forward(self, x, target):
        output, half = super().forward(x), len(x) // 2
        labelled = functional.cross_entropy(output[:half], target[:half])
        return labelled + 0.1 * output[half:].square().mean()


def refused_of_halves(config):
    with msrun.init(config) as rt:
        model = rt.shard(HalfLabelled())
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x, target = batch(2 * SAMPLES)
        with pytest.raises(ModelError) as error:
            rt.step(model, optimizer, {"x": x, "target": target})
        return error.value.message


def test_a_loss_in_parts_of_ranks_keeps_what_is_known_of_samples():
    plan = [{"match": "down", "style": "colwise", "axis": "tp"}]
    config = {"accumulate": 2, "mesh": {"tp": 2}, "plan": plan}
    for said in run_warm(refused_of_halves, 2, config):
        assert "samples by their position" in said


def test_layers_on_a_grid_keep_what_is_known_of_samples():
    """Parameters that a layer reads are no results of another micro-batch, either."""
    plan = rules({"up": "2d", "down": "2d"}, axes=["x", "y"])
    config = {"accumulate": 2, "mesh": {"x": 2, "y": 2}, "plan": plan}

    (said, nothing), *_ = run_warm(said_of, 4, [normal, torch.relu], config)

    assert "a std over samples" in said
    assert not nothing


GRAPHS = {
    "mm": torch.mm,
    "matmul": lambda near, h: near @ h,
    "linear": lambda near, h: functional.linear(near, h.T),
    "einsum": lambda near, h: torch.einsum("ij,jk->ik", near, h),
    "sparse_mm": lambda near, h: torch.sparse.mm(near.to_sparse(), h),
    "sparse_addmm": lambda near, h: torch.sparse.addmm(h, near.to_sparse(), h),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_layer_over_neighbours_in_a_graph_of_samples_is_noticed(name):
    x, target = batch()
    near = torch.rand(SAMPLES, SAMPLES)
    model = Network(lambda h: GRAPHS[name](near, h))
    with SampleWatch((x, near, target), SAMPLES) as watch:
        loss = model(x, target)

    assert f" {name} over samples" in watch.read(loss, is_cut=True).message


@pytest.mark.parametrize("name", GRAPHS)
def test_one_over_what_each_sample_has_is_right(name):
    x, target = batch()
    shared = torch.rand(WIDTH, WIDTH)  # of no sample
    model = Network(lambda h: GRAPHS[name](shared, h.T).T)
    with SampleWatch((x, target), SAMPLES) as watch:
        loss = model(x, target)

    assert watch.read(loss, is_cut=True) is None
