"""Where ranks of Hydra meet, told through PMI: what it answers, and what is refused."""

import contextlib
import os
import socket
import threading

import pytest

from msrun import pmi
from msrun.errors import UsageError


@pytest.fixture
def served():
    """Answer the lines of one rank, each with what belongs to its first words."""
    ours, theirs = socket.socketpair()
    heard = []

    def start(**answers):
        def serve():
            # The rank may be gone before it has read all.
            with contextlib.suppress(OSError), ours, ours.makefile("rw") as lines:
                for line in lines:
                    heard.append(line.strip())
                    name = line.split()[0].removeprefix("cmd=")
                    lines.write(answers.get(name, "cmd=?") + "\n")
                    lines.flush()

        threading.Thread(target=serve, daemon=True).start()
        return theirs.fileno(), heard

    yield start
    pmi.meet.cache_clear()
    pmi.atexit.unregister(pmi._finalize)
    theirs.close()


ANSWERS = {
    "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    "get_my_kvsname": "cmd=my_kvsname kvsname=kvs_7",
    "put": "cmd=put_result rc=0 msg=success",
    "barrier_in": "cmd=barrier_out",
    "get": "cmd=get_result rc=0 msg=success value=10.0.0.1",
}


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_tells_its_host_and_all_ask_for_it(served, rank):
    descriptor, heard = served(**ANSWERS)

    assert pmi.meet(descriptor, rank) == ("10.0.0.1", "kvs_7")
    assert pmi.meet(descriptor, rank) == ("10.0.0.1", "kvs_7")
    put = [line.partition(" value=")[0] for line in heard if line.startswith("cmd=put")]
    assert put == ["cmd=put kvsname=kvs_7 key=msrun-meets"] * (rank == 0)
    assert [line.split()[0] for line in heard].count("cmd=barrier_in") == 1


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ({"init": "cmd=response_to_init rc=-1"}, "has answered cmd=response_to_init rc=-1"),
        ({**ANSWERS, "get": "cmd=get_result rc=-1"}, "has answered cmd=get_result rc=-1"),
        ({"init": "x" * 5000}, "has answered 'xxxx"),
        ({"init": ""}, "has answered ''"),
    ],
)
def test_an_answer_that_is_none_is_refused(served, answers, sentence):
    descriptor, _ = served(**answers)

    with pytest.raises(UsageError) as refusal:
        pmi.meet(descriptor, 1)

    assert refusal.value.message.startswith("the mpirun that started this rank, asked ")
    assert sentence.removesuffix("'") in refusal.value.message
    assert refusal.value.hint == "set MASTER_ADDR and MASTER_PORT, or start one msrun on each node"


def test_a_descriptor_that_was_not_handed_on_is_named():
    closed = os.open("/dev/null", os.O_RDONLY)
    os.close(closed)

    with pytest.raises(UsageError) as refusal:
        pmi.meet(closed, 1)

    assert f"PMI_FD={closed}, is not there: Bad file descriptor" in refusal.value.message
