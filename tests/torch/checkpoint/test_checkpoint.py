"""What a checkpoint gives back, where it lies, and how it says that it cannot."""

import errno
import json
import math
import random
import shutil

import numpy as np
import pytest
import torch
from checkpoint_calls import drop_checksums, in_one, leaves, make, refusal, start, train
from ranks import MODELS, build, run_warm
from torch import nn

import msrun.parallel.checkpoint.api
from msrun.parallel.checkpoint import store

pytestmark = pytest.mark.torch


# Random generators


def _draw(count=3):
    return [
        torch.rand(count).tolist(),
        [random.random() for _ in range(count)],
        [random.gauss(0, 1) for _ in range(count)],
        np.random.standard_normal(count).tolist(),  # noqa: NPY002 - the global one is saved
    ]


def _random_numbers(folder, path, seed):
    runtime, checkpoints = start()
    network, optimizer = make()
    for kind in (torch.manual_seed, random.seed, np.random.seed):
        kind(seed + runtime.rank if seed else 5)
    random.gauss(0, 1)  # it keeps a second one
    np.random.standard_normal()  # noqa: NPY002 - as above
    if path:
        checkpoints.load(folder / path, network, optimizer)
    else:
        checkpoints.save(folder / "c", network, optimizer, step=1)
    return _draw()


def test_random_generators_go_on(tmp_path):
    before = run_warm(_random_numbers, 2, tmp_path, None, 100)

    assert run_warm(_random_numbers, 2, tmp_path, "c", 200) == before
    assert before[0] != before[1]


def test_random_generators_in_another_layout(tmp_path):
    before = run_warm(_random_numbers, 2, tmp_path, None, 100)

    found = run_warm(_random_numbers, 4, tmp_path, "c", 200)

    assert found[0] == before[0]
    streams = [stream for rank in found for stream in rank]
    assert all(streams.count(stream) == 1 for stream in streams)
    assert run_warm(_random_numbers, 4, tmp_path, "c", 300) == found


def test_a_common_stream_stays_common(tmp_path):
    before = run_warm(_random_numbers, 2, tmp_path, None, 0)

    assert run_warm(_random_numbers, 3, tmp_path, "c", 200) == [before[0]] * 3


def _dropout(folder, *, is_resumed):
    runtime, checkpoints = start(checkpoint={"dir": str(folder)})
    network, optimizer = make("transformer", dropout=0.5)
    torch.manual_seed(6 + is_resumed)
    if is_resumed:
        assert checkpoints.resume(network, optimizer) == 2
    else:
        train(network, optimizer, slice(2), "transformer")
        checkpoints.save(None, network, optimizer, step=2)
    del runtime
    return train(network, optimizer, slice(2, 5), "transformer")


def test_dropout_goes_on_exactly(tmp_path):
    expected = run_warm(_dropout_first, 1, tmp_path)

    assert run_warm(_dropout_resumed, 1, tmp_path) == expected


def _dropout_first(folder):
    return _dropout(folder, is_resumed=False)


def _dropout_resumed(folder):
    return _dropout(folder, is_resumed=True)


# Loader, step and extra


