"""Agents that ssh starts on several hosts, from a machine that is none of them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ssh
from support import shell, until

import msrun as package

pytestmark = pytest.mark.process
HOME = Path(package.__file__).parent.parent


@pytest.fixture
def start(lab, tmp_path):
    """Start a job of two workers on each of three hosts; `tell` of it what it has said."""
    if ssh.MISSING:
        pytest.skip(ssh.MISSING)
    python = tmp_path / "remote-python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={HOME} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    config = ssh.write_config(tmp_path / "ssh", {host.name: host.enter() for host in lab.hosts})
    (tmp_path / "hosts").write_text("".join(f"{host.name} slots=2\n" for host in lab.hosts))
    words = ["--launcher", "ssh", "--hostfile", "hosts", "--ssh", f"ssh -F {config}"]
    words += ["--remote-python", python, "--log-dir", tmp_path / "logs", "--grace", "5s"]
    heads = []

    def call(*program):
        with (tmp_path / "said").open("wb") as said:
            head = subprocess.Popen(
                [sys.executable, "-P", "-m", "msrun", *map(str, [*words, *program])],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(HOME)},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        heads.append(head)
        return head

    yield call
    for head in heads:
        head.kill()
        head.wait()
    print((tmp_path / "said").read_text(errors="replace"))


def ready(folder, count=6):
    """Wait until so many workers have made a file of their rank."""
    until(lambda: len(list(folder.glob("ready.*"))) == count, f"for {count} workers")


def nothing_left(lab):
    until(lambda: not any(host.processes() for host in lab.hosts if host.pid), "for all ends")


PROGRAM = "touch ready.$RANK; sleep 60 & wait"


def test_ranks_follow_the_hostfile(start, lab, tmp_path):
    head = start(*shell('echo "$(hostname) $WORLD_SIZE $LOCAL_RANK" > who.$RANK'))

    assert head.wait(60) == 0
    told = [(tmp_path / f"who.{rank}").read_text() for rank in range(6)]
    assert told == [f"{'abc'[rank // 2]} 6 {rank % 2}\n" for rank in range(6)]
    nothing_left(lab)


def test_the_code_of_a_worker_on_another_host(start, lab, tmp_path):
    head = start(*shell(f"[ $RANK = 5 ] && exit 3; {PROGRAM}"))

    assert head.wait(60) == 3
    assert "rank 5 (node c" in (tmp_path / "said").read_text()
    nothing_left(lab)


def test_a_signal_to_the_head_ends_all(start, lab, tmp_path):
    head = start(*shell(PROGRAM))
    ready(tmp_path)

    head.send_signal(signal.SIGTERM)

    assert head.wait(60) == 143
    nothing_left(lab)


def test_a_head_that_is_killed_takes_all_agents_with_it(start, lab, tmp_path):
    head = start(*shell(PROGRAM))
    ready(tmp_path)

    head.kill()

    nothing_left(lab)


def test_a_host_that_loses_power_ends_the_job(start, lab, tmp_path):
    head = start("--join-timeout", "5s", *shell(PROGRAM))
    ready(tmp_path)

    lab.host("c").power_off()

    assert head.wait(60) in {120, 121}
    nothing_left(lab)
