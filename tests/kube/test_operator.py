"""The real operator, under the account that it is deployed with, on the cluster of the lab."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kube.operators import DEPLOY, PATIENCE, SLEEPS, ms_job, msrun_job, running_pods

pytest.importorskip("kopf")
pytest.importorskip("kubernetes")

pytestmark = pytest.mark.process

PAGE = Path(__file__).parents[2] / "docs" / "operator.md"


@pytest.fixture
def cluster(new_cluster):
    """Two nodes with two GPUs each."""
    return new_cluster(n0={"nvidia.com/gpu": 2}, n1={"nvidia.com/gpu": 2})


def test_an_msjob_whose_processes_meet_and_leave_nothing(cluster, operator):
    script = (
        "import msrun; msrun.join(); import os; "
        "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    )
    cluster.apply({**ms_job(script, cleanPodPolicy="None")})
    status = operator.await_phase("msjobs", "Succeeded")
    assert status["verdict"] == {"code": 0}
    for rank in (0, 1):
        log = cluster.kubectl("logs", f"t-worker-{rank}").stdout
        assert f"rank {rank} of 2" in log
    head, row = cluster.kubectl("get", "msjob", "t").stdout.splitlines()
    assert head.split() == ["NAME", "PHASE", "RESTARTS", "CAUSE", "AGE"]
    assert row.split()[:2] == ["t", "Succeeded"]
    cluster.kubectl("delete", "msjob", "t")
    for plural in ("pods", "services", "secrets"):
        cluster.await_that(lambda plural=plural: not cluster.store.list(plural))


@pytest.mark.slow
def test_an_msjob_in_the_shape_of_ms_operators_samples(cluster, operator):
    """As their config/samples: a script on the nodes, bash, python on PATH, a GPU a worker."""
    folder = cluster.pods.node_files / "home/someone/wide_and_deep"
    folder.mkdir(parents=True)
    script = "import msrun; msrun.join(); import os, sys; print(sys.argv[1], os.environ['RANK'])"
    (folder / "train.py").write_text(script)
    line = 'python -s /home/someone/wide_and_deep/train.py --device_target="GPU" --epochs=1'
    job = ms_job("", workers=4, cleanPodPolicy="None")
    job["spec"]["successPolicy"] = "AllWorkers"
    # Both roles share a template, of which the workers' asks for more.
    template = job["spec"]["msReplicaSpecs"]["Worker"]["template"]["spec"]
    template["volumes"] = [
        {"name": "script-data", "hostPath": {"path": "/home/someone/wide_and_deep/"}}
    ]
    container = template["containers"][0]
    container |= {
        "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/bash", "-c", line],
        "env": [{"name": "GLOG_v", "value": "1"}],
        "volumeMounts": [{"name": "script-data", "mountPath": "/home/someone/wide_and_deep/"}],
    }
    limits = {"limits": {"nvidia.com/gpu": 1}}
    asks = {**template, "containers": [{**container, "resources": limits}]}
    job["spec"]["msReplicaSpecs"]["Worker"]["template"] = {"spec": asks}
    cluster.apply(job)
    operator.await_phase("msjobs", "Succeeded")
    for rank in range(4):
        assert f"--device_target=GPU {rank}\n" in cluster.kubectl("logs", f"t-worker-{rank}").stdout


TRAIN_WITH_SERVERS = """
import msrun
rt = msrun.init({"servers": {"params": ["0.weight"]}})
import torch
from torch import nn
torch.manual_seed(0)
model = rt.shard(nn.Sequential(nn.EmbeddingBag(1200, 4), nn.Linear(4, 1)))
optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
ids, values = torch.arange(12).view(4, 3), torch.ones(4, 1)
losses = [rt.step(model, optimizer, nn.functional.mse_loss, ids, values).item() for _ in range(9)]
print("rank", rt.rank, "learns:", losses[-1] < losses[0])
"""


@pytest.mark.slow
def test_an_msjob_trains_with_the_parameter_servers_of_its_role_ps(cluster, operator):
    """As MS-Operator's own samples with PS have it: a Scheduler, two PS, and workers."""
    job = ms_job(TRAIN_WITH_SERVERS)
    roles = job["spec"]["msReplicaSpecs"]
    roles["PS"] = {**roles["Scheduler"], "replicas": 2}
    job["spec"] |= {"successPolicy": "AllWorkers", "runPolicy": {"cleanPodPolicy": "None"}}
    cluster.apply(job)

    status = operator.await_phase("msjobs", "Succeeded")

    assert status["verdict"] == {"code": 0}
    for rank in (0, 1):
        assert f"rank {rank} learns: True" in cluster.kubectl("logs", f"t-worker-{rank}").stdout
        said = cluster.kubectl("logs", f"t-ps-{rank}").stdout
        assert "this process has a parameter server" in said


