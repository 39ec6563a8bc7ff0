"""Jobs, pods and nodes of the lab: real processes, real faults, nothing left."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time

import pytest
from kube.jobs import condition

pytest.importorskip("kubernetes")

pytestmark = pytest.mark.process

# A pod that waits to be told to end, and says so.
WAITS = "trap 'echo told; exit 7' TERM; echo up; while :; do sleep 0.05; done"

# The python client leaves its sockets open, so it gets a process of its own.
REACHES_IN = """
from kubernetes import client, config, stream
config.load_kube_config()
core = client.CoreV1Api()
hostname = {"command": ["hostname"], "stdout": True}
print(stream.stream(core.connect_get_namespaced_pod_exec, "p", "default", **hostname), end="")
connect = core.connect_get_namespaced_pod_portforward
forward = stream.portforward(connect, "p", "default", ports="7000")
connection = forward.socket(7000)
connection.settimeout(10)
connection.sendall(b"hello")
print(connection.recv(99).decode())
"""


def job(name, *command, count=1, **spec):
    pod = {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": 2,
        "containers": [{"name": "main", "image": "train:1", "command": ["sh", "-c", *command]}],
    }
    spec = {"completions": count, "parallelism": count, "completionMode": "Indexed", **spec}
    spec["template"] = {"metadata": {"labels": {"app": name}}, "spec": pod}
    kind = {"apiVersion": "batch/v1", "kind": "Job"}
    return {**kind, "metadata": {"name": name}, "spec": spec}


def service(name):
    spec = {"clusterIP": "None", "selector": {"app": name}, "publishNotReadyAddresses": True}
    kind = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}}
    return {**kind, "spec": {**spec, "ports": [{"port": 8118}]}}


def await_condition(cluster, kind, name="j"):
    return cluster.await_that(
        lambda: next(
            (
                j
                for j in cluster.store.list("jobs")
                if j["metadata"]["name"] == name and condition(j, kind)
            ),
            None,
        )
    )


def running(cluster, count):
    """Return the names of the running pods once there are that many, by index."""

    def holds():
        pods = [p for p in cluster.store.list("pods") if p["status"]["phase"] == "Running"]
        pods = [p for p in pods if not p["metadata"].get("deletionTimestamp")]
        return sorted(p["metadata"]["name"] for p in pods) if len(pods) == count else None

    return cluster.await_that(holds)


def reason_of(job, kind):
    return next(c["reason"] for c in job["status"]["conditions"] if c["type"] == kind)


def test_an_indexed_job_whose_pods_meet(cluster):
    script = """
        test "$(cat /etc/msrun/key)" = abc && test "$(stat -c %a /etc/msrun/key)" = 400 || exit 9
        test "$(hostname)" = j-$JOB_COMPLETION_INDEX || exit 8
        echo $JOB_COMPLETION_INDEX $POD > /run/msrun/note && echo "$@"
        until getent hosts j-0.j > /dev/null && getent hosts j-1.j.default.svc; do sleep 0.02; done
        sleep 0.3
    """
    it = job("j", script, "sh", "$(POD) is $(NOBODY)", count=2)
    pod = it["spec"]["template"]["spec"]
    pod["volumes"] = [
        {"name": "key", "secret": {"secretName": "key", "defaultMode": 0o400}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
    ]
    pod["containers"][0]["volumeMounts"] = [
        {"name": "key", "mountPath": "/etc/msrun", "readOnly": True},
        {"name": "shm", "mountPath": "/run/msrun"},
    ]
    name = {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    pod["containers"][0]["env"] = [name]
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "key"}}
    cluster.apply(service("j"), {**secret, "stringData": {"key": "abc"}}, it)
    cluster.kubectl("wait", "--for=condition=complete", "job/j", "--timeout=15s")
    done = cluster.store.find("jobs", "default", "j")
    assert (done["status"]["completedIndexes"], done["status"]["succeeded"]) == ("0-1", 2)
    pods = sorted(p["metadata"]["name"] for p in cluster.store.list("pods"))
    assert cluster.kubectl("logs", pods[0]).stdout.startswith(f"{pods[0]} is $(NOBODY)\n")
    assert {p["spec"]["nodeName"] for p in cluster.store.list("pods")} == {"n0", "n1"}
    cluster.kubectl("delete", "job", "j")
    cluster.await_that(lambda: not cluster.store.list("pods"))


def test_a_deleted_pod_is_told_and_then_killed(cluster):
    for name, script in (("polite", WAITS), ("deaf", "trap '' TERM; while :; do sleep 0.05; done")):
        pod = job(name, script)["spec"]["template"]["spec"]
        kind = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
        cluster.apply({**kind, "spec": {**pod, "terminationGracePeriodSeconds": 1}})
        cluster.await_phase(name, "Running")
    ended = []
    for name in ("polite", "deaf"):
        start = time.monotonic()
        cluster.kubectl("delete", "pod", name)
        ended.append(time.monotonic() - start)
    assert ended[0] < 1 <= ended[1]
    assert [host.processes() for host in cluster.pods.lab.hosts] == []


def forwarded(cluster, pod, port, data):
    """Return what a port of a pod answers through the real `kubectl port-forward`."""
    words = ["kubectl", "port-forward", f"pod/{pod}", f":{port}"]
    program = subprocess.Popen(
        words, env=cluster.environ(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        told = program.stdout.readline()
        local = int(told.split(b" -> ")[0].rpartition(b":")[2])
        with socket.create_connection(("127.0.0.1", local), 15) as connection:
            connection.sendall(data)
            return connection.recv(99)
    finally:
        program.terminate()
        program.wait(15)
        program.stdout.close()


def test_commands_and_connections_reach_into_a_pod(cluster):
    server = (
        "import socket; s = socket.create_server(('', 7000)); print('up', flush=True)\n"
        "while True: c = s.accept()[0]; c.sendall(c.recv(99).upper()); c.close()"
    )
    pod = job("p", "")["spec"]["template"]["spec"]
    pod["containers"][0]["command"] = [sys.executable, "-c", server]
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod})
    cluster.await_phase("p", "Running")
    words = ("exec", "-i", "p", "--", "sh", "-c", "cat; hostname; echo no >&2; exit 7")
    done = cluster.kubectl(*words, stdin="yes\n", check=False)
    assert (done.stdout, done.returncode) == ("yes\np\n", 7)
    assert done.stderr == "no\ncommand terminated with exit code 7\n"
    cluster.await_that(lambda: cluster.kubectl("logs", "p").stdout)
    assert forwarded(cluster, "p", 7000, b"hello") == b"HELLO"
    script = [sys.executable, "-c", REACHES_IN]
    done = subprocess.run(
        script, env=cluster.environ(), capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.stdout, done.stderr) == ("p\nHELLO\n", "")


def test_a_log_is_followed_to_its_end(cluster):
    cluster.apply(job("j", "for i in 1 2 3; do echo $i; sleep 0.1; done"))
    running(cluster, 1)
    assert cluster.kubectl("logs", "-f", "job/j").stdout == "1\n2\n3\n"


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"backoffLimit": 1}, "Failed", "BackoffLimitExceeded"),
        ({"backoffLimitPerIndex": 0}, "Failed", "FailedIndexes"),
        (
            {
                "podFailurePolicy": {
                    "rules": [
                        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [7]}}
                    ]
                }
            },
            "Failed",
            "PodFailurePolicy",
        ),
        (
            {"backoffLimitPerIndex": 0, "successPolicy": {"rules": [{"succeededIndexes": "0"}]}},
            "Complete",
            "SuccessPolicy",
        ),
    ],
)
def test_what_a_failing_pod_does_to_its_job(cluster, options, kind, reason):
    cluster.apply(job("j", "sleep 0.1; exit $((JOB_COMPLETION_INDEX * 7))", count=2, **options))
    assert reason_of(await_condition(cluster, kind), kind) == reason


def test_a_killed_pod_is_replaced_and_its_cause_kept(cluster):
    cluster.apply(job("j", WAITS, count=2, ttlSecondsAfterFinished=0, activeDeadlineSeconds=60))
    first, _ = running(cluster, 2)
    cluster.kill_pod(first, cause="OOMKilled")
    ended = cluster.await_phase(first, "Failed")["status"]["containerStatuses"][0]
    state = ended["state"]["terminated"]
    assert (state["exitCode"], state["reason"]) == (137, "OOMKilled")
    assert running(cluster, 2)[0] != first


def test_a_job_ends_by_its_deadline_and_goes_by_its_ttl(cluster):
    cluster.apply(job("j", WAITS, activeDeadlineSeconds=1, ttlSecondsAfterFinished=1))
    assert reason_of(await_condition(cluster, "Failed"), "Failed") == "DeadlineExceeded"
    cluster.await_that(lambda: not cluster.store.list("jobs") and not cluster.store.list("pods"))


def test_a_job_is_suspended_resumed_and_resized(cluster):
    cluster.apply(job("j", WAITS, suspend=True))
    await_condition(cluster, "Suspended")
    assert cluster.store.list("pods") == []

    def patch(**spec):
        text = json.dumps({"spec": spec})
        cluster.kubectl("patch", "job", "j", "--type=merge", "-p", text)

    patch(suspend=False, parallelism=3, completions=3)
    names = running(cluster, 3)
    patch(parallelism=1, completions=1)
    assert running(cluster, 1) == names[:1]
    patch(suspend=True)
    cluster.await_that(lambda: not cluster.store.list("pods"))


def test_pods_of_a_lost_node_run_elsewhere(cluster):
    cluster.apply(job("j", WAITS, count=2))
    before = running(cluster, 2)
    cluster.lose_node("n0")
    lost = cluster.await_that(
        lambda: [
            p["metadata"]["name"]
            for p in cluster.store.list("pods")
            if p["metadata"].get("deletionTimestamp")
        ]
    )
    after = running(cluster, 2)
    assert set(before) - set(after) == set(lost)
    nodes = {cluster.store.find("pods", "default", name)["spec"]["nodeName"] for name in after}
    assert nodes == {"n1"}
    assert len(cluster.store.list("pods")) == 3  # of the lost node, nobody knows
    cluster.remove_node("n0")
    cluster.await_that(lambda: len(cluster.store.list("pods")) == 2)


def test_why_pods_wait(new_cluster):
    cluster = new_cluster(n0={"nvidia.com/gpu": 1})
    cluster.pods.broken_images.add("train:2")
    greedy = job("greedy", WAITS)
    limits = {"limits": {"nvidia.com/gpu": "2"}}
    greedy["spec"]["template"]["spec"]["containers"][0]["resources"] = limits
    pulls = job("pulls", WAITS)
    pulls["spec"]["template"]["spec"]["containers"][0]["image"] = "train:2"
    locked = job("locked", WAITS)
    locked["spec"]["template"]["spec"]["volumes"] = [{"name": "v", "secret": {"secretName": "no"}}]
    quota = {"metadata": {"name": "full"}, "spec": {"hard": {"pods": "3"}}}
    cluster.store.create("resourcequotas", "default", quota)
    for one in (greedy, pulls, locked):
        cluster.apply(one)
    cluster.await_that(lambda: len(cluster.store.list("pods")) == 3)
    cluster.apply(job("late", WAITS))
    expected = {
        ("FailedScheduling", "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."),
        ("Failed", 'Back-off pulling image "train:2": not found'),
        ("FailedMount", 'secret "no" not found'),
    }

    def said():
        return {(e["reason"], e["message"]) for e in cluster.store.list("events")}

    cluster.await_that(lambda: expected <= said())
    cluster.await_that(lambda: any("exceeded quota: full" in text for _, text in said()))


def test_a_preempted_pod_is_replaced_and_says_why(cluster):
    cluster.apply(job("j", WAITS))
    (name,) = running(cluster, 1)
    cluster.preempt(name)
    assert running(cluster, 1) != [name]
    cluster.await_that(lambda: len(cluster.store.list("pods")) == 1)


def test_a_restarted_container_keeps_its_pod(cluster):
    it = job("j", "test -e /tmp/again && exit 0; touch /tmp/again; exit 3")
    it["spec"]["template"]["spec"]["restartPolicy"] = "OnFailure"
    cluster.apply(it)
    await_condition(cluster, "Complete")
    (pod,) = cluster.store.list("pods")
    status = pod["status"]["containerStatuses"][0]
    assert status["restartCount"] == 1
    assert status["lastState"]["terminated"]["exitCode"] == 3
