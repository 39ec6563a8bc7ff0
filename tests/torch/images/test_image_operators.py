"""Functions of torch on parts of images give what they give on the whole, and its gradient."""

import warnings

import pytest
import torch
from image_operators import CHANNELS, DTYPE, operators
from ranks import run_warm

import msrun
from msrun.errors import ModelError
from msrun.parallel.images.division import ImageDims
from msrun.parallel.images.image_tensor import gathered

pytestmark = pytest.mark.torch

GRIDS = {
    "3 x 1": ({"h": 3}, (5, 6)),
    "2 x 1": ({"h": 2}, (9, 8)),
    "1 x 2": ({"w": 2}, (8, 7)),
    "2 x 2": ({"h": 2, "w": 2}, (10, 7)),
    "2 x 3": ({"h": 2, "w": 3}, (4, 11)),
}


def differences(mesh, size):
    """Return the functions that give something else on parts, with what."""
    warnings.simplefilter("ignore")  # of functions that are computed whole
    data = {"x": ["dp", None, *(axis if axis in mesh else None for axis in ("h", "w"))]}
    found = {}
    with msrun.init({"mesh": mesh, "data": data}) as rt:
        dims = ImageDims(rt.config, rt.context)
        for name, function in operators():
            torch.manual_seed(1)
            x = torch.randn(2, CHANNELS, *size, dtype=DTYPE)
            alone = x.clone().requires_grad_()
            expected = function(alone)
            weight = torch.randn(expected.shape, dtype=DTYPE)
            (expected * weight).sum().backward()
            image = dims.part("x", x)
            part = image.local.requires_grad_()
            result = function(image)
            shape, whole = tuple(result.shape), gathered(result)
            (whole * weight).sum().backward()
            gradient = dims.part("x", alone.grad).local
            errors = [whole - expected, part.grad / rt.world_size - gradient]
            error = torch.stack([e.abs().max() for e in errors]).max().item()  # NaN, if one is
            if shape != tuple(expected.shape) or not error <= 1e-10:
                found[name] = shape, error
    return found


@pytest.mark.parametrize(
    "grid", ["3 x 1", *(pytest.param(g, marks=pytest.mark.slow) for g in list(GRIDS)[1:])]
)
def test_functions_of_parts_equal_those_of_the_whole(grid):
    mesh, size = GRIDS[grid]
    ranks = torch.Size(mesh.values()).numel()
    assert run_warm(differences, ranks, mesh, size, timeout=200) == [{}] * ranks


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        return x * 2

    @staticmethod
    def backward(ctx, gradient):  # noqa: ARG004
        return gradient * 2


class _Returned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        return x

    @staticmethod
    def backward(ctx, gradient):  # noqa: ARG004
        return -gradient


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.shape)


def _written(x):
    plain = torch.zeros(x.shape).to(x)
    plain += x
    return plain


def _row_written(x):
    y = x * 1
    y[:, :, 0] = 0
    return y


def _written_in(view, write=torch.zero_):
    """Return a function that uses a tensor after a view of it was written."""

    def used(x):
        y = x * 1
        write(view(y))
        return y + 1

    return used


def _written_behind(x):
    y = x * 1
    view = y[:, :, 2:]
    y.mul_(2)
    return view + 1


LOST = (
    _written_in(lambda x: x[:, :, :2]),
    _written_in(lambda x: x.narrow(2, 0, 4), torch.relu_),
    _written_in(lambda x: x[:, :, 0][:, 1:]),
    _written_in(lambda x: x.detach()[:, 1:3].data[:, :, 1:][:, :, 2]),
    _written_in(lambda x: x.flatten(2)),
    _written_in(lambda x: x[:, :, :4], lambda x: torch.nn.functional.relu(x, inplace=True)),
    _written_behind,
)
REFUSED = {
    "ctc_loss": lambda x: torch.nn.functional.ctc_loss(x, x, x, x),
    "matrix_exp": torch.matrix_exp,
    "the autograd function _Own": _Own.apply,
    "the autograd function _Returned": _Returned.apply,
    "the autograd function _Summed": _Summed.apply,
    "writes parts of an image in another tensor": _written,
    "rows of an image that are written": _row_written,
    "a conv2d with windows of 9 over 5 rows": lambda x: torch.nn.functional.conv2d(
        x, torch.ones(1, CHANNELS, 9, 9).to(x)
    ),
    "a pad by 5 rows of an image of 5 with mode reflect": lambda x: torch.nn.functional.pad(
        x, (0, 0, 5, 5), mode="reflect"
    ),
    "cumsum_, which writes in place": lambda x: x.cumsum_(2),
    "squeeze_, which writes in place": lambda x: x.squeeze_(1),
    "transpose_, which writes in place": lambda x: x.transpose_(0, 1),
    "fill_diagonal": lambda x: x.fill_diagonal_(0),
    "rrelu": torch.nn.functional.rrelu,
    "backward": lambda x: x.backward(),
    "add, which": lambda x: torch.add(x, x, out=x),
}


def refusals():
    """Return what is said of each function."""
    said = {}
    with msrun.init({"mesh": {"h": 2}, "data": {"x": ["dp", None, "h", None]}}) as rt:
        dims = ImageDims(rt.config, rt.context)
        for name, function in REFUSED.items():
            image = dims.part("x", torch.randn(2, CHANNELS, 5, 6, dtype=DTYPE))
            image.local.requires_grad_()
            with pytest.raises(ModelError) as error:
                function(image * 1)
            said[name] = error.value.message
        image = dims.part("x", torch.randn(2, CHANNELS, 5, 6, dtype=DTYPE))
        for grad in (torch.enable_grad, torch.inference_mode):
            for function in LOST:
                with grad(), pytest.raises(ModelError, match="are written in place in a view"):
                    function(image)
        with pytest.raises(ModelError) as error:
            dims.part("x", torch.zeros(2, CHANNELS, 1, 6))
        said["1 rows in dim 2 can not be split into 2 parts, over h"] = error.value.message
        with pytest.raises(ModelError) as error:
            dims.part("x", torch.zeros(2, 1, 6))
        said["names 4 dims, and the value has the shape (2, 1, 6)"] = error.value.message
    return said


def test_what_is_not_known_for_parts_is_refused_by_name():
    (said, _) = run_warm(refusals, 2)
    assert {name: text for name, text in said.items() if name not in text} == {}
    assert "(test_image_operators.py, line" in said["rrelu"]
