"""Which device a rank takes, on machines with made-up accelerators."""

import sys
import warnings

import pytest
import torch

from msrun.environ import RankIdentity
from msrun.errors import UsageError
from msrun.parallel.device import backend_for, device_count, pick_device

pytestmark = pytest.mark.torch


@pytest.fixture
def machine(monkeypatch):
    """Give each kind so many devices; the list returned gets those made current."""
    current = []

    def give(**counts):
        for kind in ("cuda", "xpu"):
            module, count = getattr(torch, kind), counts.get(kind, 0)
            monkeypatch.setattr(module, "is_available", lambda count=count: count > 0)
            monkeypatch.setattr(module, "device_count", lambda count=count: count)
            monkeypatch.setattr(module, "set_device", current.append)
        return current

    give()
    return give


def rank(local_rank=0, local_world_size=1, source="msrun"):
    return RankIdentity(source=source, local_rank=local_rank, local_world_size=local_world_size)


@pytest.mark.parametrize(
    ("counts", "identity", "expected"),
    [
        ({}, rank(), "cpu"),
        ({}, rank(1, 2), "cpu"),
        ({"cuda": 1}, rank(), "cuda:0"),
        ({"cuda": 4}, rank(3, 4), "cuda:3"),
        ({"cuda": 8}, rank(1, 2), "cuda:1"),
        ({"xpu": 2}, rank(1, 2), "xpu:1"),
        ({"cuda": 2, "xpu": 2}, rank(1, 2), "cuda:1"),
        # Each rank is shown a device of its own, whose number is 0.
        ({"cuda": 1}, rank(3, 4, "Slurm"), "cuda:0"),
        ({"cuda": 1}, rank(3, 4, "Open MPI"), "cuda:0"),
        ({"cuda": 4}, rank(3, 4, "Slurm"), "cuda:3"),
    ],
)
def test_a_rank_takes_its_own(machine, counts, identity, expected):
    current = machine(**counts)

    device = pick_device(None, identity)

    assert str(device) == expected
    assert current == ([] if expected == "cpu" else [device])


def test_fewer_devices_than_ranks_are_left_alone(machine):
    current = machine(cuda=2)

    with pytest.warns(UserWarning, match=r"^4 ranks of this node share 2 cuda device\(s\), so "):
        assert pick_device(None, rank(0, 4)) == torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pick_device(None, rank(1, 4)) == torch.device("cpu")
    assert current == []


@pytest.mark.parametrize(
    ("wanted", "identity", "expected"),
    [
        ("cpu", rank(1, 2), "cpu"),
        ("cpu:0", rank(1, 2), "cpu"),
        (torch.device("cpu"), rank(), "cpu"),
        ("cuda", rank(1, 2), "cuda:1"),
        ("cuda:0", rank(1, 2), "cuda:0"),
        (torch.device("cuda", 1), rank(0, 2), "cuda:1"),
        (torch.device("cuda"), rank(1, 4), "cuda:1"),
    ],
)
def test_a_wish_is_followed(machine, wanted, identity, expected):
    machine(cuda=2)

    assert str(pick_device(wanted, identity)) == expected


def test_a_kind_without_a_number_means_the_only_one_that_is_shown(machine):
    machine(cuda=1)

    assert str(pick_device("cuda", rank(3, 4, "Slurm"))) == "cuda:0"


CHOICES = "choose cuda, npu, xpu, cpu, or such as cuda:0"


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ("cuda:2", "device cuda:2 is beyond the 2 of this node"),
        ("cuda", "device cuda:3 is beyond the 2 of this node"),
        ("xpu", "device xpu: this node has none (choose cuda, cpu)"),
        ("gpu", f"device 'gpu' is not known ({CHOICES})"),
        ("cuda:x", f"device 'cuda:x' is not known ({CHOICES})"),
        ("meta", f"device 'meta' is not known ({CHOICES})"),
        ("", f"device '' is not known ({CHOICES})"),
        ("npu", "device npu cannot be used: No module named 'torch_npu'"),
    ],
)
def test_a_wish_that_cannot_be_followed(machine, wanted, sentence):
    machine(cuda=2)

    with pytest.raises(UsageError) as refusal:
        pick_device(wanted, rank(3, 4))

    assert refusal.value.message == sentence


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Install a torch_npu with that source."""

    def install(source):
        (tmp_path / "torch_npu.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "torch_npu", raising=False)

    yield install
    sys.modules.pop("torch_npu", None)


def test_a_plugin_is_loaded_before_its_devices_are_counted(plugin):
    # torch has no such kind until the plugin adds it.
    plugin(
        "import torch, types\ntorch.npu = types.SimpleNamespace("
        "is_available=lambda: True, device_count=lambda: 8)\n"
    )
    try:
        assert device_count("npu") == 8
    finally:
        del torch.npu


def test_a_plugin_without_its_driver_hides_nothing(machine, plugin):
    plugin("raise ImportError('libhccl.so: cannot open shared object file')")
    machine(xpu=1)

    assert str(pick_device(None, rank())) == "xpu:0"
    with pytest.raises(UsageError) as refusal:
        pick_device("npu", rank())
    assert refusal.value.message == (
        "device npu cannot be used: libhccl.so: cannot open shared object file"
    )


def test_every_group_can_talk_about_the_host():
    backends = {kind: backend_for(torch.device(kind, 0)) for kind in ("cuda", "xpu", "cpu")}

    assert backends == {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl", "cpu": "gloo"}
