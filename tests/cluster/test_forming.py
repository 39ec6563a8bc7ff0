"""Nodes that find each other: the same command on each, in any order."""

import json
import subprocess
import sys

import psutil
import pytest
from nodes import Identity, identities, tell_who
from support import script, shell, until

pytestmark = pytest.mark.process

TWO_EACH = [Identity(rank, rank % 2, rank // 2, 6, 2, "abc"[rank // 2]) for rank in range(6)]


def codes(nodes):
    return [node.wait() for node in nodes]


def logs_of(nodes):
    return [node.logs for node in nodes]


@pytest.mark.parametrize("order", ["abc", "cba", pytest.param("bca", marks=pytest.mark.slow)])
def test_nodes_come_in_any_order_and_ranks_follow_their_addresses(lab, form, order):
    nodes = form([lab.host(name) for name in order], "--workers-per-node", 2, *tell_who())

    assert codes(nodes) == [0, 0, 0]
    assert identities(logs_of(nodes)) == TWO_EACH


@pytest.mark.slow
def test_the_node_of_the_scheduler_may_be_the_last(lab, form):
    a, b, c = lab.hosts
    first = form([b, c], "--workers-per-node", 2, *tell_who())
    for node in first:
        node.until_said("waiting for")
    nodes = [*first, *form([a], "--workers-per-node", 2, *tell_who())]

    assert codes(nodes) == [0, 0, 0]
    assert identities(logs_of(nodes)) == TWO_EACH


@pytest.mark.parametrize(
    ("families", "address"),
    [
        ((4,), "a"),
        pytest.param((4,), "10.77.0.1", marks=pytest.mark.slow),
        ((6,), "a"),
        pytest.param((6,), "fd00:77::1", marks=pytest.mark.slow),
        ((4, 6), "a"),
        ((4, 6), "10.77.0.1"),
        ((4, 6), "fd00:77::1"),
    ],
)
@pytest.mark.few(3)
def test_the_scheduler_is_found_by_name_and_by_either_kind_of_address(
    new_lab, form, families, address
):
    lab = new_lab("a", "b", families=families)
    nodes = form(lab.hosts, "--master-addr", address, "--workers-per-node", 1, *tell_who())

    assert codes(nodes) == [0, 0]
    assert [who.host for who in identities(logs_of(nodes))] == ["a", "b"]


def test_nodes_may_bring_different_numbers_of_workers(lab, form):
    nodes = [
        node
        for host, slots in zip(lab.hosts, (1, 3, 2), strict=True)
        for node in form([host], "--workers-per-node", slots, *tell_who())
    ]

    assert codes(nodes) == [0, 0, 0]
    assert identities(logs_of(nodes)) == [
        Identity(0, 0, 0, 6, 1, "a"),
        Identity(1, 0, 1, 6, 3, "b"),
        Identity(2, 1, 1, 6, 3, "b"),
        Identity(3, 2, 1, 6, 3, "b"),
        Identity(4, 0, 2, 6, 2, "c"),
        Identity(5, 1, 2, 6, 2, "c"),
    ]


def test_given_node_ranks_decide(lab, form):
    nodes = [
        node
        for host, rank in zip(lab.hosts, (0, 2, 1), strict=True)
        for node in form([host], "--node-rank", rank, "--workers-per-node", 1, *tell_who())
    ]

    assert codes(nodes) == [0, 0, 0]
    assert [(who.rank, who.host) for who in identities(logs_of(nodes))] == [
        (0, "a"),
        (1, "c"),
        (2, "b"),
    ]


def test_more_nodes_than_the_fewest_are_taken_while_they_come(lab, form):
    words = ["--nnodes", "1:3", "--workers-per-node", 1]
    nodes = form(lab.hosts, *words, *tell_who())

    assert codes(nodes) == [0, 0, 0]
    assert [who.host for who in identities(logs_of(nodes))] == ["a", "b", "c"]


def test_the_first_failure_is_the_result_of_every_node(lab, form):
    fail = "[ $RANK = 3 ] && exit 7; while :; do sleep 0.01; done"
    nodes = form(lab.hosts, "--workers-per-node", 2, *tell_who(fail))

    assert codes(nodes) == [7, 7, 7]
    for node in nodes:
        assert "rank 3 (node b, local_rank 1" in node.block()
        assert "exited with code 7" in node.block()


# Joins the workers by the address that each was given, as a process group does.
MEET = """
    import json, os, sys, torch.distributed as dist
    dist.init_process_group("gloo")
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, os.uname().nodename)
    print(json.dumps(names), flush=True)
    dist.destroy_process_group()
"""


def test_a_process_group_needs_nothing_else(lab, form):
    program = script(lab.folder, MEET)
    nodes = form(lab.hosts, "--workers-per-node", 1, program)

    assert codes(nodes) == [0, 0, 0]
    said = [node.log(rank).splitlines()[-1] for rank, node in enumerate(nodes)]
    assert [json.loads(line) for line in said] == [["a", "b", "c"]] * 3


def test_nodes_may_share_a_log_directory(lab, form):
    logs = lab.folder / "logs"
    nodes = form(lab.hosts, "--log-dir", logs, "--workers-per-node", 2, *tell_who())

    assert codes(nodes) == [0, 0, 0]
    assert identities([logs]) == TWO_EACH


# What is missing or wrong.


def test_nodes_that_do_not_come_are_counted_at_the_deadline(lab, form):
    nodes = form(lab.hosts[:2], "--join-timeout", "5s", *tell_who())

    assert codes(nodes) == [121, 121]
    for node in nodes:
        assert "2 of 3 nodes registered: a, b" in node.block()


@pytest.mark.slow
def test_missing_node_ranks_are_named_at_the_deadline(lab, form):
    words = ["--join-timeout", "5s", *tell_who()]
    nodes = [
        node
        for rank, host in ((0, lab.host("a")), (2, lab.host("c")))
        for node in form([host], "--node-rank", rank, *words)
    ]

    assert codes(nodes) == [121, 121]
    for node in nodes:
        assert "2 of 3 nodes registered: a, c; missing: node rank 1" in node.block()


def test_a_scheduler_that_does_not_come_is_named_at_the_deadline(lab, form):
    nodes = form(lab.hosts[1:], "--join-timeout", "5s", *tell_who())

    assert codes(nodes) == [121, 121]
    for node in nodes:
        assert "--master-addr a" in node.block()


@pytest.mark.slow
def test_a_host_that_is_on_and_unreachable_is_no_traceback(lab, form):
    lab.host("c").cut()
    nodes = form(lab.hosts, "--join-timeout", "5s", *tell_who())

    assert codes(nodes) == [121, 121, 121]
    assert "2 of 3 nodes registered: a, b" in nodes[0].block()


def test_nodes_with_other_secrets_stay_outside(new_lab, form):
    lab = new_lab("a", "b", shared_home=False)
    a, b = form(lab.hosts, "--join-timeout", "5s", *tell_who())

    assert b.wait() == 122
    assert a.wait() in (121, 122)
    assert "secret" in b.block()


def until_registered(node):
    log = node.logs / "scheduler.log"
    until(lambda: log.exists() and "received Register" in log.read_text(), "for the first node")


def test_other_job_ids_stay_outside(lab, form, launch):
    a, b, _ = lab.hosts
    (first,) = form([a], *tell_who())
    until_registered(first)
    other = launch(b, "--nnodes", 3, "--master-addr", "a", "--job-id", "another", *tell_who())
    other.until_begun()

    assert other.wait(5) == 2
    assert first.name in other.block()
    first.process.terminate()
    assert first.wait() == 143


OLDER = "import msrun.version; msrun.version.__version__ = '0.0'"


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        ((), ("--nnodes", 2), "node b was started for --nnodes 2 "),
        (
            ("--worker-num", 6),
            ("--worker-num", 5),
            "node b was started for --nnodes 3 --worker-num 5",
        ),
        (
            ("--node-rank", 1),
            ("--node-rank", 1),
            "--node-rank 1 of node b is that of node a already",
        ),
        ((), ("older",), "node b has msrun 0.0, the scheduler msrun "),
    ],
)
@pytest.mark.few(2)
def test_a_node_that_does_not_fit_is_refused_with_the_reason(lab, form, first, second, sentence):
    a, b, _ = lab.hosts
    words = ["--workers-per-node", 2]
    (one,) = form([a], *words, *first, *tell_who())
    until_registered(one)
    env = {}
    if second == ("older",):
        second, env = (), {"PYTHONPATH": str(lab.folder)}
        script(lab.folder, OLDER, "sitecustomize.py")
    (other,) = form([b], *words, *second, *tell_who(), env=env)
    other.until_begun()

    assert other.wait(5) == 2
    assert sentence in other.block()
    one.process.terminate()
    assert one.wait() == 143


