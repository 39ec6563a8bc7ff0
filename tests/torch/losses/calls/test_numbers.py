"""Losses by functions that make one number of a batch: of one process, refused or warned of."""

import warnings

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError
from msrun.parallel.losses.calls.contractions import contraction
from msrun.parallel.losses.sample_watch import SampleWatch
from msrun.parallel.losses.torch_calls import name_of
from msrun.parallel.losses.watch import LossWatch

pytestmark = pytest.mark.torch

SAMPLES, CLASSES = 4, 6
entropy = functional.cross_entropy


def covariance(output, columns):
    """Return the loss of Barlow Twins, but for the factor."""
    return (columns / len(output) - torch.eye(CLASSES, dtype=output.dtype)).square().sum()


def of_batches(output, target):
    del target
    return covariance(output, torch.bmm(output.T[None], output[None])[0])


NORM, OVER = "the loss depends on {} of a part of the batch", "depends on {} over samples of a part"
SUM = "the loss is a function of {} over a part of the batch, and may mean a mean or a sum"
REFUSED = {
    "norm of linalg": (lambda o, _: torch.linalg.norm(o), NORM.format("norm")),
    "vector_norm": (lambda o, _: torch.linalg.vector_norm(o), NORM.format("vector_norm")),
    "matrix_norm": (lambda o, _: torch.linalg.matrix_norm(o), NORM.format("matrix_norm")),
    "norms of columns": (
        lambda o, _: torch.linalg.vector_norm(o, dim=0).mean(), OVER.format("a vector_norm"),
    ),
    "logsumexp of special": (
        lambda o, _: torch.special.logsumexp(o, (0, 1)), NORM.format("logsumexp"),
    ),
    "singular values": (
        lambda o, _: torch.linalg.svdvals(o).sum(), OVER.format("a svdvals"),
    ),
    "dist": (lambda o, _: torch.dist(o, 2 * o.detach()), NORM.format("dist")),
    "trace": (lambda o, _: torch.trace(o), NORM.format("trace")),
    "cosine": (
        lambda o, t: functional.cosine_similarity(o[:, 0], t.to(o.dtype), dim=0),
        NORM.format("cosine_similarity"),
    ),
    "std_mean": (lambda o, _: torch.std_mean(o)[0], OVER.format("a std_mean")),
    "median": (lambda o, _: o.nanmedian(), NORM.format("nanmedian")),
    "dot by a number": (
        lambda o, t: torch.dot(o[:, 0], t.to(o.dtype)) / t.sum().item(), SUM.format("dot"),
    ),
    "products of all": (
        lambda o, _: torch.einsum("ni,mi->", o, o), NORM.format("einsum"),
    ),
    "covariance": (lambda o, _: covariance(o, o.T @ o), OVER.format("a matmul")),
    "covariance by mm": (lambda o, _: covariance(o, torch.mm(o.t(), o)), OVER.format("a mm")),
    "covariance by einsum": (
        lambda o, _: covariance(o, torch.einsum("ni,nj->ij", o, o)), OVER.format("an einsum"),
    ),
    "covariance by tensordot": (
        lambda o, _: covariance(o, torch.tensordot(o, o, ([0], [0]))), OVER.format("a tensordot"),
    ),
    "covariance by addmm": (
        lambda o, _: covariance(o, torch.addmm(torch.ones(6, 6, dtype=o.dtype), o.T, o)),
        OVER.format("an addmm"),
    ),
    "sums of classes": (
        lambda o, t: (functional.one_hot(t, 6).to(o.dtype).T @ o).square().sum(),
        OVER.format("a matmul"),
    ),
}  # fmt: skip


def batch(samples=SAMPLES):
    torch.manual_seed(0)
    output = torch.randn(samples, CLASSES, dtype=torch.float64, requires_grad=True)
    return output, torch.arange(samples) % CLASSES


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_parts_do_not_make_is_refused(name):
    loss_fn, sentence = REFUSED[name]
    output, target = batch()
    with LossWatch(SAMPLES, [output, target]) as watch:
        loss = loss_fn(output, target)

    with pytest.raises(ModelError) as caught:
        watch.read(loss)

    assert sentence in caught.value.message


def test_products_over_samples_are_noticed_behind_new_dims():
    output, target = batch()
    with SampleWatch((output, target), SAMPLES) as watch:
        loss = of_batches(output, target)

    error = watch.read(loss, is_cut=True)

    assert "a bmm over samples (test_numbers.py, line" in error.message