def test_an_msrunjob_says_which_rank_ended_it_and_why(cluster, operator):
    cluster.apply(msrun_job("sleep 0.2; test $RANK = 0 && sleep 60; exit 7"))
    status = operator.await_phase("msrunjobs", "Failed")
    assert status["verdict"]["code"] == 7
    assert status["verdict"]["rank"] == 1
    assert "rank 1" in status["verdict"]["cause"]
    head, row = cluster.kubectl("get", "mrj", "t").stdout.splitlines()
    assert head.split() == ["NAME", "PHASE", "NODES", "RESTARTS", "CAUSE", "AGE"]
    assert "rank 1" in row
    cluster.kubectl("delete", "mrj", "t")
    for plural in ("jobs", "pods", "services", "secrets"):
        cluster.await_that(lambda plural=plural: not cluster.store.list(plural))


def test_a_killed_worker_has_the_whole_group_start_again(cluster, operator):
    cluster.apply(ms_job(SLEEPS, policy="ExitCode"))
    before = running_pods(cluster, 3)
    cluster.kill_pod("t-worker-1")
    operator.await_phase("msjobs", "Restarting")
    operator.await_phase("msjobs", "Running")
    after = running_pods(cluster, 3)
    assert before.keys() == after.keys()
    assert not set(before.values()) & set(after.values())
    assert operator.status("msjobs")["restarts"] == 1


def test_a_lost_pod_of_an_msrunjob_is_replaced_and_the_job_goes_on(cluster, operator):
    script = "test $TORCHELASTIC_RESTART_COUNT = 0 && sleep 60; exit 0"
    cluster.apply(msrun_job(script, maxRestarts=2))
    operator.await_phase("msrunjobs", "Running")
    pods = running_pods(cluster, 2)
    (name,) = [name for name in pods if name.startswith("t-1-")]
    cluster.await_that(lambda: "running" in cluster.kubectl("logs", name).stdout, PATIENCE)
    cluster.kill_pod(name)
    status = operator.await_phase("msrunjobs", "Succeeded")
    assert (status["restarts"], status["verdict"]) == (1, {"code": 0})


def test_an_operator_that_was_killed_is_not_missed(cluster, new_operator):
    operator = new_operator()
    operator.start()
    cluster.apply(ms_job(SLEEPS, policy="ExitCode", activeDeadlineSeconds=600))
    before = running_pods(cluster, 3)
    operator.kill()
    cluster.kill_pod("t-worker-0")
    cluster.await_phase("t-worker-0", "Failed")
    operator.start()
    operator.start()  # and one too many: names and versions keep them apart
    cluster.await_that(lambda: operator.status("msjobs").get("restarts") == 1, PATIENCE)
    operator.await_phase("msjobs", "Running")
    after = running_pods(cluster, 3)
    assert before.keys() == after.keys()
    assert operator.status("msjobs")["restarts"] == 1
    reasons = [e["reason"] for e in cluster.store.list("events")]
    assert reasons.count("MSJobRestarting") == 1


def test_an_api_server_that_was_down_is_found_again(cluster, operator):
    cluster.apply(ms_job(SLEEPS, policy="ExitCode"))
    running_pods(cluster, 3)
    with cluster.server_down():
        cluster.kill_pod("t-worker-0")
        cluster.await_phase("t-worker-0", "Failed")
    cluster.await_that(lambda: operator.status("msjobs").get("restarts") == 1, PATIENCE)
    running_pods(cluster, 3)


def test_a_deadline_and_a_ttl_pass_without_an_event(cluster, operator):
    policy = {"activeDeadlineSeconds": 2, "ttlSecondsAfterFinished": 1}
    cluster.apply(ms_job(SLEEPS, **policy))
    status = operator.await_phase("msjobs", "Failed")
    assert status["verdict"]["code"] == 124
    cluster.await_that(lambda: not cluster.store.list("msjobs"))
    cluster.await_that(lambda: not cluster.store.list("pods"))


@pytest.mark.usefixtures("operator")
def test_what_the_cluster_refuses_is_an_event_until_it_does_not(cluster):
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "2"}}}
    cluster.store.create("resourcequotas", "default", quota)
    cluster.apply(ms_job(SLEEPS))

    def said():
        events = cluster.store.list("events")
        return [e["message"] for e in events if e["reason"] == "FailedCreate"]

    cluster.await_that(said, PATIENCE)
    assert "Pod t-worker-1: " in said()[0]
    assert "exceeded quota: small" in said()[0]
    cluster.store.delete("resourcequotas", "default", "small")
    running_pods(cluster, 3)
    assert len(said()) == 1


