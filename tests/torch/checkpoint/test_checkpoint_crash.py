"""Whatever kills a save, and whenever: the checkpoint before it or the new one is there, whole."""

import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_calls import leaves
from ranks import TIMEOUT, run_ranks

import msrun
import msrun.parallel.checkpoint.api
from msrun.errors import UsageError
from msrun.parallel.checkpoint import schema, store
from msrun.parallel.checkpoint.checksums import DataFiles
from msrun.parallel.checkpoint.tensors import read_tensor

pytestmark = pytest.mark.torch

KILLS = 20
WIDTH = 4000
CONTEXT = multiprocessing.get_context("fork")


def manifest(step):
    return schema.Manifest(
        format=schema.FORMAT, step=step, world_size=1, mesh={}, msrun="1", torch="2", files={"a": 1}
    )


def save(target, step, keep=0):
    """Save one byte, in the order of a real save."""
    building = store.begin(target)
    (building / "a").write_bytes(str(step % 10).encode())
    store.commit(building, target, manifest(step), schema.Index(tensors={}))
    if keep:
        store.remove_oldest(target.parent, keep, target)


def kill_at(number):
    """Have the kernel kill this process at the `number`th thing that it asks of the disk."""
    counter = itertools.count(1)
    kinds = (
        "open",
        "os.mkdir",
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.scandir",
        "shutil.rmtree",
    )

    def hook(event, _):
        if event in kinds and next(counter) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _killed(number, target, step, keep):
    kill_at(number)
    save(target, step, keep)
    os._exit(0)


def _steps_there(target, step, keep):
    """Yield the killed numbers one after the other until a save gets through."""
    for number in range(1, 200):
        process = CONTEXT.Process(target=_killed, args=(number, target, step, keep))
        process.start()
        process.join(TIMEOUT)
        yield number
        if process.exitcode == 0:
            return
        assert process.exitcode == -signal.SIGKILL
    pytest.fail("the save never got through")


def test_a_kill_at_every_moment_of_replacing_one(tmp_path):
    target = tmp_path / "best"
    save(target, 1)
    for _number in _steps_there(target, 2, keep=0):
        found = store.find(target)
        step = schema.read_manifest(found).step
        assert (found / "a").read_bytes() == str(step).encode()
        assert step in (1, 2)

    assert schema.read_manifest(store.find(target)).step == 2
    save(target, 3)
    assert leaves(tmp_path) == ["best"]


def test_a_kill_at_every_moment_of_a_new_one(tmp_path):
    for step in (1, 2):
        save(store.step_path(tmp_path, step), step)
    for _number in _steps_there(store.step_path(tmp_path, 3), 3, keep=2):
        found = store.find_newest(tmp_path)
        step = schema.read_manifest(found).step
        assert (found / "a").read_bytes() == str(step).encode()
        assert step in (2, 3)

    save(store.step_path(tmp_path, 4), 4, keep=2)
    assert leaves(tmp_path) == ["step_00000003", "step_00000004"]


def _save_until_killed(folder, ready):
    """Go on from the newest checkpoint and save without end; every number is the step's."""
    config = {"mesh": {"dp": -1}, "checkpoint": {"dir": str(folder), "keep": 2, "async": True}}
    runtime = msrun.init(config)
    model = torch.nn.Linear(WIDTH, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoints = msrun.parallel.checkpoint.api.Checkpoints(runtime.config, runtime.context)
    first = checkpoints.resume(model, optimizer)
    if first:
        assert _values(model, optimizer) == {first}
    for step in itertools.count(first + 1):
        with torch.no_grad():
            model.weight.fill_(step)
        optimizer.state[model.weight] = {"momentum_buffer": torch.full((1, WIDTH), float(step))}
        checkpoints.save(None, model, optimizer, step=step)
        if step > first + 1:  # the one before is there
            ready.set()


def _values(model, optimizer):
    tensors = [model.weight, *optimizer.state[model.weight].values()]
    return {int(value) for tensor in tensors for value in tensor.unique().tolist()}


def _rank(rank, world_size, store_file, function, args):
    own = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in own.items()}, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store_file, world_size), rank=rank, world_size=world_size
    )
    function(*args)


def _kill_during(function, folder, moment, store_file):
    """Start two ranks, and kill both at `moment` seconds after their first save."""
    ready = CONTEXT.Event()
    ranks = [
        CONTEXT.Process(target=_rank, args=(rank, 2, store_file, function, (folder, ready)))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    try:
        assert ready.wait(TIMEOUT)
        time.sleep(moment)
        assert [rank.exitcode for rank in ranks] == [None, None]
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join()


def _numbers(checkpoint):
    index = schema.read_index(checkpoint, schema.read_manifest(checkpoint))
    with DataFiles(checkpoint, schema.read_manifest(checkpoint).checksums) as files:
        return {
            value
            for name, stored in index.tensors.items()
            if not name.startswith("random.")
            for value in read_tensor(files, stored).unique().tolist()
        }


def test_killed_ranks_leave_a_whole_checkpoint(tmp_path):
    moments = random.Random(1)
    last = 0
    for number in range(KILLS):
        _kill_during(
            _save_until_killed, tmp_path / "c", moments.uniform(0, 0.06), f"{tmp_path}/{number}"
        )
        newest = store.find_newest(tmp_path / "c")
        step = schema.read_manifest(newest).step
        assert _numbers(newest) == {step}
        assert step >= last
        last = step
    assert last > KILLS


def _load(path):
    runtime = msrun.init({"mesh": {"dp": -1}})
    model = torch.nn.Linear(WIDTH, 1, bias=False)
    with pytest.raises(UsageError) as caught:
        msrun.parallel.checkpoint.api.Checkpoints(runtime.config, runtime.context).load(path, model)
    return caught.value.message


def test_a_shortened_file_is_noticed(tmp_path):
    save(tmp_path / "c", 1)
    os.truncate(tmp_path / "c" / "a", 0)

    assert run_ranks(_load, 1, tmp_path / "c") == [
        f"{tmp_path / 'c'} is broken: a has 0 bytes instead of 1"
    ]
    assert Path(tmp_path / "c").is_dir()
