"""What goes wrong around the operator: nothing is lost, nothing doubled, nothing left."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from itertools import count

import pytest
from kube.failures import ApiError
from kube.operators import PATIENCE, SLEEPS, ms_job, msrun_job, running_pods

pytest.importorskip("kopf")
pytest.importorskip("kubernetes")

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]
OURS = ("pods", "services", "secrets", "jobs")
# Script -> the job of each kind that runs it.
KINDS = {
    "msjobs": lambda script, **more: ms_job(script, policy="ExitCode", **more),
    "msrunjobs": lambda script, **more: msrun_job(
        f"{sys.executable} -c '{script}'", maxRestarts=3, **more
    ),
}
BROKEN = "broken:1"


def left(cluster):
    """Return what jobs have made that is there."""
    return [
        f"{plural}/{obj['metadata']['name']}"
        for plural in OURS
        for obj in cluster.store.list(plural, "default")
        if obj["metadata"].get("ownerReferences")
    ]


def images(job, image):
    """Return a job whose containers have an image."""
    text = json.dumps(job)
    return json.loads(text.replace('"image": "m"', f'"image": "{image}"'))


def reasons(cluster):
    return [event["reason"] for event in cluster.store.list("events")]


@contextlib.contextmanager
def storm(cluster, plural):
    """Have somebody change the job all the time, so that writes by an older version fail."""
    ended, changes = threading.Event(), [0]

    def change():
        while not ended.wait(0.1):

            def edit(obj):
                obj["metadata"].pop("resourceVersion")
                obj["metadata"].setdefault("annotations", {})["n"] = str(changes[0])

            with contextlib.suppress(ApiError):
                cluster.store.change(plural, "default", "t", edit)
                changes[0] += 1

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield changes
    finally:
        ended.set()
        thread.join()


def test_an_api_server_that_is_down_for_half_a_minute(cluster, new_operator):
    """The Lease runs out meanwhile, and the operator waits for it again without being restarted."""
    operator = new_operator()
    words = ("--leader-elect", "--leader-elect-lease-duration", "5s")
    program = operator.start(*words, "--leader-elect-resource-namespace", "msrun-system")
    cluster.apply(ms_job(SLEEPS.replace("60", "600"), policy="ExitCode"))
    before = running_pods(cluster, 3)
    with cluster.server_down():
        cluster.kill_pod("t-worker-0")
        cluster.await_phase("t-worker-0", "Failed")
        assert not threading.Event().wait(30)
        assert program.poll() is None
    cluster.await_that(lambda: operator.status("msjobs").get("restarts") == 1, PATIENCE)
    operator.await_phase("msjobs", "Running")
    assert not set(before.values()) & set(running_pods(cluster, 3).values())
    assert program.poll() is None
    assert reasons(cluster).count("MSJobRestarting") == 1


@pytest.mark.parametrize("plural", KINDS)
def test_a_storm_of_conflicts(cluster, operator, plural):
    size = {"msjobs": 3, "msrunjobs": 2}[plural]
    cluster.apply(KINDS[plural](SLEEPS.replace("60", "600")))
    with storm(cluster, plural) as changes:
        operator.await_phase(plural, "Running")
        running_pods(cluster, size)
        cluster.kill_pod(next(name for name in running_pods(cluster, size) if "1" in name))
        cluster.await_that(lambda: operator.status(plural).get("restarts") == 1, PATIENCE)
        operator.await_phase(plural, "Running")
        running_pods(cluster, size)
        cluster.await_that(lambda: changes[0] > 20, PATIENCE)
    kind = {"msjobs": "MSJob", "msrunjobs": "MsrunJob"}[plural]
    assert reasons(cluster).count(f"{kind}Created") == 1
    assert reasons(cluster).count(f"{kind}Restarting") == (plural == "msjobs")
    cluster.kubectl("delete", plural, "t")
    cluster.await_that(lambda: not left(cluster), PATIENCE)


@pytest.mark.parametrize("plural", KINDS)
def test_an_image_that_is_never_pulled_is_told_until_the_deadline(cluster, operator, plural):
    cluster.pods.broken_images.add(BROKEN)
    cluster.apply(images(KINDS[plural](SLEEPS, activeDeadlineSeconds=8), BROKEN))
    said = f'ImagePullBackOff: Back-off pulling image "{BROKEN}": not found'
    cluster.await_that(lambda: operator.status(plural).get("message") == said, PATIENCE)
    status = operator.await_phase(plural, "Failed")
    assert (status["verdict"]["code"], status["message"]) == (124, "")
    cluster.kubectl("delete", plural, "t")
    cluster.await_that(lambda: not left(cluster), PATIENCE)


def test_a_preempted_worker_of_an_msjob_starts_the_group_again(cluster, operator):
    cluster.apply(ms_job(SLEEPS.replace("60", "600")))
    before = running_pods(cluster, 3)
    cluster.preempt("t-worker-1")
    cluster.await_that(lambda: operator.status("msjobs").get("restarts") == 1, PATIENCE)
    assert "PreemptionByScheduler" in operator.status("msjobs")["lastCause"]
    operator.await_phase("msjobs", "Running")
    assert not set(before.values()) & set(running_pods(cluster, 3).values())


def test_a_preempted_pod_of_an_msrunjob_is_replaced_for_nothing(cluster, operator):
    cluster.apply(msrun_job("test $MSRUN_GENERATION = 0 && sleep 600; exit 0", nodeRestarts=0))
    operator.await_phase("msrunjobs", "Running")
    (name,) = [name for name in running_pods(cluster, 2) if name.startswith("t-1-")]
    cluster.await_that(lambda: "running" in cluster.kubectl("logs", name).stdout, PATIENCE)
    cluster.preempt(name)
    status = operator.await_phase("msrunjobs", "Succeeded")
    assert (status["verdict"], status["restarts"]) == ({"code": 0}, 0)


@pytest.mark.parametrize("plural", KINDS)
@pytest.mark.parametrize("phase", ["Pending", "Running", "Restarting", "Succeeded", "Failed"])
def test_kubectl_delete_leaves_nothing_in_any_phase(cluster, operator, plural, phase):
    scripts = {"Succeeded": "pass", "Failed": "raise SystemExit(7)"}
    job = KINDS[plural](scripts.get(phase, SLEEPS.replace("60", "600")))
    if phase == "Pending":
        cluster.pods.broken_images.add(BROKEN)
        job = images(job, BROKEN)
    cluster.apply(job)
    if phase == "Restarting":
        size = {"msjobs": 3, "msrunjobs": 2}[plural]
        for name in running_pods(cluster, size):
            cluster.kill_pod(name)
        cluster.await_that(lambda: operator.status(plural).get("restarts"), PATIENCE)
    else:
        operator.await_phase(plural, phase)
    if phase != "Succeeded":
        cluster.await_that(lambda: left(cluster), PATIENCE)
    cluster.kubectl("delete", plural, "t", timeout=PATIENCE)
    cluster.await_that(lambda: not left(cluster), PATIENCE)
    cluster.await_that(lambda: cluster.pods.lab.hosts == [], PATIENCE)


@pytest.mark.parametrize("plural", KINDS)
def test_a_job_that_is_deleted_and_made_anew_at_once(cluster, operator, plural):
    """What the earlier one left must neither be taken for ours nor stand in the way."""
    size = {"msjobs": 3, "msrunjobs": 2}[plural]
    job = KINDS[plural](SLEEPS.replace("60", "600"))
    cluster.apply(job)
    for _ in range(3):
        running_pods(cluster, size)
        cluster.kubectl("delete", plural, "t", "--wait=false")
        cluster.await_that(lambda: not cluster.store.list(plural), PATIENCE)
        cluster.apply(job)
        uid = cluster.store.find(plural, "default", "t")["metadata"]["uid"]
        operator.await_phase(plural, "Running")

        def is_ours(uid=uid):
            made = [o for p in ("services", "secrets") for o in cluster.store.list(p, "default")]
            owners = [o["metadata"]["ownerReferences"][0]["uid"] for o in made if "t" in str(o)]
            return len(owners) == 2 and set(owners) == {uid}

        cluster.await_that(is_ours, PATIENCE)
    cluster.kubectl("delete", plural, "t")
    cluster.await_that(lambda: not left(cluster), PATIENCE)


def test_two_jobs_of_one_name_and_of_both_kinds(cluster, operator):
    """Beside a Secret that has the name that ours once had, and another key."""
    other = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "t-key"}}
    join = "import msrun; msrun.join(); import os; print(os.environ['RANK'])"
    own = msrun_job("sleep 0.5; exit 0")
    cluster.apply({**other, "stringData": {"key": "wrong"}}, ms_job(join), own)
    assert operator.await_phase("msjobs", "Succeeded")["verdict"] == {"code": 0}
    assert operator.await_phase("msrunjobs", "Succeeded")["verdict"] == {"code": 0}
    cluster.kubectl("delete", "msjob", "t")
    cluster.kubectl("delete", "msrunjob", "t")
    cluster.await_that(lambda: not left(cluster), PATIENCE)
    assert cluster.store.find("secrets", "default", "t-key") is not None


def test_a_pod_of_somebody_else_stands_in_the_way(cluster, operator):
    container = {"name": "mindspore", "image": "m", "command": ["sleep", "600"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "t-worker-0"}}
    pod["spec"] = {"containers": [container], "terminationGracePeriodSeconds": 0}
    cluster.apply(pod)
    cluster.await_phase("t-worker-0", "Running")
    cluster.apply(ms_job(SLEEPS))

    def said():
        events = [e for e in cluster.store.list("events") if e["reason"] == "FailedCreate"]
        return [e["message"] for e in events]

    cluster.await_that(said, PATIENCE)
    assert said() == ["Pod t-worker-0: one of that name is there already, and is not ours"]
    cluster.kubectl("delete", "pod", "t-worker-0", "--grace-period=0", "--force")
    running_pods(cluster, 3)
    operator.await_phase("msjobs", "Running")
    assert len(said()) == 1


def test_a_gang_without_its_scheduler_is_told(cluster, new_operator):
    operator = new_operator()
    operator.start("--gang-scheduler-name", "volcano")
    cluster.apply(ms_job(SLEEPS))

    def said():
        return [e["message"] for e in cluster.store.list("events") if e["reason"] == "FailedCreate"]

    cluster.await_that(said, PATIENCE)
    assert said() == [
        "PodGroup t: the cluster has no kind PodGroup of scheduling.volcano.sh/v1beta1"
    ]
    assert cluster.store.list("pods") == []
    assert operator.running[0].poll() is None


def test_a_lost_node_and_the_group_runs_on_the_other(cluster, operator):
    cluster.apply(ms_job(SLEEPS.replace("60", "600")))
    running_pods(cluster, 3)
    cluster.lose_node("n1")
    cluster.remove_node("n1")
    cluster.await_that(lambda: operator.status("msjobs").get("restarts") == 1, PATIENCE)
    operator.await_phase("msjobs", "Running")
    names = running_pods(cluster, 3)
    nodes = {cluster.store.find("pods", "default", name)["spec"]["nodeName"] for name in names}
    assert nodes == {"n0"}


@pytest.mark.parametrize("is_answered", [True, False])
@pytest.mark.parametrize("plural", KINDS)
def test_an_operator_killed_at_any_of_its_writes(cluster, new_operator, plural, is_answered):
    """It dies at its nth write, which is carried out or not; the next one brings the job on."""
    operator, size = new_operator(), {"msjobs": 3, "msrunjobs": 2}[plural]
    job, writes = KINDS[plural](SLEEPS.replace("60", "600")), 0
    for deadly in count(1):
        numbers, has_killed = count(1), threading.Event()

        def fault(method, path, numbers=numbers, deadly=deadly, has_killed=has_killed):
            is_ours = "/namespaces/default/" in path and method in ("POST", "PUT", "PATCH")
            if not is_ours or path.endswith("/" + plural) or has_killed.is_set():
                return
            if next(numbers) == deadly:
                has_killed.set()
                operator.running[-1].kill()
                if not is_answered:
                    raise ApiError(500, "InternalError", "killed")

        program = operator.start()
        cluster.apply(job)
        cluster.server.fault = fault
        cluster.await_that(
            lambda has_killed=has_killed: (
                has_killed.is_set() or operator.status(plural).get("phase") == "Running"
            ),
            PATIENCE,
        )
        cluster.server.fault = lambda _method, _path: None
        if has_killed.is_set():
            program.wait()
            operator.start()
        operator.await_phase(plural, "Running")
        running_pods(cluster, size)
        assert len(cluster.store.list("pods")) == size
        assert operator.status(plural).get("restarts", 0) == 0
        writes += 1
        operator.kill()
        cluster.kubectl("delete", plural, "t", timeout=PATIENCE)
        cluster.await_that(lambda: not left(cluster), PATIENCE)
        if not has_killed.is_set():
            break
    assert writes > 5
