"""What calls of torch's functions say of the dims of their results, and of their samples."""

import pytest
import torch

from msrun.parallel.losses.torch_calls import FORMING, dim_order
from msrun.parallel.losses.watch import LossWatch

pytestmark = pytest.mark.torch

CALLS = [
    ("permute", (2, 0, 1), {}),
    ("permute", ((2, -3, 1),), {}),
    ("permute", (), {"dims": (1, 2, 0)}),
    ("transpose", (0, -1), {}),
    ("transpose", (1,), {"dim1": 2}),
    ("transpose", (), {"dim1": 2, "dim0": 0}),
    ("swapaxes", (), {"axis0": 0, "axis1": 1}),
    ("mT", (), {}),
    ("T", (), {}),
    ("t", (), {}),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), CALLS)
def test_the_order_of_dims_is_that_of_the_result(name, args, kwargs):
    x = torch.empty((2, 3) if name in ("t", "T") else (2, 3, 4))
    found = getattr(x, name)
    result = found(*args, **kwargs) if callable(found) else found

    order = dim_order(name, x.dim(), (x, *args), kwargs)

    assert [x.shape[dim] for dim in order] == list(result.shape)


FORMS = [
    ("flatten", (0, 1), {"start_dim": 0, "end_dim": 1}),
    ("reshape", (24,), {"shape": (24,)}),
    ("transpose", (0, 1), {"dim0": 0, "dim1": 1}),
    ("permute", (0, 2, 1), {"dims": (0, 2, 1)}),
    ("squeeze", (1,), {"dim": 1}),
    ("contiguous", (), {"memory_format": torch.contiguous_format}),
    ("float", (), {"memory_format": torch.preserve_format}),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), FORMS)
def test_a_form_of_the_batch_is_noted_as_any_other_function_of_it_is(name, args, kwargs):
    x = torch.randn(2, 4, 3, dtype=torch.double).transpose(1, 2)
    with LossWatch(2, [x]):
        # By position less is asked about it.
        quick, slow = getattr(x, name)(*args), getattr(x, name)(**kwargs)

    assert getattr(torch.Tensor, name) in FORMING
    assert vars(quick) == vars(slow) != {}
