"""What `torch_compat` relies on in tensors without values."""

import logging

import pytest
import torch
from torch.nn import functional

from msrun.parallel.torch_compat import (
    fake_mode,
    fake_tensors,
    is_fake,
    reads_values,
    with_values,
)

pytestmark = pytest.mark.torch


def test_new_tensors_have_shapes_and_no_values():
    mode = fake_mode()
    with fake_tensors(mode):
        x = torch.ones(2, 3)
        product = functional.linear(x, torch.zeros(4, 3))
    with fake_tensors(mode):
        again = product + torch.ones(4)

    assert is_fake(product)
    assert not is_fake(torch.ones(1))
    assert (again.shape, again.device.type) == ((2, 4), "cpu")


def test_tensors_have_values_where_the_mode_is_left():
    with fake_tensors(fake_mode()), with_values():
        assert torch.ones(2).sum().item() == 2


def test_reading_a_value_is_told_from_other_errors():
    with fake_tensors(fake_mode()):
        x = torch.ones(2, 3)
        with pytest.raises(Exception) as value:  # noqa: PT011 - the kind is what is asked for
            x.sum().item()
        with pytest.raises(Exception) as shape:  # noqa: PT011
            x.nonzero()
        with pytest.raises(RuntimeError) as other:
            x @ torch.ones(2, 3)

    assert [reads_values(e.value) for e in (value, shape, other)] == [True, True, False]


def test_operators_without_a_kernel_are_not_logged(caplog):
    caplog.set_level(logging.DEBUG)
    with fake_tensors(fake_mode()), pytest.raises(RuntimeError):
        torch.ones(2, 3) @ torch.ones(2, 3)

    assert not [record for record in caplog.records if record.name.startswith("torch._subclasses")]