def test_why_an_msrunjob_waits(cluster, operator):
    resources = {"limits": {"nvidia.com/gpu": 8}}
    cluster.apply(msrun_job("true", nodes=1, resources=resources))
    said = "Unschedulable: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    cluster.await_that(lambda: operator.status("msrunjobs").get("message") == said, PATIENCE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"minNodes": 3}, "minNodes is at most nodes"),
        ({"nodes": 0}, "should be greater than or equal to 1"),
        ({"options": {"nnodes": "9"}}, "has an option that other fields decide"),
        ({"sharedMemory": "lots"}, "should match"),
        ({"program": []}, "minItems is 1"),
        ({"image": None}, "spec.image: Required value"),
    ],
)
def test_a_wrong_msrunjob_is_refused_when_it_is_made(api, change, said):
    api.kubectl("apply", "-f", str(DEPLOY / "definitions.yaml"))
    job = msrun_job("true")
    job["spec"] = {k: v for k, v in {**job["spec"], **change}.items() if v is not None}
    refused = api.kubectl("apply", "-f", "-", stdin=json.dumps(job), check=False)
    assert (refused.returncode, said in refused.stderr) == (1, True), refused.stderr


def test_what_a_running_msrunjob_may_change(api):
    api.kubectl("apply", "-f", str(DEPLOY / "definitions.yaml"))
    api.apply(msrun_job("true"))

    def patch(**spec):
        words = ("patch", "mrj", "t", "--type=merge", "-p", json.dumps({"spec": spec}))
        return api.kubectl(*words, check=False).stderr

    assert "is fixed once the job exists" in patch(image="other")
    assert "nodes may change in jobs with minNodes" in patch(nodes=3)
    assert patch(suspend=True) == ""
    found = api.store.find("msrunjobs", "default", "t")["spec"]
    assert (found["maxRestarts"], found["nodeRestarts"], found["gracePeriodSeconds"]) == (0, 3, 10)


def test_the_page_has_objects_that_the_server_takes(api):
    api.kubectl("apply", "-f", str(DEPLOY / "definitions.yaml"))
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for text in blocks:
        api.kubectl("apply", "-f", "-", stdin=text)
        found = yaml.safe_load(text)
        made = api.store.find(f"{found['kind'].lower()}s", "default", found["metadata"]["name"])
        assert found["spec"].items() <= made["spec"].items()  # nothing was pruned
    assert len(blocks) == 2


def test_the_printed_manifests_are_those_of_kustomize(api):
    words = [sys.executable, "-m", "msrun", "operator", "manifests"]
    text = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout
    built = api.kubectl("kustomize", str(DEPLOY)).stdout
    mine, theirs = (
        {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(each)}
        for each in (text, built)
    )
    assert mine == theirs
    api.kubectl("apply", "-f", "-", stdin=text)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fifty_random_kills_leave_nothing(cluster, new_operator):
    """Pods are killed or deleted and operators killed; the job goes on, and then all is gone."""
    chance = random.Random(20)
    operator = new_operator()
    operator.start()
    cluster.apply(ms_job(SLEEPS.replace("60", "600"), policy="ExitCode"))
    for _ in range(50):
        if operator.status("msjobs").get("restarts", 0) >= 2:  # its waits grow: begin anew
            cluster.kubectl("delete", "msjob", "t")
            cluster.await_that(lambda: not cluster.store.list("pods"), PATIENCE)
            cluster.apply(ms_job(SLEEPS.replace("60", "600"), policy="ExitCode"))
        operator.await_phase("msjobs", "Running")
        running_pods(cluster, 3)
        before = operator.status("msjobs").get("restarts", 0)
        name = chance.choice(sorted(running_pods(cluster, 3)))
        match chance.choice(("kill", "delete", "operator", "server")):
            case "kill":
                cluster.kill_pod(name)
            case "delete":
                cluster.kubectl("delete", "pod", name, "--grace-period=0")
            case "operator":
                operator.kill()
                cluster.kill_pod(name)
                operator.start()
            case "server":
                with cluster.server_down():
                    cluster.kill_pod(name)
        cluster.await_that(
            lambda before=before: operator.status("msjobs").get("restarts", 0) > before, PATIENCE
        )
    cluster.kubectl("delete", "msjob", "t")
    for plural in ("pods", "services", "secrets"):
        cluster.await_that(lambda plural=plural: not cluster.store.list(plural))
    assert cluster.pods.lab.hosts == []
