"""Which scripts use the standard library alone, so that nobody imports torch for them."""

import pytest

from msrun.supervise.orders import Configure, Ready
from msrun.worker.plain_script import ready_without_torch

PLAIN = {
    "nothing": "print(1)",
    "the standard library": "import os, sys, json.decoder\nfrom pathlib import Path",
    "beats": "import msrun\nmsrun.beat()",
    "beats by name": "from msrun import beat\nbeat()",
}
OTHERS = {
    "torch": "import torch",
    "a part of it": "from torch.nn import Linear",
    "within a function": "def train():\n    import torch",
    "a module beside it": "import helper",
    "one of its package": "from . import helper",
    "the runtime": "import os, msrun\nmsrun.beat()\nmsrun.init()",
    "the runtime by name": "from msrun import beat, init",
    "the runtime by another name": "import msrun as m\nm.init()",
    "a part of the runtime": "import msrun.parallel.runtime",
    "the runtime as a value": "import msrun\nprint(msrun)",
    "by a name": "import importlib\nimportlib.import_module('torch')",
    "by a call": "__import__('torch')",
    "by a text": "exec('import torch')",
    "by a pickle": "import pickle, sys\npickle.load(sys.stdin.buffer)",
    "a syntax error": "import os; import",
    "bytes": "\0",
}


def configure(folder, text, **others):
    (folder / "train.py").write_text(text)
    given = {"kind": "script", "argv": ["train.py"], "preload": ["torch", "torch.nn"]}
    return Configure(job_id="job", cwd=str(folder), run_dir="", threads="1", **(given | others))


@pytest.mark.parametrize("text", PLAIN.values(), ids=PLAIN)
def test_what_uses_the_standard_library_alone_is_ready_at_once(tmp_path, text):
    assert ready_without_torch(configure(tmp_path, text)) == Ready(fork=True, seconds=0.0)


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_what_may_use_torch_is_not(tmp_path, text):
    assert ready_without_torch(configure(tmp_path, text)) is None


@pytest.mark.parametrize(
    "others",
    [
        {"kind": "module"},
        {"argv": ["a missing file"]},
        {"fork": False},
        {"preload": ["torch", "msrun.parallel.preload"]},
        {"preload_of_user": ["helper"]},
    ],
    ids="-".join,
)
def test_what_is_preloaded_for_a_reason_is_loaded(tmp_path, others):
    assert ready_without_torch(configure(tmp_path, "print(1)", **others)) is None
