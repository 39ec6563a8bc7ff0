"""Several operators with leader election; their ports for health and metrics."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request

import pytest
from kube.operators import PATIENCE, SLEEPS, ms_job, running_pods
from ports import free_port

pytest.importorskip("kopf")
pytest.importorskip("kubernetes")

pytestmark = [pytest.mark.process, pytest.mark.slow]
SECONDS = 6


class Candidates:
    """Operators that would lead, each with its ports."""

    def __init__(self, operator):
        self._operator = operator
        self.programs = {}

    def start(self, name):
        port, health = free_port(), free_port()
        words = f"--leader-elect --leader-elect-lease-duration {SECONDS}s".split()
        words += ["--leader-elect-resource-namespace", "msrun-system"]
        words += ["--metrics-bind-address", f"127.0.0.1:{port}"]
        words += ["--health-probe-bind-address", f"127.0.0.1:{health}"]
        self.programs[name] = (self._operator.start(*words), port, health)

    def ask(self, name, path="/metrics"):
        """Return what stands at a port of an operator, None if nobody answers."""
        _, port, health = self.programs[name]
        where = port if path == "/metrics" else health
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{where}{path}", timeout=10) as found:
                return found.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return None

    def leads(self, name):
        return "msrun_operator_leader 1" in (self.ask(name) or "")

    def leaders(self):
        return [name for name in self.programs if self.leads(name)]

    def kill(self, name, signum):
        program, *_ = self.programs.pop(name)
        program.send_signal(signum)
        return program.wait(PATIENCE)


@pytest.fixture
def candidates(new_operator):
    return Candidates(new_operator())


def holder(cluster):
    lease = cluster.store.find("leases", "msrun-system", "msrun-operator")
    return lease and lease["spec"]["holderIdentity"]


def await_leader(cluster, candidates, name):
    cluster.await_that(lambda: candidates.leads(name), PATIENCE)
    assert candidates.leaders() == [name]


def test_one_operator_works_and_another_takes_over(cluster, candidates):
    candidates.start("a")
    await_leader(cluster, candidates, "a")
    candidates.start("b")
    cluster.await_that(lambda: candidates.ask("b", "/readyz") == "ok\n", PATIENCE)
    cluster.apply(ms_job(SLEEPS.replace("60", "600"), policy="ExitCode"))
    before = running_pods(cluster, 3)
    jobs = 'msrun_operator_jobs{kind="MSJob",phase="Running"} 1'
    cluster.await_that(lambda: jobs in candidates.ask("a"), PATIENCE)
    assert candidates.leaders() == ["a"]
    assert jobs not in candidates.ask("b")

    assert candidates.kill("a", signal.SIGKILL) == -signal.SIGKILL
    cluster.kill_pod("t-worker-0")
    await_leader(cluster, candidates, "b")
    store = cluster.store
    cluster.await_that(
        lambda: store.find("msjobs", "default", "t")["status"].get("restarts") == 1, PATIENCE
    )
    assert not set(before.values()) & set(running_pods(cluster, 3).values())
    reasons = [event["reason"] for event in store.list("events")]
    assert (reasons.count("MSJobCreated"), reasons.count("MSJobRestarting")) == (1, 1)


def test_a_leader_that_is_told_to_end_gives_the_lease_back(cluster, candidates):
    candidates.start("a")
    await_leader(cluster, candidates, "a")
    before = holder(cluster)
    candidates.start("b")
    cluster.await_that(lambda: candidates.ask("b", "/healthz") == "ok\n", PATIENCE)
    assert candidates.kill("a", signal.SIGTERM) == 0
    assert holder(cluster) != before
    await_leader(cluster, candidates, "b")
    # One that only waits ends at once, too.
    candidates.start("c")
    cluster.await_that(lambda: candidates.ask("c", "/healthz") == "ok\n", PATIENCE)
    assert candidates.kill("c", signal.SIGTERM) == 0
    assert candidates.leaders() == ["b"]


def test_a_leader_that_was_frozen_steps_back(cluster, candidates):
    candidates.start("a")
    await_leader(cluster, candidates, "a")
    candidates.start("b")
    program = candidates.programs["a"][0]
    program.send_signal(signal.SIGSTOP)
    try:
        cluster.await_that(lambda: candidates.leads("b"), PATIENCE)
    finally:
        program.send_signal(signal.SIGCONT)
    cluster.await_that(lambda: candidates.leaders() == ["b"], PATIENCE)
    assert candidates.kill("b", signal.SIGTERM) == 0
    await_leader(cluster, candidates, "a")


def test_what_the_ports_answer(cluster, candidates):
    candidates.start("a")
    cluster.await_that(lambda: candidates.ask("a", "/healthz"), PATIENCE)
    assert candidates.ask("a", "/readyz") == "ok\n"
    assert candidates.ask("a", "/metrics").startswith("# HELP msrun_operator_leader")
    assert candidates.ask("a", "/secrets") == 404