def _indices(folder, steps):
    runtime, checkpoints = start(checkpoint={"dir": str(folder)})
    network, optimizer = make()
    loader = runtime.loader(range(48), batch_size=12 // runtime.world_size, shuffle=True, seed=4)
    first = checkpoints.resume(network, optimizer, loader)
    found = []
    for step, batch in enumerate(loader, first):
        found.append(batch.tolist())
        if step + 1 == first + steps:
            checkpoints.save(None, network, optimizer, step=step + 1, loader=loader)
            break
    return first, found


def test_the_loader_goes_on_with_more_and_fewer_ranks(tmp_path):
    seen, before = [], 0
    for world_size, steps in ((4, 1), (3, 2), (1, 1)):
        found = run_warm(_indices, world_size, tmp_path, steps)
        assert {first for first, _ in found} == {before}
        seen += [index for _, parts in found for part in parts for index in part]
        before += steps

    assert sorted(seen) == list(range(48))


@in_one
def test_extra_comes_back(folder):
    """Plain values, and objects with a state: both come back, infinities too."""
    _, checkpoints = start()
    network, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    best = {"best": math.inf, "seen": [1, None, "é"], "pair": (1, 2)}
    scheduler.step(3.0)
    scheduler.step(4.0)
    checkpoints.save(folder / "c", network, step=7, extra={"scheduler": scheduler, **best})

    again = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    restored = checkpoints.load(folder / "c", network, extra={"scheduler": again, "best": 0.0})

    assert again.state_dict() == scheduler.state_dict()
    assert restored.step == 7
    assert {**restored.extra, "scheduler": None} == {**best, "pair": [1, 2], "scheduler": None}
    assert refusal(checkpoints.load, folder / "c", network, extra={"other": again}) == (
        "the checkpoint has no extra 'other'"
    )


@in_one
def test_extra_that_json_cannot_say(folder):
    """Refused before anything is written."""
    _, checkpoints = start()
    network, optimizer = make()
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    for sentence, value in {
        "extra['x'] is a set; a checkpoint holds tensors of models and optimizers, and JSON "
        "values": {1},
        "extra['x'].milestones: key 1 is no text, and JSON has no other": steps,
        "extra['x'][0] is a Tensor of several elements": [torch.zeros(2)],
    }.items():
        extra = {"x": value}
        assert refusal(checkpoints.save, folder / "c", network, step=1, extra=extra) == sentence
    assert leaves(folder) == []


# Directories


@in_one
def test_keeps_the_newest(folder):
    """And what is not of the kind that it makes stays."""
    _, checkpoints = start(checkpoint={"dir": str(folder / "c"), "keep": 2})
    network, optimizer = make()
    (folder / "c").mkdir()
    (folder / "c" / ".step_00000007.partial").mkdir()
    (folder / "c" / "notes").mkdir()
    for step in (8, 9, 10, 11):
        checkpoints.save(None, network, optimizer, step=step)
    checkpoints.save(folder / "c" / "best", network, step=3)

    assert leaves(folder / "c") == ["best", "notes", "step_00000010", "step_00000011"]


@in_one
def test_keeps_all(folder):
    """With keep 0."""
    _, checkpoints = start(checkpoint={"dir": str(folder), "keep": 0})
    network, _ = make()
    for step in range(7):
        checkpoints.save(None, network, step=step)

    assert len(leaves(folder)) == 7


@in_one
def test_a_checkpoint_is_replaced(folder):
    """By another under its name; anything else is not."""
    _, checkpoints = start()
    network, _ = make()
    (folder / "empty").mkdir()
    (folder / "full" / "of").mkdir(parents=True)
    (folder / "file").touch()
    for name, step in (("c", 1), ("c", 2), ("empty", 3)):
        checkpoints.save(folder / name, network, step=step)
        assert checkpoints.load(folder / name, network).step == step

    full, file = folder / "full", folder / "file"
    assert refusal(checkpoints.save, full, network, step=1) == f"{full} exists and is no checkpoint"
    assert refusal(checkpoints.save, file, network, step=1) == f"{file} exists and is no directory"
    assert leaves(folder) == ["c", "empty", "file", "full"]


def _scheduled(folder, steps):
    """Train with dropout, a scheduler and automatic saves; return what can be seen of it."""
    config = {"checkpoint": {"dir": str(folder), "every": 2}, "seed": 8}
    runtime, checkpoints = start(**config)
    network, optimizer = make("transformer", dropout=0.5)
    loader = runtime.loader(range(32), batch_size=4, shuffle=True, generator=torch.Generator())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    first = checkpoints.resume(network, optimizer, loader, extra={"scheduler": scheduler})
    seen = {}
    for step, batch in zip(range(first, steps), loader, strict=False):
        random.random()  # as an augmentation of the batch would
        checkpoints.before_step()
        [loss] = train(network, optimizer, slice(step % 4, step % 4 + 1), "transformer")
        seen[step] = (batch.tolist(), optimizer.param_groups[0]["lr"], loss, random.random())
        checkpoints.after_step(network, optimizer)
        scheduler.step()
    if steps == 4:
        checkpoints.finish()
    return first, seen


def test_goes_on_from_what_it_saved_by_itself(tmp_path):
    [(_, expected)] = run_warm(_scheduled, 1, tmp_path / "whole", 8)

    # The first ends well, and saves its last step; the second does not.
    [(first, seen)] = run_warm(_scheduled, 1, tmp_path / "parts", 4)
    [(second, more)] = run_warm(_scheduled, 1, tmp_path / "parts", 7)
    [(third, last)] = run_warm(_scheduled, 1, tmp_path / "parts", 8)

    assert (first, second, third) == (0, 4, 6)
    assert {**seen, **more} == {step: expected[step] for step in range(7)}
    assert last == {step: expected[step] for step in (6, 7)}


@in_one
def test_resume_takes_the_newest_that_is_whole(folder):
    """One that was damaged is passed over."""
    _, checkpoints = start(checkpoint={"dir": str(folder / "c")})
    network, optimizer = make()
    assert checkpoints.resume(network, optimizer) == 0
    for step in (1, 2, 3):
        checkpoints.save(None, network, optimizer, step=step)
    (folder / "c" / "step_00000003" / "rank_00000.safetensors").unlink()
    shutil.copytree(folder / "c" / "step_00000002", folder / "c" / ".step_00000004.partial")

    assert checkpoints.resume(network, optimizer) == 2


# In the background


@in_one
def test_later_steps_do_not_change_what_is_saved(folder):
    """And a second save waits for the first."""
    _, checkpoints = start(checkpoint={"dir": str(folder), "async": True})
    network, optimizer = make()
    train(network, optimizer, slice(1))
    written, blocked = [], []
    write = msrun.parallel.checkpoint.api.write_file

    def slow(path, *args):
        blocked.append(store.find_newest(folder))
        with torch.no_grad():
            network.fc1.weight.fill_(0)
            optimizer.state[network.fc1.weight]["exp_avg"].fill_(0)
        written.append(path)
        return write(path, *args)

    msrun.parallel.checkpoint.api.write_file = slow
    before = network.fc1.weight.clone()
    average = optimizer.state[network.fc1.weight]["exp_avg"].clone()
    checkpoints.save(None, network, optimizer, step=1)
    checkpoints.save(None, network, optimizer, step=2)
    assert len(written) >= 1
    checkpoints.finish()

    assert [path and path.name for path in blocked] == [None, "step_00000001"]
    checkpoints.load(folder / "step_00000001", network, optimizer)
    assert torch.equal(network.fc1.weight, before)
    assert torch.equal(optimizer.state[network.fc1.weight]["exp_avg"], average)


def _full_disk(folder, *, is_async):
    runtime, checkpoints = start(checkpoint={"dir": str(folder), "async": is_async})
    network, _ = make()
    checkpoints.save(None, network, step=1)
    checkpoints.finish()
    write = msrun.parallel.checkpoint.api.write_file

    def full(path, *args):
        if runtime.rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device", "DISK")
        return write(path, *args)

    msrun.parallel.checkpoint.api.write_file = full
    if is_async:
        checkpoints.save(None, network, step=2)
        sentence = refusal(checkpoints.save, None, network, step=3)
    else:
        sentence = refusal(checkpoints.save, None, network, step=2)
    msrun.parallel.checkpoint.api.write_file = write
    assert checkpoints.load(None, network).step == 1
    checkpoints.save(None, network, step=4)
    checkpoints.finish()
    return sentence, leaves(folder)


def _full_disk_now(folder):
    return _full_disk(folder, is_async=False)


def _full_disk_behind(folder):
    return _full_disk(folder, is_async=True)


@pytest.mark.parametrize("function", [_full_disk_now, _full_disk_behind])
def test_a_failure_of_one_rank_is_told_on_all(tmp_path, function):
    there = ["step_00000001", "step_00000004"]
    assert run_warm(function, 3, tmp_path) == [
        ("rank 1: DISK: No space left on device", there),
        ("DISK: No space left on device", there),
        ("rank 1: DISK: No space left on device", there),
    ]


# Refusals


def _damage(folder, name, change):
    """Return a copy of the checkpoint `c`, without checksums, with a change to the file `name`."""
    copy = folder / f"{name}-{len(leaves(folder))}"
    shutil.copytree(folder / "c", copy)
    drop_checksums(copy)
    content = json.loads((copy / name).read_text())
    change(content)
    (copy / name).write_text(json.dumps(content))
    if name == "index.json":
        manifest = json.loads((copy / "checkpoint.json").read_text())
        manifest["files"]["index.json"] = (copy / "index.json").stat().st_size
        (copy / "checkpoint.json").write_text(json.dumps(manifest))
    return copy


@in_one
def test_what_is_no_checkpoint(folder):
    """One sentence, and nothing is changed."""
    _, checkpoints = start()
    network, optimizer = make()
    checkpoints.save(folder / "c", network, optimizer, step=1)
    (folder / "empty").mkdir()
    (folder / "torch").mkdir()
    (folder / "torch" / ".metadata").write_bytes(b"\x80\x04")
    (folder / "text").mkdir()
    (folder / "text" / "checkpoint.json").write_text("step: 3")
    (folder / "deep").mkdir()
    (folder / "deep" / "checkpoint.json").write_text("[" * 100_000)

    def chunk(content):
        return content["tensors"]["model.fc1.weight"]["chunks"][0]

    fits = "'model.fc1.weight' does not fit the data files"
    cases = {
        folder / "nowhere": "HERE: there is no checkpoint",
        folder / "empty": "HERE is no checkpoint and holds none: it has no checkpoint.json",
        folder / "torch": "HERE is no checkpoint and holds none: it has no checkpoint.json",
        folder / "text": "HERE is broken: HERE/checkpoint.json is no JSON",
        folder / "deep": "HERE is broken: HERE/checkpoint.json is no JSON",
        _damage(folder, "checkpoint.json", lambda c: c.update(format=2)): (
            "HERE is broken: HERE: format 2 is of a later msrun, this one knows up to 1"
        ),
        _damage(folder, "checkpoint.json", lambda c: c.pop("mesh")): (
            "HERE is broken: HERE/checkpoint.json: object missing required field `mesh`"
        ),
        _damage(folder, "checkpoint.json", lambda c: c["files"].update({"../c/index.json": 1})): (
            "HERE is broken: HERE/checkpoint.json: '../c/index.json' is no name of a file in it"
        ),
        _damage(folder, "index.json", lambda c: chunk(c).update(start=10**9)): (
            f"HERE/index.json: {fits}"
        ),
        _damage(folder, "index.json", lambda c: chunk(c).update(start=-4)): (
            f"HERE/index.json: {fits}"
        ),
        _damage(folder, "index.json", lambda c: chunk(c).update(at=[1, 0])): (
            f"HERE/index.json: {fits}"
        ),
        _damage(folder, "index.json", lambda c: chunk(c).update(file="/etc/passwd")): (
            f"HERE/index.json: {fits}"
        ),
        _damage(folder, "index.json", lambda c: c["tensors"]["model.fc1.weight"].pop("chunks")): (
            "HERE/index.json: object missing required field `chunks` - at `$.tensors[...]`"
        ),
        _damage(folder, "index.json", lambda c: c["aliases"].update(x="y")): (
            "HERE/index.json: 'x' is an alias of no tensor"
        ),
    }
    before = network.fc1.weight.clone()
    for path, sentence in cases.items():
        found = refusal(checkpoints.load, path, network, optimizer)
        assert found.replace(str(path), "HERE") == sentence
    assert torch.equal(network.fc1.weight, before)


@in_one
def test_what_does_not_fit(folder):
    """The model, the optimizer or the loader that is given."""
    runtime, checkpoints = start()
    network, optimizer = make()
    checkpoints.save(folder / "c", network, step=1)
    checkpoints.save(folder / "o", network, optimizer, step=1)

    def load(model, *args, path="c", **options):
        return refusal(checkpoints.load, folder / path, model, *args, **options)

    more, wide = build("mlp"), build("mlp")
    more.fc4 = nn.Linear(2, 2)
    wide.fc2 = nn.Linear(32, 33)
    fewer = build("mlp")
    del fewer.fc3
    assert load(more) == "the checkpoint has no fc4.weight"
    assert load(fewer) == "the model has no place for fc3.bias and 1 more of the checkpoint"
    assert load(wide) == "fc2.weight is [33, 32] in the model and [32, 32] in the checkpoint"
    assert load(network, optimizer) == "the checkpoint has no state of an optimizer"
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2, 3))])
    assert load(network, other, path="o") == (
        "SGD holds a parameter of shape [2, 3] that is in no model"
    )
    loader = runtime.loader(range(4), batch_size=1)
    assert load(network, loader=loader) == "the checkpoint has no state of a loader"
    assert refusal(checkpoints.save, folder / "x", [network, build("mlp")], step=1) == (
        "two of the models have fc1.weight"
    )
    with torch.device("meta"):
        empty = MODELS["mlp"][0]()
    assert load(empty) == "fc1.weight is on the device meta, which holds no values"
    assert refusal(checkpoints.save, folder / "x", empty, step=1) == (
        "model.fc1.weight is on the device meta, where it has no values"
    )


@in_one
def test_no_directory_is_configured(folder):
    """And none is named."""
    del folder
    _, checkpoints = start()
    network, optimizer = make()
    for who, call in {
        "rt.save": lambda: checkpoints.save(None, network, step=1),
        "rt.load": lambda: checkpoints.load(None, network),
        "rt.resume": lambda: checkpoints.resume(network, optimizer),
    }.items():
        assert refusal(call) == f"{who} knows no directory"


@in_one
def test_what_cannot_be_stored(folder):
    """Sparse tensors, and types that safetensors does not know."""
    _, checkpoints = start()
    network = nn.Module()
    network.register_buffer("table", torch.eye(2).to_sparse())
    assert refusal(checkpoints.save, folder / "c", network, step=1) == (
        "model.table is sparse_coo, and a checkpoint holds dense tensors"
    )
    network.table = torch.zeros(2, dtype=torch.complex128)
    assert refusal(checkpoints.save, folder / "c", network, step=1).startswith(
        "model.table is complex128 (a checkpoint knows bool, uint8, "
    )
