"""Processes that were started by hand on several hosts."""

import subprocess
import sys
import time

import pytest
from support import PATIENCE, until

pytestmark = pytest.mark.process

TELL = """
import msrun, os, socket
msrun.join()
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MSRUN_RANK0_ADDR"
print(*(os.environ[name] for name in names.split()), socket.gethostname(), flush=True)
"""


def start(host, role, **variables):
    cluster = {"MS_SCHED_HOST": "a", "MS_SCHED_PORT": "29500", "MS_WORKER_NUM": "3"}
    return host.popen(
        [sys.executable, "-c", TELL],
        env={**cluster, "MS_ROLE": role, **variables},
        cwd=host.lab.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(*programs):
    """Return what programs have printed, after all have ended well."""
    results = [program.communicate(timeout=PATIENCE) for program in programs]
    for out, err in results:
        print(f"== out\n{out}\n== err\n{err}")
    assert [program.returncode for program in programs] == [0] * len(programs)
    return [out for out, _ in results]


def test_ranks_are_where_their_numbers_say_wherever_the_scheduler_is(new_lab):
    a, b = new_lab("a", "b").hosts
    hosts = (b, a, b)
    workers = [start(host, "MS_WORKER", MS_NODE_ID=str(i)) for i, host in enumerate(hosts)]

    out = finish(*workers, start(a, "MS_SCHED"))
    assert out == [
        f"[rank 0] 0 3 0 2 0 {b.addresses[0]} b\n",
        f"[rank 1] 1 3 0 1 1 {b.addresses[0]} a\n",
        f"[rank 2] 2 3 1 2 2 {b.addresses[0]} b\n",
        "",
    ]


def test_without_numbers_ranks_follow_the_addresses_of_the_hosts(new_lab):
    a, b = new_lab("a", "b").hosts
    workers = [start(host, "MS_WORKER") for host in (b, a, b)]

    out = finish(*workers, start(a, "MS_SCHED"))
    assert out[1] == f"[rank 0] 0 3 0 1 0 {a.addresses[0]} a\n"
    assert sorted((out[0], out[2])) == [
        f"[rank 1] 1 3 0 2 1 {a.addresses[0]} b\n",
        f"[rank 2] 2 3 1 2 2 {a.addresses[0]} b\n",
    ]


@pytest.mark.slow
def test_a_worker_in_a_pod_waits_for_the_name_of_the_scheduler(new_lab):
    """An operator says that the scheduler is a pod; elsewhere an unknown name is a mistake."""
    a, b = new_lab("a", "b").hosts
    told = {"MS_SCHED_HOST": "s", "MS_WORKER_NUM": "1"}
    later = start(b, "MS_WORKER", **told, MSRUN_POD_SCHEDULER="s:29500")
    wrong = start(b, "MS_WORKER", **told)
    err = wrong.communicate(timeout=PATIENCE)[1]
    assert (wrong.returncode, "does not know s" in str(err)) == (2, True)
    b.know({"s": [a.ipv4]})
    a.know({"s": [a.ipv4]})
    out = finish(later, start(a, "MS_SCHED", **told))
    assert out[0].startswith("[rank 0] 0 1")


def test_the_scheduler_is_refused_on_a_host_without_its_address(new_lab):
    _, b = new_lab("a", "b").hosts
    scheduler = start(b, "MS_SCHED")

    err = scheduler.communicate(timeout=PATIENCE)[1]
    assert scheduler.returncode == 2
    assert "environment MS_SCHED_HOST=a is no address of this machine" in err


def test_a_scheduler_that_is_stopped_while_nodes_wait_is_continued(new_lab):
    a, b = new_lab("a", "b").hosts
    scheduler = start(a, "MS_SCHED")
    workers = [start(host, "MS_WORKER") for host in (a, b)]

    def stopped():
        names = [process for process in a.processes() if process.name() == "msrun scheduler"]
        for process in names:
            process.suspend()
        return names

    until(stopped, "for the scheduler")
    began = time.monotonic()
    workers.append(start(b, "MS_WORKER"))

    finish(*workers)
    err = scheduler.communicate(timeout=PATIENCE)[1]
    assert time.monotonic() - began < 30
    assert "was stopped by a signal; it is continued" in err
    assert scheduler.returncode == 0
