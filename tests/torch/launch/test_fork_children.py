"""What a forked script starts and imports is what it would start and import under `python`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import script

import msrun

pytestmark = [pytest.mark.process, pytest.mark.torch]

# A user may well have modules of these names beside the script.
DECOYS = (
    *("launchers", "ranktable", "utils", "worker", "entry", "stdio", "bootstrap", "store"),
    *("node", "channel", "orders", "process", "forkserver", "reaper", "main_module", "title"),
)
PROGRAM = """
    import importlib, json, multiprocessing, os, pickle, subprocess, sys
    import torch
    from torch.utils.data import DataLoader, Dataset, get_worker_info

    print(f"imported as {__name__}", flush=True)

    class Point:
        def __init__(self, x):
            self.x = x

    class Numbers(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            info = get_worker_info()
            return torch.tensor([index, info.id, info.num_workers])

    def work(point, queue):
        parent = multiprocessing.parent_process()
        queue.put((Point(point.x + 1), __name__, parent.pid, parent.name))

    def in_child(context):
        queue = context.SimpleQueue()
        child = context.Process(target=work, args=(Point(1), queue))
        child.start()
        point, name, *parent = queue.get()
        child.join()
        is_ours = parent == [os.getpid(), "MainProcess"]
        return [point.x, type(point) is Point, name, is_ours, child.exitcode]

    def load(method):
        loader = DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context=method)
        return [batch.tolist() for batch in loader]

    def in_fork():
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.write(writing, pickle.dumps((Point(3), os.getppid())))
            os._exit(5)
        point, parent = pickle.loads(os.read(reading, 4096))
        return [point.x, parent == os.getpid(), os.waitstatus_to_exitcode(os.wait()[1])]

    def in_subprocess():
        code = "import sys; print(sys.argv, sys.flags.safe_path, sys.path[0]); sys.exit(4)"
        child = subprocess.run([sys.executable, "-c", code, "a"], capture_output=True, text=True)
        return [child.returncode, child.stdout, child.stderr]

    if __name__ == "__main__":
        facts = {}
        for method in ("fork", "spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            facts[method] = in_child(context)
            facts[f"loader {method}"] = load(context)
        facts["os.fork"] = in_fork()
        facts["subprocess"] = in_subprocess()
        facts["shared"] = torch.ones(3).share_memory_().is_shared()
        decoys = os.environ["DECOYS"].split(",")
        facts["decoys"] = [importlib.import_module(name).WHERE for name in decoys]
        facts["msrun"] = importlib.import_module("msrun").__file__
        with open("facts.json", "w") as file:
            json.dump(facts, file)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory, finished):
    folder = tmp_path_factory.mktemp("children")
    beside = folder / "beside"
    beside.mkdir()
    script(beside, PROGRAM)
    for name in DECOYS:
        script(beside, f"WHERE = 'the user: {name}'", f"{name}.py")
    job = finished(folder, "beside/program.py", env={"DECOYS": ",".join(DECOYS)})
    assert job.process.returncode == 0
    return job


@pytest.fixture(scope="module")
def facts(job):
    return json.loads((job.folder / "facts.json").read_text())


@pytest.mark.parametrize(
    ("method", "name"),
    [("fork", "__main__"), ("spawn", "__mp_main__"), ("forkserver", "__mp_main__")],
)
def test_a_child_takes_and_returns_classes_of_the_main_module(facts, method, name):
    assert facts[method] == [2, True, name, True, 0]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_data_loader_works_with_each_start_method(facts, method):
    assert facts[f"loader {method}"] == [[[0, 0, 2], [1, 0, 2]], [[2, 1, 2], [3, 1, 2]]]


def test_a_script_may_fork(facts):
    assert facts["os.fork"] == [3, True, 5]


def test_a_subprocess_is_an_interpreter_like_any_other(facts):
    assert facts["subprocess"] == [4, "['-c', 'a'] False \n", ""]


def test_memory_can_be_shared(facts):
    assert facts["shared"]


def test_the_users_own_modules_win_over_ours_of_the_same_name(facts):
    assert facts["decoys"] == [f"the user: {name}" for name in DECOYS]


def test_msrun_is_ours(facts):
    assert Path(facts["msrun"]) == Path(msrun.__file__)


def test_a_forked_child_does_not_run_the_script_again(job):
    """One child and two of a loader for each of the methods that begin afresh."""
    lines = job.log().splitlines()

    assert lines.count("imported as __main__") == 1
    assert lines.count("imported as __mp_main__") == 2 * 3
