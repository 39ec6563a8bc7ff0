"""Damaged and unreadable checkpoints: noticed, told, and never the reason to begin at step 0."""

import json
import logging
import os
import shutil
import zlib

import pytest
import torch
from checkpoint_calls import drop_checksums, in_one, leaves, make, refusal, start
from ranks import run_warm
from torch import nn

from msrun.parallel.checkpoint import store
from msrun.parallel.checkpoint.checksums import BLOCK_BYTES, PART_BYTES, DataFiles, checksums_of

pytestmark = pytest.mark.torch

DATA, INDEX, MANIFEST = "rank_00000.safetensors", "index.json", "checkpoint.json"
DAMAGED = "is damaged: it has another checksum than when it was written"


def flip(path, at=-1):
    """Change one bit, so that the size stays."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def saved(folder, steps=(1, 2)):
    """Save a model filled with the number of the step, after each of `steps`."""
    _, checkpoints = start(checkpoint={"dir": str(folder)})
    network, optimizer = make()
    for step in steps:
        with torch.no_grad():
            network.fc1.weight.fill_(step)
        checkpoints.save(None, network, optimizer, step=step)
    return checkpoints, network, optimizer


class Sentences(logging.Handler):
    """Warnings of the store."""

    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append(record.getMessage())

    def __enter__(self):
        store._log.addHandler(self)
        return self.found

    def __exit__(self, *_):
        store._log.removeHandler(self)


@in_one
def test_each_file_has_a_checksum(folder):
    saved(folder, [1])
    place = folder / "step_00000001"
    manifest = json.loads((place / MANIFEST).read_text())

    assert manifest["checksums"] == {
        name: checksums_of((place / name).read_bytes()) for name in (DATA, INDEX)
    }
    assert leaves(place) == sorted([*manifest["checksums"], MANIFEST])


@in_one
def test_one_bit_of_any_file_is_noticed(folder):
    """The directory is one checkpoint, so there is no other to load."""
    checkpoints, network, optimizer = saved(folder, [1])
    for name, at in ((DATA, -1), (DATA, 3), (INDEX, 40), (MANIFEST, 10)):
        copy = folder / f"{name}{at}"
        shutil.copytree(folder / "step_00000001", copy)
        flip(copy / name, at)
        assert f"{name} is " in refusal(checkpoints.load, copy, network, optimizer)


def _fall_back(place, name, damage, sentence):
    checkpoints, network, optimizer = saved(place)
    damage(place / "step_00000002" / name)
    with Sentences() as told:
        assert checkpoints.resume(network, optimizer) == 1
    assert network.fc1.weight.unique().tolist() == [1.0]
    [line] = told
    assert line.startswith(f"{place / 'step_00000002'} is passed over: ")
    assert line.endswith(sentence)
    # The directory of several loads alike, and the next save replaces the damaged one.
    assert checkpoints.load(place, network, optimizer).step == 1
    checkpoints.save(None, network, optimizer, step=2)
    assert checkpoints.resume(network, optimizer) == 2


def _shorten(path):
    os.truncate(path, path.stat().st_size - 1)


def _flip_inside(path):
    flip(path, 40)


def _loop(path):
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        (DATA, flip, "have another checksum than when they were written"),
        (INDEX, _flip_inside, DAMAGED),
        (MANIFEST, _flip_inside, DAMAGED),
        (MANIFEST, _loop, "Too many levels of symbolic links"),
        (DATA, _loop, "Too many levels of symbolic links"),
        (DATA, _shorten, "bytes instead of 23544"),
    ],
)
def test_resume_falls_back_to_an_older_one(tmp_path, name, damage, sentence):
    """Whatever is damaged, one sentence says it and why."""
    run_warm(_fall_back, 1, tmp_path / "c", name, damage, sentence)


@in_one
def test_resume_refuses_to_begin_anew_over_checkpoints(folder):
    """Each is named, and why it cannot be used."""
    checkpoints, network, optimizer = saved(folder, (1, 2, 3))
    flip(folder / "step_00000001" / DATA)
    later = folder / "step_00000002" / MANIFEST
    drop_checksums(later.parent)
    later.write_text(json.dumps({**json.loads(later.read_text()), "format": 9}))
    (folder / "step_00000003" / MANIFEST).unlink()

    sentence = refusal(checkpoints.resume, network, optimizer)

    last = f"{folder}/step_00000001/{DATA}"
    assert sentence.startswith(f"{folder}: none of 3 checkpoints can be used: ")
    parts = sentence.partition("used: ")[2].split("; ")
    assert parts[0] == (
        f"step_00000003: {folder}/step_00000003/{MANIFEST} cannot be read: "
        "No such file or directory"
    )
    assert parts[1] == (
        f"step_00000002: {folder}/step_00000002: format 9 is of a later msrun, "
        "this one knows up to 1"
    )
    assert parts[2].startswith(f"step_00000001: {last} is damaged: its bytes 0 to ")


@in_one
def test_the_next_save_replaces_one_without_a_manifest(folder):
    """A job that fell back would else die where it reaches that step again."""
    checkpoints, network, optimizer = saved(folder)
    (folder / "step_00000002" / MANIFEST).unlink()
    assert checkpoints.resume(network, optimizer) == 1
    checkpoints.save(None, network, optimizer, step=2)
    assert checkpoints.resume(network, optimizer) == 2

    (folder / "step_00000003").mkdir()
    (folder / "step_00000003" / "thesis.txt").write_text("of somebody else")
    assert refusal(checkpoints.save, None, network, optimizer, step=3) == (
        f"{folder / 'step_00000003'} exists and is no checkpoint"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_resume_names_what_it_may_not_read(tmp_path):
    run_warm(_unreadable, 1, tmp_path)


def _unreadable(folder):
    checkpoints, network, optimizer = saved(folder)
    for step in (1, 2):
        (folder / f"step_0000000{step}").chmod(0)
    try:
        assert "Permission denied" in refusal(checkpoints.resume, network, optimizer)
    finally:
        for step in (1, 2):
            (folder / f"step_0000000{step}").chmod(0o700)


@in_one
def test_checkpoints_of_earlier_releases_load_unchecked(folder):
    checkpoints, network, optimizer = saved(folder, [1])
    drop_checksums(folder / "step_00000001")
    flip(folder / "step_00000001" / DATA)

    assert checkpoints.resume(network, optimizer) == 1


@in_one
def test_a_manifest_with_checksums_needs_its_own(folder):
    checkpoints, network, optimizer = saved(folder, [1])
    path = folder / "step_00000001" / MANIFEST
    content = json.loads(path.read_text())
    del content["checksum"]
    path.write_text(json.dumps(content))

    assert refusal(checkpoints.load, path.parent, network, optimizer) == (
        f"{path.parent} is broken: {path} {DAMAGED}"
    )


def _fall_back_together(folder):
    runtime, _ = start(checkpoint={"dir": str(folder)}, optimizer={"zero": 3, "threshold": 1})
    network = runtime.shard(nn.Linear(2048, 512, bias=False))
    optimizer = runtime.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    for step in (1, 2):
        runtime.save(network, optimizer, step=step)
    if runtime.rank == 1:
        flip(folder / "step_00000002" / "rank_00001.safetensors")
    return runtime.resume(network, optimizer)


def test_all_ranks_fall_back_when_one_reads_damage(tmp_path):
    assert run_warm(_fall_back_together, 2, tmp_path) == [1, 1]


SIZES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 5]


@pytest.mark.parametrize("size", SIZES)
def test_checksums_are_those_of_zlib(size):
    data = os.urandom(size)
    parts = [data[at : at + BLOCK_BYTES] for at in range(0, size, BLOCK_BYTES)]
    assert checksums_of(data) == "".join(f"{zlib.crc32(part):08x}" for part in parts)


@pytest.mark.parametrize("damaged", [None, 0, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 4])
@pytest.mark.parametrize(
    "reads",
    [
        [(0, 3 * BLOCK_BYTES + 5)],
        [(10, 20), (BLOCK_BYTES - 5, 10), (2 * BLOCK_BYTES + 1, BLOCK_BYTES + 4)],
        [(at, 7) for at in range(0, 3 * BLOCK_BYTES, 400_003)] + [(3 * BLOCK_BYTES, 5)],
    ],
)
def test_any_read_checks_the_blocks_that_it_touches(tmp_path, reads, damaged):
    """Here every block is touched, so damage anywhere is found."""
    data = os.urandom(3 * BLOCK_BYTES + 5)
    (tmp_path / "f").write_bytes(data)
    if damaged is not None:
        flip(tmp_path / "f", damaged)

    def read():
        with DataFiles(tmp_path, {"f": checksums_of(data)}) as files:
            for start_at, count in reads:
                memory = bytearray(count)
                files.read_into("f", start_at, memoryview(memory), memory)
                if damaged is None:
                    assert memory == data[start_at : start_at + count]

    if damaged is None:
        read()
    else:
        block = damaged // BLOCK_BYTES * BLOCK_BYTES
        assert f"its bytes {block} to {min(block + BLOCK_BYTES, len(data))} have" in refusal(read)


@pytest.mark.parametrize("damaged", [10, PART_BYTES - 1, PART_BYTES, 2 * PART_BYTES + 6])
def test_a_long_read_is_checked_in_parts_to_its_end(tmp_path, damaged):
    data = bytes(2 * PART_BYTES + 7)
    (tmp_path / "f").write_bytes(data)
    sums = {"f": checksums_of(data)}
    memory = bytearray(len(data) - 10)

    def read():
        with DataFiles(tmp_path, sums) as files:
            files.read_into("f", 10, memoryview(memory), memory)

    read()
    flip(tmp_path / "f", damaged)
    assert f"its bytes {damaged // BLOCK_BYTES * BLOCK_BYTES} to" in refusal(read)
    assert memory[damaged - 10] == 1
