"""Inputs that micro-batches cut with the samples, and that have none: refused, and no other."""

import pytest
import torch
from input_functions import (
    FAILING,
    OF_SAMPLES,
    PAIRS,
    SAMPLES,
    SQUARE,
    TABLES,
    WIDTH,
    Network,
    bank,
    closest,
    cosines,
    distances,
    of_rows,
    prototypes,
    rows_of_a_table,
)
from ranks import run_warm
from torch.nn import functional

import msrun
from msrun.errors import UsageError
from msrun.parallel.losses.sample_watch import SampleWatch

pytestmark = pytest.mark.torch

PARTS = {"accumulate": 2}
SINGLE = {"accumulate": SAMPLES}
STAGES = {"mesh": {"pp": 2}, "pipeline": {"stages": "auto", "microbatches": 2}}
CONFIGS = pytest.mark.parametrize(
    "config", [PARTS, SINGLE, STAGES], ids=["accumulate", "one sample", "pp"]
)


def name_of(function):
    return function.__name__


def batch(between):
    torch.manual_seed(1)
    columns = SAMPLES if between in SQUARE else WIDTH
    return torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, columns), torch.arange(SAMPLES) % 5


def noticed(between, rows):
    """Return what a watch of the first micro-batch says."""
    torch.manual_seed(0)
    x, beside, target = (tensor[:rows] for tensor in batch(between))
    given, names = (x, beside, target), ("x", "beside", "target")
    model = Network(between)
    with SampleWatch(given, rows, names=names, parts=SAMPLES // rows) as watch:
        loss = model(x, beside).square().mean()
    return watch.read(loss, is_cut=True)


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [4, 1])
@pytest.mark.parametrize("between", PAIRS, ids=name_of)
def test_pairs_with_rows_of_another_input_are_noticed(between, rows):
    error = noticed(between, rows)

    assert error is not None
    assert f"pairs of rows of `x` {[rows, WIDTH]} with rows of `beside` {[rows, WIDTH]} (" in (
        error.message
    )
    assert "input_functions.py, line" in error.message
    assert "x[None]" in error.hint


@pytest.mark.parametrize("between", TABLES, ids=name_of)
def test_rows_that_samples_choose_of_another_input_are_noticed(between):
    error = noticed(between, 4)

    assert error is not None
    assert "rows of `beside` [4, 6] that values of `x` [4, 6] choose (" in error.message
    assert "x[None]" in error.hint


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [4, 1])
@pytest.mark.parametrize("between", OF_SAMPLES, ids=name_of)
def test_an_input_of_samples_is_right(between, rows):
    assert noticed(between, rows) is None


def test_without_micro_batches_an_input_may_have_any_rows():
    x, beside, _ = batch(prototypes)
    with SampleWatch((x, beside), SAMPLES, names=("x", "beside")) as watch:
        loss = Network(prototypes)(x, beside).square().mean()
    assert watch.read(loss, is_cut=False) is None


def test_a_tensor_that_is_not_cut_may_have_as_many_rows_as_a_micro_batch():
    x, beside, _ = batch(prototypes)
    given = x[:4], beside[:4]
    with SampleWatch(given, 4, names=("x", ""), parts=2) as watch:
        loss = Network(prototypes)(*given).square().mean()
    assert watch.read(loss, is_cut=True) is None


def inputs_of(between, *, is_whole):
    x, beside, target = batch(between)
    return {"x": x, "whole" if is_whole else "beside": beside[None] if is_whole else beside}, target


