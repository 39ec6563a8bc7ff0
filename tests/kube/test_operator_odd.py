"""Jobs for the operator as strangers write them: odd names, strict pods, wrong templates."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kube.operators import DEPLOY, PATIENCE, SLEEPS, ms_job, msrun_job, running_pods
from ports import free_port

pytest.importorskip("kopf")
pytest.importorskip("kubernetes")

pytestmark = [pytest.mark.process, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
RESTRICTED = {
    "metadata": {"annotations": {"sidecar.istio.io/inject": "false"}, "labels": {"team": "a"}},
    "spec": {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        "containers": [
            {
                "name": "msrun",
                "securityContext": {"readOnlyRootFilesystem": True},
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
            }
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    },
}
TRAIN_WITH_SERVERS = """
import pathlib
import msrun
rt = msrun.init({"servers": {"params": ["0.weight"]}})
import torch
from torch import nn
model = rt.shard(nn.Sequential(nn.EmbeddingBag(1200, 4), nn.Linear(4, 1)))
optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
ids, values = torch.arange(12).view(4, 3), torch.ones(4, 1)
ends = False
while not ends:
    rt.step(model, optimizer, nn.functional.mse_loss, ids, values)
    told = torch.tensor(float(pathlib.Path("/tmp/go").exists()))
    torch.distributed.all_reduce(told)
    ends = bool(told)
