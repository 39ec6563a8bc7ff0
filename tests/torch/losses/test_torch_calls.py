"""What calls of torch's functions say of the dims of their results."""

import pytest
import torch

from msrun.parallel.losses.torch_calls import dim_order

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