def alone(between):
    torch.manual_seed(0)
    model = Network(between)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, target = inputs_of(between, is_whole=False)
    losses = []
    for _ in range(2):
        loss = functional.cross_entropy(model(**inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(config, between, *, is_whole=False, steps=2):
    """Return the losses of steps, or what refuses them, and whether weights changed."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    model = Network(between)
    inputs, target = inputs_of(between, is_whole=is_whole)
    model = rt.shard(model, inputs)
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = [param.detach().clone() for param in model.parameters()]
    entropy = functional.cross_entropy
    try:
        return [rt.step(model, optimizer, entropy, inputs, target).item() for _ in range(steps)]
    except UsageError as error:
        is_same = all(map(torch.equal, before, model.parameters()))
        return f"{error.message}; {error.hint}", is_same
    finally:
        rt.close()


def trainings(config, functions, **options):
    return {function.__name__: trained(config, function, **options) for function in functions}


REFUSED = [prototypes, distances, cosines, bank, closest, rows_of_a_table]


@CONFIGS
def test_it_is_refused_before_a_weight_changes(config):
    functions = REFUSED[:-1] if config is SINGLE else REFUSED
    for found in run_warm(trainings, ranks_of(config), config, functions):
        for name, (said, is_same) in found.items():
            assert "of `beside` [" in said, name
            assert "x[None]" in said
            assert is_same


@CONFIGS
def test_with_a_first_dim_of_one_it_is_that_of_one_process(config):
    expected = {function.__name__: alone(function) for function in REFUSED}
    for found in run_warm(whole_trainings, ranks_of(config), config, REFUSED):
        for name, losses in found.items():
            assert losses == pytest.approx(expected[name], rel=1e-5), name


def whole_trainings(config, functions):
    return trainings(config, functions, is_whole=True)


@CONFIGS
def test_an_input_of_samples_is_that_of_one_process(config):
    expected = alone(of_rows)
    for losses in run_warm(trained, ranks_of(config), config, of_rows):
        assert losses == pytest.approx(expected, rel=1e-5)


def ranks_of(config):
    return 2 if config is STAGES else 1


@CONFIGS
def test_an_error_of_a_part_names_the_inputs(config):
    for found in run_warm(trainings, ranks_of(config), config, FAILING):
        for name, (said, is_same) in found.items():
            other = "`target` [" if name == "graph_of_columns" else "`beside` ["
            assert other in said, name
            assert "micro-batch" in said
            assert "x[None]" in said
            assert is_same


def other_rows(config, rows, samples):
    """Return the refusals of steps with so many samples, beside so many whole rows."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    model = Network(sum_of_rows)
    found = []
    batches = [
        ({"x": torch.randn(count, WIDTH), "beside": torch.randn(rows, WIDTH)}, torch.zeros(count))
        for count in samples
    ]
    model = rt.shard(model, batches[0][0])
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for inputs, target in batches:
        before = [param.detach().clone() for param in model.parameters()]
        try:
            rt.step(model, optimizer, functional.cross_entropy, inputs, target.long())
            found.append("")
        except UsageError as error:
            found.append(error.message if all(map(torch.equal, before, model.parameters())) else "")
    rt.close()
    return found


def sum_of_rows(h, beside):
    """Uses no pair, and the sum of another part in each micro-batch, which no watch follows."""
    return h + torch.fft.fft(beside, dim=0).real[0]


@pytest.mark.parametrize("config", [PARTS, STAGES], ids=["accumulate", "pp"])
@pytest.mark.parametrize(
    ("samples", "problem"),
    [
        ([8, 8, 4], "it was not cut into micro-batches in an earlier step, and would be in this"),
        ([4, 4, 8], "it was cut into micro-batches in an earlier step, and is not in this one"),
    ],
    ids=["last step", "first steps"],
)
def test_rows_that_are_those_of_the_batch_in_some_steps_alone_are_refused(config, samples, problem):
    for found in run_warm(other_rows, ranks_of(config), config, 4, samples):
        assert found[:2] == ["", ""]
        assert found[2].startswith("`beside` has 4 rows and the batch")
        assert problem in found[2]


@pytest.mark.parametrize("config", [PARTS, STAGES], ids=["accumulate", "pp"])
def test_rows_that_never_are_those_of_the_batch_are_right(config):
    for found in run_warm(other_rows, ranks_of(config), config, 5, [8, 4, 6, 8]):
        assert found == [""] * 4