"""


def named(job, name):
    return {**job, "metadata": {"name": name}}


def left(cluster):
    plurals = ("pods", "services", "secrets", "jobs")
    made = [obj for plural in plurals for obj in cluster.store.list(plural, "default")]
    return [o["metadata"]["name"] for o in made if o["metadata"].get("ownerReferences")]


@pytest.mark.parametrize("name", ["a.b", "1a", "a" * 59, "a" * 63])
def test_a_name_that_pods_cannot_have_is_refused_when_it_is_made(api, name):
    api.kubectl("apply", "-f", str(DEPLOY / "definitions.yaml"))
    job = json.dumps(named(msrun_job("true"), name))
    refused = api.kubectl("apply", "-f", "-", stdin=job, check=False)

    assert refused.returncode == 1
    assert "metadata.name is a letter, then at most 57 letters" in refused.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"servers": 2, "minNodes": 1}, "servers need a fixed number of nodes, so no minNodes"),
        ({"servers": 2, "options": {"server-num": "2"}}, "are one thing, give one of them"),
        ({"servers": -1}, "should be greater than or equal to 0"),
        ({"podTemplate": "{}"}, "must be of type object"),
    ],
)
def test_what_a_job_cannot_be_is_refused_when_it_is_made(api, change, said):
    api.kubectl("apply", "-f", str(DEPLOY / "definitions.yaml"))
    job = json.dumps(msrun_job("true", **change))
    refused = api.kubectl("apply", "-f", "-", stdin=job, check=False)

    assert (refused.returncode, said in refused.stderr) == (1, True), refused.stderr


def test_the_size_of_a_running_msjob_is_fixed(api):
    api.kubectl("apply", "-f", str(DEPLOY / "definitions.yaml"))
    api.apply(ms_job("pass"))
    patch = json.dumps({"spec": {"msReplicaSpecs": {"Worker": {"replicas": 3}}}})
    refused = api.kubectl("patch", "msjob", "t", "--type=merge", "-p", patch, check=False)

    assert "Worker.replicas: Invalid value: is fixed once the job exists" in refused.stderr


@pytest.mark.parametrize("name", ["a.b", "a" * 64])
def test_an_msjob_whose_name_no_service_or_label_can_have_fails_with_a_sentence(
    cluster, operator, name
):
    cluster.apply(named(ms_job(SLEEPS), name))
    status = cluster.await_that(
        lambda: (held := operator.status("msjobs", name)).get("phase") == "Failed" and held,
        PATIENCE,
    )

    assert status["verdict"]["code"] == 2
    assert "the cluster refuses" in status["verdict"]["cause"]
    cluster.await_that(lambda: not cluster.store.list("pods"), PATIENCE)

    def reasons():
        return [event["reason"] for event in cluster.store.list("events")]

    cluster.await_that(lambda: "MSJobInvalid" in reasons(), PATIENCE)
    assert (reasons().count("MSJobInvalid"), "FailedCreate" in reasons()) == (1, False)
    cluster.kubectl("delete", "msjob", name)
    cluster.await_that(lambda: not left(cluster), PATIENCE)


@pytest.mark.parametrize("plural", ["msjobs", "msrunjobs"])
def test_a_template_that_the_cluster_refuses_fails_the_job(cluster, operator, plural):
    job = ms_job(SLEEPS) if plural == "msjobs" else msrun_job("true")
    wrong = {"metadata": {"labels": {"team": "no label of Kubernetes"}}}
    if plural == "msjobs":
        job["spec"]["msReplicaSpecs"]["Worker"]["template"] |= wrong
    else:
        job["spec"]["podTemplate"] = {"spec": {"restartPolicy": "Always"}}
    cluster.apply(job)
    status = operator.await_phase(plural, "Failed")

    assert status["verdict"]["code"] == 2
    assert "the cluster refuses" in status["verdict"]["cause"]
    cluster.await_that(lambda: not cluster.store.list("pods"), PATIENCE)


def test_an_msrunjob_in_a_namespace_of_restricted_pods(cluster, operator):
    script = "id -u; (echo x > /opt/written) 2>&1 | grep -o 'Read-only' ; true"
    cluster.apply(msrun_job(script, podTemplate=RESTRICTED))
    status = operator.await_phase("msrunjobs", "Succeeded")

    assert status["verdict"] == {"code": 0}
    pods = cluster.store.list("pods")
    first = next(p for p in pods if p["metadata"]["name"].startswith("t-0-"))
    said = cluster.kubectl("logs", first["metadata"]["name"]).stdout
    assert "1000" in said
    assert "Read-only" in said
    assert {p["metadata"]["labels"]["team"] for p in pods} == {"a"}
    annotations = [p["metadata"].get("annotations", {}) for p in pods]
    assert all(each["sidecar.istio.io/inject"] == "false" for each in annotations)


def test_a_quota_stands_in_the_status_of_an_msjob_while_it_waits(cluster, operator):
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "2"}}}
    cluster.store.create("resourcequotas", "default", quota)
    cluster.apply(ms_job(SLEEPS))

    def message():
        return operator.status("msjobs").get("message", "")

    cluster.await_that(lambda: "exceeded quota: small" in message(), PATIENCE)
    cluster.store.delete("resourcequotas", "default", "small")
    running_pods(cluster, 3)
    cluster.await_that(lambda: message() == "", PATIENCE)


def test_an_image_without_python_is_the_cause_of_an_msrunjob(cluster, operator):
    cluster.apply(msrun_job("true", python="python9"))
    status = operator.await_phase("msrunjobs", "Failed")

    assert status["verdict"]["code"] == 128
    assert '"python9": executable file not found in $PATH' in status["verdict"]["cause"]


def test_an_msrunjob_with_servers_is_scaled_from_outside(cluster, operator, scale):
    job = msrun_job("", servers=2)
    folder = cluster.pods.node_files / "train"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(TRAIN_WITH_SERVERS)
    job["spec"] |= {
        "options": {},
        "program": ["/mnt/train/train.py"],
        "volumes": [{"name": "train", "hostPath": {"path": "/train"}}],
        "volumeMounts": [{"name": "train", "mountPath": "/mnt/train"}],
    }
    cluster.apply(job)
    operator.await_phase("msrunjobs", "Running")
    cluster.await_that(lambda: scale("3").returncode == 0, PATIENCE)
    for name in running_pods(cluster, 2):
        cluster.kubectl("exec", name, "--", "touch", "/tmp/go")

    assert operator.await_phase("msrunjobs", "Succeeded")["verdict"] == {"code": 0}


# As the kubelet has it for the operator's pod: its user, no rights, nothing to write but /tmp.
AS_DEPLOYED = """
set -e
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir -m 1777 /mnt/tmp
install -m 644 "$KUBECONFIG" /mnt/config
for place in $CLOSED; do
    mkdir -p "/mnt/opened$place/upper" "/mnt/opened$place/work"
    layer=/mnt/opened$place
    mount -t overlay overlay "$place" \
        -o "lowerdir=$place,upperdir=$layer/upper,workdir=$layer/work"
