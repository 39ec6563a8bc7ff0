"""What a block without memory can not do is refused, with one sentence."""

import weakref

import pytest
import torch
from deferred_models import OUTSIDE, Holder, deferred, filled
from ranks import MLP
from torch import nn
from torch.nn import Parameter, init

from msrun.errors import UsageError
from msrun.parallel.deferred.init import DeferredInit

pytestmark = pytest.mark.torch


@pytest.fixture
def file(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "tensors.pt")
    return tmp_path / "tensors.pt"


class Other(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


REFUSED = {
    "a file": (
        torch.load,
        "tensors are loaded from a file inside init_on_meta",
    ),
    "a device": (
        lambda _: torch.empty(3, device="maia"),
        "aten::empty makes a tensor on maia inside init_on_meta",
    ),
    "a sparse tensor": (
        lambda _: torch.sparse_coo_tensor([[0]], [1.0], (2,)),
        "aten::_sparse_coo_tensor_with_dims_and_tensors is called for a tensor that is not dense",
    ),
    "a draw into an old tensor": (
        lambda _: torch.zeros_like(OUTSIDE).copy_(init.normal_(OUTSIDE)),
        "aten::normal_ writes a tensor from before init_on_meta",
    ),
    "a weight into an old tensor": (
        lambda _: OUTSIDE.copy_(torch.rand(4, 3)),
        "aten::copy_ writes a tensor from before init_on_meta",
    ),
    "an old tensor's memory": (
        lambda _: torch.rand(4, 3).set_(OUTSIDE),
        "aten::set_ has a tensor of the model share memory from before init_on_meta",
    ),
    "a strange tensor": (
        lambda _: torch.rand(3) + torch.Tensor._make_subclass(Other, torch.ones(3)),
        "aten::add uses a Other inside init_on_meta",
    ),
    "a pointer": (
        lambda _: torch.rand(3).data_ptr(),
        "Tensor.data_ptr needs memory, which tensors get after init_on_meta",
    ),
    "meta with ours": (
        lambda _: torch.rand(3).add_(torch.empty(3, device="meta")),
        "aten::add_ uses a tensor on meta that init_on_meta did not make",
    ),
    "other bits": (
        lambda _: torch.linalg.matrix_norm(torch.rand(3, 3), 2),
        "linalg_matrix_norm has other last bits inside init_on_meta",
    ),
    "a block in a block": (
        lambda _: filled(nn.Linear(3, 3)),
        "rt.shard is called inside init_on_meta",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_put_off_is_refused(name, file):
    make, sentence = REFUSED[name]
    with pytest.raises(UsageError) as caught, DeferredInit():
        make(file)

    assert caught.value.message == sentence


def test_a_block_is_not_entered_twice_at_once():
    block = DeferredInit()
    with pytest.raises(UsageError, match="init_on_meta is already active"), block, block:
        pass


def test_numbers_drawn_too_early_are_refused():
    model = deferred(MLP)
    torch.rand(1)

    with pytest.raises(UsageError, match="random numbers were drawn between init_on_meta and"):
        filled(model)


def test_a_change_of_the_outside_is_refused():
    table = torch.ones(3)
    model = deferred(lambda: Holder(lambda: table * 2))
    table.add_(1)

    with pytest.raises(UsageError, match=r"a tensor \[3\] that init_on_meta read was written"):
        filled(model)


def test_writing_weights_that_are_not_there_is_refused():
    model = deferred(MLP)
    model.apply(lambda module: isinstance(module, nn.Linear) and init.normal_(module.weight))

    with pytest.raises(UsageError, match=r"fc1\.weight was written between init_on_meta and"):
        filled(model)


def test_a_tensor_from_elsewhere_is_refused():
    model = nn.ModuleList([deferred(MLP), nn.Linear(3, 3, device="meta")])

    with pytest.raises(UsageError, match=r"1\.weight is on the device meta, and was not made"):
        filled(model)


def test_memory_of_two_parameters_is_refused():
    def make():
        model = MLP()
        model.fc3.weight = Parameter(model.fc2.weight.data[:10])
        return model

    with pytest.raises(UsageError, match=r"fc3\.weight shares memory with fc2\.weight"):
        filled(deferred(make))


def test_a_weak_reference_is_refused():
    model = deferred(MLP)
    reference = weakref.ref(model.fc1.weight)

    with pytest.raises(UsageError, match="a parameter can not be given memory: Cannot swap t1"):
        filled(model)
    assert reference() is model.fc1.weight


def test_a_parameter_without_a_shape_is_refused():
    model = deferred(lambda: nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3)))

    with pytest.raises(UsageError, match=r"1\.weight was made inside init_on_meta, and has no"):
        filled(model)


def test_a_tensor_of_an_earlier_block_is_refused():
    first = deferred(MLP)

    with pytest.raises(UsageError, match=r"aten::copy_ uses a tensor of an earlier init_on_meta"):
        deferred(lambda: MLP().fc1.weight.data.copy_(first.fc1.weight))
