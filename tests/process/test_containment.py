"""A job's cgroup, where this user may make one."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from support import until

from msrun.supervise import containment
from msrun.supervise.machine import read_machine

pytestmark = pytest.mark.process

PATIENCE = 10


def test_containment_is_described_in_words():
    words = [containment.describe(cgroup) for cgroup in ("/sys/fs/cgroup/x", None)]

    assert words == ["cgroup2 and subreaper", "subreaper"]


def test_a_generation_has_a_directory_of_its_own():
    assert containment.generation_dir("/cg/msrun-j", 3) == "/cg/msrun-j/g3"


def test_what_cannot_be_made_is_none(tmp_path):
    (tmp_path / "taken").mkdir()

    assert containment.create(str(tmp_path), "taken") is None
    assert containment.create(str(tmp_path / "missing"), "job") is None


def test_a_directory_is_made_and_removed_with_what_is_below(tmp_path):
    directory = containment.create(str(tmp_path), "job")
    Path(directory, "g0/deeper").mkdir(parents=True)
    Path(directory, "g1").mkdir()
    containment.remove(directory)

    assert (directory, list(tmp_path.iterdir())) == (str(tmp_path / "job"), [])


def test_what_is_not_there_is_no_error_at_the_end(tmp_path):
    missing = str(tmp_path / "missing")
    containment.kill(missing)
    containment.remove(missing)

    assert containment.members(missing) == []


@pytest.fixture
def cgroup():
    parent = read_machine({}).cgroup
    directory = containment.create(parent, f"msrun-test-{uuid.uuid4().hex}") if parent else None
    if directory is None:
        pytest.skip("no cgroup v2 that this user may divide")
    yield directory
    containment.kill(directory)
    # What was killed stays a member until the kernel is done with it.
    until(lambda: containment.remove(directory) or not Path(directory).exists(), "for its removal")


FORKS = """
import os, sys
from msrun.supervise import containment
containment.enter_generation(sys.argv[1], 2)
if os.fork() == 0:
    os.setsid()
os.write(1, f"{os.getpid()}\\n".encode())  # in one piece: two processes write here
sys.stdin.read()
"""


def test_a_generation_is_killed_whole_in_one_write(cgroup):
    command = [sys.executable, "-c", FORKS, cgroup]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        pids = sorted(int(child.stdout.readline()) for _ in range(2))
        members = [sorted(containment.members(cgroup)), containment.members(f"{cgroup}/g1")]
        descriptors = [os.pidfd_open(pid) for pid in pids]
        containment.kill(containment.generation_dir(cgroup, 2))
        codes = [child.wait(PATIENCE)]
    for descriptor in descriptors:
        os.close(descriptor)

    assert members == [pids, []]
    assert codes == [-9]
