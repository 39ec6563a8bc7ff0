"""Variables that a script sets before `import torch` mean what they mean under python."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from support import environment, script

from msrun.worker.early_variables import AT_IMPORT

pytestmark = [pytest.mark.torch, pytest.mark.process]

SCRIPT = """
    import os
    BEFORE
    IMPORT
    import torch
    print("seen:", LOOK)
"""
LOGS = "__import__('logging').getLogger('torch._dynamo').level"
DEBUG = "__import__('torch.distributed').distributed.get_debug_level().name"
THREADS = "torch.get_num_threads()"
SCRIPTED = "type(torch.jit.script(torch.nn.Linear(1, 1))).__name__"
# What the script does first -> what it looks at: torch follows without a word.
FOLLOWED = {
    "threads": ("os.environ['OMP_NUM_THREADS'] = '2'", THREADS),
    "threads by update": ("os.environ.update(OMP_NUM_THREADS='2')", THREADS),
    "logs": ("os.environ['TORCH_LOGS'] = '+dynamo'", LOGS),
    "debug level": ("os.environ['TORCH_DISTRIBUTED_DEBUG'] = 'INFO'", DEBUG),
    "scripting": ("os.environ['PYTORCH_JIT'] = '0'", SCRIPTED),
    "devices": ("os.environ['CUDA_VISIBLE_DEVICES'] = ''", "torch.cuda.device_count()"),
    "a part of torch": ("os.environ['OMP_NUM_THREADS'] = '2'; from torch import nn", THREADS),
}


def program(folder, before, look, imports=""):
    text = SCRIPT.replace("BEFORE", before).replace("LOOK", look).replace("IMPORT", imports)
    return script(folder, text)


def seen(log):
    return re.findall(r"^seen: .*$", log, re.MULTILINE)


@pytest.fixture
def plain(tmp_path):
    def run(path):
        command = [sys.executable, path]
        env = environment(tmp_path) | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=env, text=True, capture_output=True, check=True).stdout

    return run


@pytest.mark.parametrize("case", FOLLOWED)
@pytest.mark.few(2)
def test_what_can_be_told_later_takes_effect(finished, plain, tmp_path, case):
    path = program(tmp_path, *FOLLOWED[case])

    job = finished(tmp_path, path, env={"OMP_NUM_THREADS": "1"})

    assert seen(job.log()) == seen(plain(path)) != []
    assert "[msrun]" not in job.log()
    assert "warning" not in job.err


@pytest.mark.slow
def test_they_would_be_seen_otherwise(plain, tmp_path):
    """Each case above has an effect: without the variable python says something else."""
    for before, look in list(FOLLOWED.values())[:5]:
        with_it, without = (plain(program(tmp_path, b, look)) for b in (before, "pass"))
        assert seen(with_it) != seen(without), look


def test_a_script_that_sets_one_for_the_import_gets_interpreters_of_its_own(finished, tmp_path):
    path = program(tmp_path, "os.environ.update(KMP_BLOCKTIME='1', OMP_PROC_BIND='close')", "'x'")

    job = finished(tmp_path, "--workers-per-node=2", path)

    said = "warning: program.py sets KMP_BLOCKTIME, OMP_PROC_BIND, which torch reads only while"
    assert job.err.count(said) == 1
    assert "so every worker is an interpreter of its own" in job.err
    assert seen(job.log(1)) == ["seen: x"]


def test_a_module_and_a_directory_are_read_as_a_script_is(finished, tmp_path):
    (tmp_path / "pkg").mkdir()
    text = "import os; os.environ['KMP_BLOCKTIME'] = '1'"
    script(tmp_path / "pkg", text, "__init__.py")
    script(tmp_path / "pkg", "import torch", "train.py")
    script(tmp_path / "pkg", f"{text}\nimport torch", "__main__.py")

    for words, name in ((("-m", "pkg.train"), "pkg.train"), (("pkg",), "pkg")):
        job = finished(tmp_path, *words)

        assert f"warning: {name} sets KMP_BLOCKTIME, which torch reads only" in job.err


def test_one_that_comes_too_late_is_named_once(finished, tmp_path):
    script(tmp_path, "import os; os.environ['TORCH_SHOW_CPP_STACKTRACES'] = '1'", "settings.py")
    path = program(tmp_path, "import settings", "'x'")

    job = finished(tmp_path, "--workers-per-node=2", path)

    assert job.log(0).count("TORCH_SHOW_CPP_STACKTRACES changed after torch was loaded") == 1
    assert "changed" not in job.log(1)


def test_what_is_set_after_the_import_starts_no_interpreter(finished, tmp_path):
    path = script(tmp_path, "import os\nimport torch\nos.environ['KMP_BLOCKTIME'] = '1'\n")

    job = finished(tmp_path, path)

    assert "warning" not in job.err
    assert "[msrun]" not in job.log()


def test_torch_is_as_it_was(finished, plain, tmp_path):
    text = """
        import importlib.util, sys
        names = [type(each).__name__ for each in sys.meta_path]
        print("seen:", "torch" in sys.modules, importlib.util.find_spec("torch").origin)
        from torch.utils.data import DataLoader
        import torch.nn.functional as F
        import torch
        print("seen:", torch.__spec__.loader.__class__.__name__, torch.__spec__.name, F.__name__)
        print("seen:", sys.modules["torch"] is torch, len(sys.meta_path), torch.ones(2).sum())
        print("seen:", importlib.util.find_spec("torch") is torch.__spec__)
    """
    path = script(tmp_path, text)

    assert seen(finished(tmp_path, path).log()) == seen(plain(path))


READS = """
    import os
    known = os.environ.__class__
    class Seen(known):
        def __getitem__(self, name):
            print(name)
            return super().__getitem__(name)
        __contains__ = lambda self, name: (print(name), super().__contains__(name))[1]
    os.environ.__class__ = Seen
    import torch, torch.distributed.nn
"""
FOLLOWED_NAMES = {
    "OMP_NUM_THREADS",
    "TORCH_LOGS",
    "TORCH_LOGS_OUT",
    "PYTORCH_JIT",
    "TORCH_DISTRIBUTED_DEBUG",
}


def test_all_that_torch_reads_at_import_is_known(plain, tmp_path, monkeypatch):
    # torch sets it in a process that has compiled something, as the one of the tests.
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    names = set(plain(script(tmp_path, READS)).split())

    of_torch = {name for name in names if re.match("TORCH|PYTORCH|OMP|MKL|KINETO|FX_PATCH", name)}
    assert len(of_torch) > 20
    unknown = {name for name in of_torch - FOLLOWED_NAMES if not AT_IMPORT.fullmatch(name)}
    assert unknown == set()
