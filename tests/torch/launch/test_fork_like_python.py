"""A script that was started by fork cannot tell: its view of itself is that under `python`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from support import environment

pytestmark = [pytest.mark.process, pytest.mark.torch]

PROBE = Path(__file__).with_name("probe.py")
WORDS = ("--lr", "3e-4", "", "a b")
# Differs from one job to the next, and would from one torchrun to the next.
OF_THE_JOB = re.compile(r"TORCHELASTIC_(RUN_ID|ERROR_FILE)|MASTER_PORT|GLOO_SOCKET_IFNAME|_")
# Everything that a process inherits and that few programs start with.
UNUSUAL = ("sh", "-c", 'umask 027; ulimit -c 512; ulimit -S -n 300; exec nice -n 3 "$@"', "sh")
UNUSUAL_ENV = {
    "OMP_NUM_THREADS": "2",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONWARNINGS": "default::BytesWarning,error::UserWarning:nowhere",
    "PYTHONPATH": "/nowhere",
    "LC_ALL": "C",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONUTF8": "0",
    "TZ": "Asia/Tokyo",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe")
    shutil.copy(PROBE, folder)
    return folder


@pytest.fixture(scope="module")
def probe_under_msrun(folder, finished):
    """Return what both ranks of a job saw."""

    def probe(name, *options, env=None, wrapper=()):
        directory = folder / name
        directory.mkdir()
        env = {**(env or {}), "PROBE_DIR": str(directory)}
        words = ("--workers-per-node", 2, *options, "probe.py", *WORDS)
        job = finished(folder, *words, env=env, wrapper=wrapper)
        assert job.process.returncode == 0
        return read(directory)

    return probe


@pytest.fixture(scope="module")
def probe_under_python(folder, plain):
    """Return what a script sees that `python` runs in the environment of a worker."""

    def probe(name, worker, wrapper=()):
        directory = folder / name
        directory.mkdir()
        env = worker["same"]["command"]["environ"] | {"PROBE_DIR": str(directory)}
        code, output = plain(folder, "probe.py", *WORDS, env=env, wrapper=wrapper)
        assert code == 0, output
        return read(directory)[0]

    return probe


def read(directory):
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]


@pytest.fixture(scope="module")
def forked(probe_under_msrun):
    return probe_under_msrun("forked")


@pytest.fixture(scope="module")
def executed(probe_under_msrun):
    return probe_under_msrun("executed", "--start-method", "exec")


@pytest.fixture(scope="module")
def of_python(probe_under_python, forked):
    return probe_under_python("plain", forked[0])


@pytest.fixture(scope="module")
def of_torchrun(folder, plain):
    directory = folder / "torchrun"
    directory.mkdir()
    options = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
    words = ("-m", "torch.distributed.run", *options, "probe.py", *WORDS)
    env = environment(folder / "run") | {"PROBE_DIR": str(directory)}
    code, output = plain(folder, *words, env=env)
    assert code == 0, output
    return read(directory)


@pytest.fixture(scope="module")
def unusual(probe_under_msrun, probe_under_python):
    """Return what a worker and a script see that inherit unusual things."""
    worker = probe_under_msrun("unusual", env=UNUSUAL_ENV, wrapper=UNUSUAL)[0]
    return worker, probe_under_python("unusual-plain", worker, wrapper=UNUSUAL)


PARTS = ("main", "command", "streams", "process", "runtime", "torch")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.few(3)
def test_a_forked_script_sees_what_it_sees_under_python(forked, of_python, part):
    assert forked[0]["same"][part] == of_python["same"][part]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.few(3)
def test_an_executed_script_sees_what_a_forked_one_sees(forked, executed, part):
    masked = [
        json.loads(of_one_job(document["same"][part])) for document in (executed[0], forked[0])
    ]

    assert masked[0] == masked[1]


def of_one_job(part):
    """Return `part` as text, with ports and the job's name masked."""
    text = re.sub(r"test-[0-9a-f]{8}", "JOB", json.dumps(part))
    return re.sub(r'("M[A-Z_]*_PORT": )"\d+"', r'\1"PORT"', text)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.few(3)
