"""The path to HCCL, with a stand-in for what is not here: a device kind and a backend."""

import os
import sys
import types

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import msrun

pytestmark = pytest.mark.torch


class Npu(types.ModuleType):
    """What `torch_npu` adds to torch, without memory: tensors stay on the host."""

    def __init__(self):
        super().__init__("torch.npu")
        self.current = 0

    def device_count(self):
        return 4

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def _is_in_bad_fork(self):
        return False

    def current_device(self):
        return self.current

    def set_device(self, device):
        self.current = torch.device(device).index

    def manual_seed_all(self, seed):
        pass


def install():
    """Give this process the device kind `npu` and the backend `hccl`, which is gloo."""
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", Npu())
    sys.modules["torch_npu"] = types.ModuleType("torch_npu")
    dist.Backend.register_backend(
        "hccl",
        lambda store, rank, size, timeout: dist.ProcessGroupGloo(
            store, rank, size, timeout=timeout
        ),
        devices=["cpu", "npu"],
    )


def joined():
    dist.destroy_process_group()  # that of the harness: here the runtime makes its own
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["FREE_PORT"])
    install()
    with msrun.init() as runtime:
        total = torch.ones(3)
        dist.all_reduce(total, group=runtime.group("dp"))
        backend = dist.get_backend_config()
        return str(runtime.device), torch.npu.current_device(), backend, total.tolist()


def test_hccl_is_joined_on_the_devices_own_number(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("FREE_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    found = run_ranks(joined, 2)

    assert found == [
        ("npu:0", 0, "cpu:gloo,npu:hccl", [2.0] * 3),
        ("npu:1", 1, "cpu:gloo,npu:hccl", [2.0] * 3),
    ]