done
mount -o remount,bind,ro /
export KUBECONFIG=/mnt/config TMPDIR=/mnt/tmp
cd /
exec setpriv --reuid USER --regid USER --clear-groups --inh-caps=-all --no-new-privs "$@"
"""


def test_the_operator_runs_as_its_deployment_has_it(cluster, new_operator):
    documents = yaml.safe_load_all((DEPLOY / "operator.yaml").read_text())
    deployment = next(each for each in documents if each["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    args = [re.sub(r":\d+$", f"127.0.0.1:{free_port()}", word) for word in container["args"]]
    above = Path(sys.executable).resolve().parents
    closed = [str(each) for each in above if not each.stat().st_mode & 0o001]
    script = AS_DEPLOYED.replace("USER", str(pod["securityContext"]["runAsUser"]))
    operator = new_operator()
    operator.wrapper = ["env", f"CLOSED={' '.join(closed)}", f"PYTHONPATH={ROOT}", "unshare", "-m"]
    operator.wrapper += ["sh", "-c", script, "sh"]
    operator.start(*args[1:], "--leader-elect-resource-namespace", "msrun-system")
    cluster.apply(ms_job("import msrun; msrun.join()"))

    assert operator.await_phase("msjobs", "Succeeded")["verdict"] == {"code": 0}


def test_a_killed_scheduler_has_the_whole_group_start_again(cluster, operator):
    cluster.apply(ms_job(SLEEPS.replace("60", "600"), policy="ExitCode"))
    before = running_pods(cluster, 3)
    cluster.kill_pod("t-scheduler-0")
    cluster.await_that(lambda: operator.status("msjobs").get("restarts") == 1, PATIENCE)
    operator.await_phase("msjobs", "Running")

    assert not set(before.values()) & set(running_pods(cluster, 3).values())


@pytest.fixture
def scale(cluster, tmp_path):
    """Scale the servers of the job from outside of the cluster."""

    def call(number):
        words = ["scale", "t", "--servers", number, "--launcher", "kubernetes"]
        return subprocess.run(
            [sys.executable, "-m", "msrun", *words],
            cwd=tmp_path,
            env={**cluster.environ(), "XDG_RUNTIME_DIR": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return call


def test_ms_operators_small_samples(cluster, operator):
    """One worker alone, and one worker with two servers, as in its config/samples."""
    alone = named(ms_job("import os; assert 'MS_ROLE' not in os.environ", workers=1), "alone")
    del alone["spec"]["msReplicaSpecs"]["Scheduler"], alone["spec"]["runPolicy"]
    servers = named(ms_job("import msrun; msrun.join()", workers=1), "servers")
    roles = servers["spec"]["msReplicaSpecs"]
    roles["PS"] = {**roles["Scheduler"], "replicas": 2}
    servers["spec"] |= {"successPolicy": "AllWorkers", "runPolicy": {"cleanPodPolicy": "None"}}
    cluster.apply(alone, servers)

    for name in ("alone", "servers"):
        assert operator.await_phase("msjobs", "Succeeded", name)["verdict"] == {"code": 0}
    # None of its own ended them.
    phases = {p["metadata"]["name"]: p["status"]["phase"] for p in cluster.store.list("pods")}
    assert phases["alone-worker-0"] == phases["servers-worker-0"] == "Succeeded"
