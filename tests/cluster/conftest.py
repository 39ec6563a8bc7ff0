"""Hosts for tests of clusters; `tests/lab/hosts.py` says what they are."""

from __future__ import annotations

import contextlib
import os
import uuid

import hosts
import pytest
import wall_clock
from audit import LIVING, Audit
from hosts import Lab
from nodes import Node

REQUIRE = ("CI", "MSRUN_REQUIRE_LAB")


def skip_without(what, lacks):
    """Skip the test where the machine lacks something; fail it where it must not."""
    if lacks and any(map(os.environ.get, REQUIRE)):
        pytest.fail(f"{what} is required here, but there is {lacks}", pytrace=False)
    if lacks:
        pytest.skip(f"no {what}: {lacks}")


@pytest.fixture
def lab_folder(tmp_path):
    """The directory for a lab, where there can be one."""
    skip_without("lab of hosts", hosts.missing())
    return tmp_path


@pytest.fixture
def clock(tmp_path):
    """A wall clock for the programs that get its variables."""
    skip_without("wrong wall clock", wall_clock.missing())
    return wall_clock.WallClock(tmp_path)


@pytest.fixture
def new_lab(lab_folder):
    """Make a lab whose hosts have the names given; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(*names, folder=lab_folder, **options):
            return stack.enter_context(Lab(folder, *names, **options))

        yield start


@pytest.fixture
def lab(new_lab):
    """Three hosts a, b and c."""
    return new_lab("a", "b", "c")


@pytest.fixture
def launch(new_lab):  # noqa: ARG001 - hosts outlive the launchers on them
    """Start `msrun` with the words given on a host; at the end nothing of it may be left."""
    nodes = []

    def start(host, *arguments, **options):
        nodes.append(Node(host, arguments, **options))
        return nodes[-1]

    yield start
    was_running = [node for node in nodes if node.process.poll() is None]
    for node in was_running:
        node.process.kill()
        node.process.wait()
    for node in nodes:
        words = f"{node.name} on {node.host.name}, exit code {node.process.returncode}"
        print(f"======== {words}\n{node.report()}")
    if not was_running:
        assert [line for node in nodes for line in node.leftovers()] == []


@pytest.fixture
def form(launch):
    """Start one job on hosts, in their order; the lab's first host has the scheduler."""
    name = f"test-{uuid.uuid4().hex[:8]}"

    def start(hosts, *arguments, **options):
        lab = hosts[0].lab
        size = ["--nnodes", len(lab.hosts), "--master-addr", lab.hosts[0].name, "--job-id", name]
        given = {word for word in arguments if str(word).startswith("--")}
        pairs = zip(size[::2], size[1::2], strict=True)
        own = [word for pair in pairs if pair[0] not in given for word in pair]
        return [launch(host, *own, *arguments, **options) for host in hosts]

    return start


@pytest.fixture
def audit(lab_folder):
    """Workers that keep an account of their lives; at the end it must be in order."""
    account = Audit(lab_folder)
    yield account
    account.check()


@pytest.fixture
def living(form, audit):
    """Start one job of such workers on hosts, one worker on each."""

    def start(hosts, *arguments):
        return form(hosts, *LIVING, *arguments, *audit.words)

    return start
