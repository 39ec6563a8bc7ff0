"""Agents in pods: `msrun train.py` with nothing but what Kubernetes gives each pod of a Job."""

import os
import signal

import pytest
from nodes import identities, tell_who
from support import shell, until

pytestmark = pytest.mark.process
JOB = "train-0a1b2c"


@pytest.fixture
def pods(lab, launch, tmp_path):
    """Start the pod of an index on a host; the pods of index 0 have the name `SCHEDULER`."""
    key = tmp_path / "key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)

    def start(host, index, *words, nodes="3", scheduler="c", secret=key, **variables):
        there = lab.host(host)
        env = {
            "JOB_COMPLETION_INDEX": str(index),
            "MSRUN_POD_JOB": JOB,
            "MSRUN_POD_NODES": nodes,
            "MSRUN_POD_SCHEDULER": f"{scheduler}:29500",
            "MSRUN_POD_SECRET_FILE": str(secret),
            "MSRUN_POD_ADDRESS": there.ipv4,
            **variables,
        }
        node = launch(there, *words, env=env, plain=True)
        node.name = JOB
        return node

    return start


@pytest.fixture
def logs(lab):
    return lab.folder / "msrun_logs" / JOB


def test_the_index_is_the_node_rank_and_index_0_has_the_scheduler(pods, logs):
    # The order of the addresses is another one.
    nodes = [pods(host, index, *tell_who()) for index, host in enumerate("cab")]

    assert [node.wait() for node in nodes] == [0, 0, 0]
    assert [(who.rank, who.node_rank, who.host) for who in identities([logs])] == [
        (0, 0, "c"),
        (1, 1, "a"),
        (2, 2, "b"),
    ]


def test_a_pod_waits_until_the_pod_of_index_0_has_a_name(lab, pods, logs):
    name = f"{JOB}-0.{JOB}"
    later = pods("a", 1, *tell_who(), nodes="2", scheduler=name)
    later.until_said(f"waiting for the pod of the scheduler, {name}")
    # The pod of index 0 itself needs no name.
    first = pods("b", 0, *tell_who(), nodes="2", scheduler=name)
    lab.host("a").know({name: [lab.host("b").ipv4]})

    assert (first.wait(), later.wait()) == (0, 0)
    assert [who.host for who in identities([logs])] == ["b", "a"]


@pytest.mark.slow
def test_a_name_that_still_means_an_earlier_pod_is_asked_again(lab, pods, logs):
    """The earlier pod's address is that of a host on which nobody listens."""
    name = f"{JOB}-0.{JOB}"
    lab.host("a").know({name: [lab.host("c").ipv4]})
    later = pods("a", 1, *tell_who(), nodes="2", scheduler=name)
    later.until_said(f"waiting for the pod of the scheduler, {name}")
    first = pods("b", 0, *tell_who(), nodes="2", scheduler=name)
    lab.host("a").know({name: [lab.host("b").ipv4]})

    assert (first.wait(), later.wait()) == (0, 0)
    assert [who.host for who in identities([logs])] == ["b", "a"]


@pytest.mark.slow
def test_a_pod_without_the_key_is_refused(pods, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(os.urandom(64))
    other.chmod(0o400)
    first = pods("c", 0, "--join-timeout", "8s", *tell_who(), nodes="2")
    stranger = pods("a", 1, *tell_who(), nodes="2", secret=other)

    assert (stranger.wait(), first.wait()) == (122, 121)


def test_every_pod_ends_with_the_code_of_the_rank_that_failed_first(pods, tmp_path):
    words = shell('[ "$RANK" = 1 ] && exit 7; sleep 1000')
    messages = [tmp_path / f"message{index}" for index in range(3)]
    nodes = [
        pods(host, index, *words, MSRUN_POD_MESSAGE=str(messages[index]))
        for index, host in enumerate("cab")
    ]

    assert [node.wait() for node in nodes] == [7, 7, 7]
    (message,) = {message.read_text() for message in messages}
    assert message.startswith("exit code 7: rank 1 (node a, local_rank 0, pid ")


def test_sigterm_lets_a_node_leave_an_elastic_job(pods, logs):
    words = shell('[ "$WORLD_SIZE" = 2 ] && exit 0; echo up; sleep 1000')
    nodes = [pods(host, index, *words, nodes="2:3") for index, host in enumerate("cab")]
    until(lambda: len(list(logs.glob("worker_*.log"))) == 3, "three workers")
    until(lambda: all("up" in p.read_text() for p in logs.glob("worker_*.log")), "all are up")
    nodes[2].send(signal.SIGTERM)

    assert [node.wait() for node in nodes] == [0, 0, 143]


def test_a_node_of_a_job_of_fixed_size_leaves_and_another_takes_its_place(pods, logs):
    words = shell('[ "$MSRUN_GENERATION" = 1 ] && exit 0; echo up; sleep 1000')
    first, old = (pods(host, i, *words, nodes="2") for i, host in enumerate("ca"))
    until(lambda: len(list(logs.glob("worker_*.log"))) == 2, "two workers")
    until(lambda: all("up" in p.read_text() for p in logs.glob("worker_*.log")), "both are up")
    old.send(signal.SIGTERM)
    gone = old.wait()
    new = pods("b", 1, *words, nodes="2")

    assert (gone, first.wait(), new.wait()) == (143, 0, 0)


def test_a_job_inside_of_a_worker_is_alone(pods, logs):
    inner = "python -m msrun --log-dir inner-$RANK --no-python sh -c 'echo inner $WORLD_SIZE'"
    nodes = [pods(host, i, *shell(inner), nodes="2") for i, host in enumerate("ca")]

    assert [node.wait() for node in nodes] == [0, 0]
    assert all("inner 1" in path.read_text() for path in logs.glob("worker_*.log"))
