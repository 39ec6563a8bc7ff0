"""Devices that torch alone can count."""

import os
import sys

import pytest

from msrun.errors import UsageError
from msrun.processes import accelerators

TORCH = """
import types
def device(kind):
    if kind != "xpu": raise RuntimeError("Expected one of cpu, xpu device type at start of ...")
    return kind
def get_device_module(kind): return accelerator
accelerator = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 3)
print("a line of an extension")
"""


@pytest.fixture
def count(tmp_path):
    """Count devices with a made-up torch."""

    def call(kind, text=TORCH, files=()):
        (tmp_path / "torch.py").write_text(text)
        for file in files:
            (tmp_path / file).mkdir(parents=True)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        return accelerators.count(kind, env, tmp_path)

    return call


def test_torch_counts_the_devices_of_a_kind(count):
    assert count("xpu") == 3


def test_a_kind_that_torch_does_not_know(count):
    assert count("gpus") is None


def test_any_device_is_looked_for_where_a_file_hints_at_one(count):
    assert count("auto") == 0
    assert count("auto", files=["dev/dri"]) == 3


def test_devices_that_are_not_available_are_none(count):
    assert count("xpu", TORCH.replace("lambda: True", "lambda: False")) == 0


@pytest.mark.parametrize(
    "text", ["raise ImportError('libxpu.so is missing')", "import os; os._exit(0)"]
)
def test_a_torch_that_cannot_tell_is_one_sentence(count, text):
    with pytest.raises(UsageError, match="torch cannot count the xpu devices of this machine: "):
        count("xpu", text)


def test_the_real_torch_knows_its_kinds():
    pytest.importorskip("torch")
    assert accelerators.count("xpu", os.environ) == 0
    assert accelerators.count("none", os.environ) is None