def test_a_forked_script_inherits_what_the_launcher_did(unusual, part):
    worker, plain = unusual

    assert worker["same"][part] == plain["same"][part]


def test_what_was_inherited_is_what_was_given(unusual):
    seen = unusual[0]["same"]

    assert seen["process"]["umask"] == 0o027
    assert seen["process"]["nice"] == os.getpriority(os.PRIO_PROCESS, 0) + 3
    assert seen["process"]["limits"]["RLIMIT_CORE"][0] > 0
    assert seen["process"]["limits"]["RLIMIT_NOFILE"][0] == 300
    assert seen["torch"]["threads"][0] == 2
    assert seen["streams"]["stdout"]["encoding"] == "ascii"


def test_its_environment_has_all_that_torchrun_gives(forked, of_torchrun):
    ours, theirs = (ranks[1]["same"]["command"]["environ"] for ranks in (forked, of_torchrun))
    names = {name for name in theirs if not OF_THE_JOB.fullmatch(name)}

    assert theirs.keys() - ours.keys() == set()
    assert {n: ours[n] for n in names & ours.keys()} == {n: theirs[n] for n in names & ours.keys()}


def test_beside_the_environment_it_sees_what_it_sees_under_torchrun(forked, of_torchrun):
    ours, theirs = (without_environment(ranks[0]["same"]) for ranks in (forked, of_torchrun))
    theirs["command"]["orig_argv"].remove("-u")
    theirs["command"]["shown by ps"].remove("-u")

    assert ours == theirs


def without_environment(document):
    command = {k: v for k, v in document["command"].items() if k != "environ"}
    return document | {"command": command}


@pytest.mark.parametrize("name", ["random", "numpy", "generator", "torch", "torch seed", "key"])
def test_chance_differs_from_rank_to_rank(forked, executed, of_python, name):
    drawn = [document["chance"][name] for document in (*forked, *executed, of_python)]

    assert len(set(drawn)) == len(drawn)


def test_a_hash_seed_that_is_not_given_is_one_for_all_forked_ranks(forked, executed):
    """Sets then have one order on all ranks, which plain interpreters do not promise."""
    assert len({document["chance"]["set order"] for document in forked}) == 1
    assert len({document["chance"]["set order"] for document in executed}) == 2


def test_threads_are_the_cores_shared_out_unless_they_are_given(forked):
    expected = max(1, len(os.sched_getaffinity(0)) // 2)

    assert forked[0]["same"]["command"]["environ"]["OMP_NUM_THREADS"] == str(expected)
    assert forked[0]["same"]["torch"]["threads"][0] == expected


def test_what_is_known_to_differ(forked, executed, of_python):
    """Stacks are left in log and file, the pages that workers share are frozen, torch is there."""
    names = ("faulthandler", "stack file", "frozen", "finder")
    seen = {
        way: [document["differs"][name] for name in names]
        for way, document in (("fork", forked[0]), ("exec", executed[0]), ("plain", of_python))
    }

    assert seen == {
        "fork": [True, True, True, True],
        "exec": [True, True, False, True],  # which waits for torch, to watch gloo's peers
        "plain": [False, False, False, False],
    }


def test_a_forked_script_stands_on_few_frames_of_ours(forked, of_python):
    frames = forked[0]["differs"]["frames"] - of_python["differs"]["frames"]

    assert 0 < frames <= 6
    assert of_python["differs"]["depth"] - forked[0]["differs"]["depth"] <= frames + 1


def test_no_module_of_ours_has_a_name_that_a_user_may_give(forked):
    modules = set(forked[0]["differs"]["modules"])
    paths = Path(__file__).parents[3].glob("msrun/**/[!_]*.py")
    names = {path.stem for path in paths}

    assert not modules & ({"launchers", "ranktable"} | names - sys.stdlib_module_names)


def test_the_first_real_time_signals_are_left_alone(forked):
    assert signal.SIGRTMIN not in forked[0]["same"]["process"]["mask"]