def ignoring(output, target):
    """Return the losses of targets, 0 for those that do not count, and whether they do."""
    losses = entropy(output, target, reduction="none", ignore_index=0)
    return losses, (target != 0).to(output.dtype)


def weighed(output, target):
    losses, counts = ignoring(output, target)
    return losses @ counts / counts.sum()


def rows(output, target):
    return zip(output, target, strict=True)


def in_place(output, target):
    total = torch.zeros((), dtype=output.dtype)
    for x, y in rows(output, target):
        total += entropy(x, y) + x.square().sum().sqrt()
    return total


def one_hot(output, target):
    return functional.one_hot(target, CLASSES).to(output.dtype)


# Losses that are right in every configuration.
EXACT = {
    "dot": lambda o, t: torch.dot(o[:, 0], t.to(o.dtype)),
    "mean by dot": lambda o, t: torch.dot(o[:, 0], t.to(o.dtype)) / len(o),
    "dot by a count": weighed,
    "vectors": lambda o, t: o[:, 0] @ t.to(o.dtype) / len(o),
    "inner": lambda o, t: torch.inner(o[:, 0], t.to(o.dtype)),
    "vdot": lambda o, t: torch.vdot(o[:, 0], t.to(o.dtype)),
    "einsum": lambda o, t: torch.einsum("nc,nc->", o.log_softmax(1), -one_hot(o, t)) / len(o),
    "sum by einsum": lambda o, t: torch.einsum("nc,nc->", o.log_softmax(1), -one_hot(o, t)),
    "products of rows": lambda o, t: torch.einsum("ni,nj->", o, one_hot(o, t)) / o.numel(),
    "tensordot": lambda o, t: torch.tensordot(o, one_hot(o, t), 2),
    "vecdot": lambda o, t: torch.linalg.vecdot(o, one_hot(o, t)).mean(),
    "norms of rows": lambda o, t: (torch.linalg.vector_norm(o, dim=1) * t).mean(),
    "trace of a covariance": lambda o, _: torch.trace(o.T @ o) / len(o),
    "sum of samples": lambda o, t: sum(entropy(x, y) for x, y in rows(o, t)),
    "sum by index": lambda o, t: sum(entropy(o, t, reduction="none")[i] for i in range(len(o))),
    "mean of samples": lambda o, t: sum(entropy(x, y) for x, y in rows(o, t)) / len(o),
    "stack of samples": lambda o, t: torch.stack([entropy(x, y) for x, y in rows(o, t)]).mean(),
    "stack of norms": lambda o, _: torch.stack([x.norm() for x in o]).mean(),
    "sum of norms": lambda o, _: sum(torch.linalg.norm(x) for x in o),
    "samples in place": in_place,
}


class Fused(torch.autograd.Function):
    """The mean of squares, computed where no watch sees it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.tensor((x.detach().numpy() ** 2).mean(), dtype=x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        [x] = ctx.saved_tensors
        return 2 * x * gradient / x.numel()


class FusedRows(torch.autograd.Function):
    """The sum of the squares of each row, computed where no watch sees it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.tensor((x.detach().numpy() ** 2).sum(1), dtype=x.dtype)

    @staticmethod
    def backward(ctx, gradients):
        [x] = ctx.saved_tensors
        return 2 * x * gradients[:, None]