def test_a_node_with_another_torch_is_refused_where_workers_are_python(lab, form):
    a, b, _ = lab.hosts
    (one,) = form([a], script(lab.folder, "print('never')"))
    until_registered(one)
    installed = lab.folder / "other/torch-99.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Name: torch\nVersion: 99.0\n")
    (other,) = form([b], "program.py", env={"PYTHONPATH": str(installed.parent)})
    other.until_begun()

    assert other.wait(5) == 2
    assert "node b has torch 99.0, the scheduler torch 2." in other.block()
    one.process.terminate()
    assert one.wait() == 143


# The scheduler's port, in a network that only this test has.
HOLD = """
    import signal, socket
    listener = socket.create_server(("", 29500))
    print("up", flush=True)
    signal.pause()
"""


def test_a_port_that_is_held_is_named_with_its_holder(lab, form):
    a = lab.host("a")
    holder = a.popen([sys.executable, script(lab.folder, HOLD)], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == "up\n"
    (node,) = form([a], *tell_who())

    assert node.wait(5) == 2
    name = psutil.Process(holder.pid).children()[0].name()
    assert f"port 29500 is in use by pid N ({name})" in node.block()


def test_a_name_that_means_this_machine_everywhere_is_an_error(lab, form):
    b = lab.host("b")
    b.know({"a": ["127.0.1.1"], "b": b.addresses})
    (node,) = form([b], *tell_who())

    assert node.wait(5) == 2
    assert "--master-addr a resolves to 127.0.1.1 here" in node.block()


# What must not matter.


def test_a_slow_cable_is_no_lost_node(lab, form):
    for host in lab.hosts:
        host.rate_limit("1mbit")
    nodes = form(lab.hosts, "--workers-per-node", 2, *tell_who())

    assert codes(nodes) == [0, 0, 0]


@pytest.mark.parametrize(
    "wrong",
    [
        *(pytest.param(seconds, marks=pytest.mark.slow) for seconds in (-60, -20, -14, 60)),
        *(3600, -10 * 366 * 86400),
    ],
)
def test_a_wrong_wall_clock_is_nothing(lab, form, clock, wrong):
    """C-02 and C-03."""
    clock.set_wrong(wrong)
    a, *others = lab.hosts
    nodes = [*form([a], *tell_who(), env=clock.env), *form(others, *tell_who())]

    assert codes(nodes) == [0, 0, 0]


def test_a_jump_of_the_wall_clock_is_nothing(lab, form, clock):
    wait = shell("echo up; until [ -e go ]; do sleep 0.01; done; sleep 3")
    nodes = form(lab.hosts, "--lease", "2s", *wait, env=clock.env)
    for rank, node in enumerate(nodes):
        node.until_logged("up", rank)
    for wrong in (3600, -3600):
        clock.set_wrong(wrong)
    (lab.folder / "go").touch()

    assert codes(nodes) == [0, 0, 0]