@torch.library.custom_op("msrun_tests::mean_square", mutates_args=())
def mean_square(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean()


mean_square.register_autograd(
    lambda ctx, gradient: 2 * ctx.saved_tensors[0] * gradient / ctx.saved_tensors[0].numel(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),  # noqa: ARG005
)
UNSEEN = {
    "sum of rows": lambda o, _: FusedRows.apply(o).sum(),
    "mean of rows": lambda o, _: FusedRows.apply(o).mean(),
    "sum and count": lambda o, _: (Fused.apply(o) * o.numel(), o.numel()),
}
UNKNOWN = {
    "Fused": lambda o, _: Fused.apply(o) * 2,
    "msrun_tests_mean_square": lambda o, t: mean_square(o) + entropy(o, t),
}
LOSSES = {**EXACT, **UNSEEN, **UNKNOWN}


def network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def trained(config, names):
    """Return, for each loss, the greatest difference to one process and what was said of it."""
    found = {}
    for name in names:
        rt, loss_fn = msrun.init(config), LOSSES[name]
        alone, model = network(), rt.shard(network())
        plain = torch.optim.SGD(alone.parameters(), lr=0.01)
        update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        count, share = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
        said, worst = [], 0.0
        for seed in range(3):
            torch.manual_seed(seed)
            x, y = torch.randn(2 * SAMPLES, 8, dtype=torch.float64), torch.arange(8) % CLASSES
            plain.zero_grad()
            expected = loss_fn(alone(x), y)
            expected = expected[0] / expected[1] if isinstance(expected, tuple) else expected
            expected.backward()
            plain.step()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                part = [tensor.chunk(count)[share] for tensor in (x, y)]
                loss = rt.step(model, update, loss_fn, *part)
            said += [str(each.message).partition(", of which")[0] for each in caught]
            worst = max(worst, abs(loss.item() - expected.item()))
        weights = dict(alone.named_parameters())
        for key, param in model.named_parameters():
            worst = max(worst, (param - weights[key]).abs().max().item())
        found[name] = worst, said
        rt.close()
    return found


CONFIGS = {
    "dp": {},
    "accumulate": {"accumulate": 2},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"stages": {"0": 0, "2": 1}, "microbatches": 2}},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_losses_of_products_rows_and_functions_that_no_watch_sees_are_those_of_one_process(config):
    names = [*EXACT, *UNSEEN]

    assert (
        run_warm(trained, 2, config, names)
        == [dict.fromkeys(names, (pytest.approx(0, abs=1e-12), []))] * 2
    )


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_number_of_an_unknown_function_counts_as_a_mean_and_is_named_once(config):
    found = run_warm(trained, 2, config, [*UNKNOWN])

    everywhere = [0, 1] if "pipeline" not in config else [1]  # the last stage has the loss
    for rank in everywhere:
        for name, (worst, said) in found[rank].items():
            assert worst == pytest.approx(0, abs=1e-12)
            assert said == [f"msrun: the loss comes from {name}"]


def test_one_process_says_nothing_of_unknown_functions():
    [found] = run_warm(trained, 1, {}, [*UNKNOWN])

    assert {name: said for name, (_, said) in found.items()} == {name: [] for name in UNKNOWN}


A, B, V = torch.randn(3, 4), torch.randn(4, 5), torch.randn(4)
MANY, OTHERS, ZEROS = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.zeros(3, 5)
PRODUCTS = [
    (torch.matmul, MANY, B),
    (torch.matmul, A, V),
    (torch.matmul, V, OTHERS),
    (torch.Tensor.__matmul__, A, B),
    (torch.Tensor.__rmatmul__, B, A),
    (torch.mm, A, B),
    (torch.bmm, MANY, OTHERS),
    (torch.mv, A, V),
    (torch.dot, V, V),
    (torch.vdot, V, V),
    (torch.addmm, ZEROS, A, B),
    (torch.addmv, ZEROS[:, 0], A, V),
    (torch.baddbmm, ZEROS, MANY, OTHERS),
    (torch.addbmm, ZEROS, MANY, OTHERS),
    (torch.inner, MANY, A),
    (torch.linalg.vecdot, MANY, A),
    (torch.tensordot, MANY, B, 1),
    (torch.tensordot, MANY, OTHERS, ([2, 0], [1, 0])),
    (torch.linalg.multi_dot, [V, B, torch.randn(5, 2)]),
    (torch.chain_matmul, A, B),
    (torch.einsum, "...ij, jk", MANY, B),
    (torch.einsum, "...ij, kj -> k...", MANY, A),
    (torch.einsum, "i, i", [V, V]),
]


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("call", PRODUCTS, ids=lambda call: call[0].__name__)
def test_the_labels_of_a_product_say_how_it_adds_up(call):
    function, *args = call
    found = contraction(name_of(function), args, {})

    labels = {label for _, own in found.operands for label in own}
    numbers = {label: number for number, label in enumerate(sorted(labels, key=str))}
    factors = []
    for x, own in found.operands:
        if x.untyped_storage().data_ptr() != ZEROS.untyped_storage().data_ptr():
            factors += [x, [numbers[label] for label in own]]
    result = torch.einsum(*factors, [numbers[label] for label in found.result])
    torch.testing.assert_close(result, function(*args))


def test_a_form_of_arguments_that_is_not_known_is_no_product():
    assert contraction("einsum", (V, [0], V, [0]), {}) is None
    assert contraction("matmul", (V, 3), {}) is None
    assert contraction("add", (V, V), {}) is None
