"""Manifests that msrun plan wrote, created by kubectl; rights, quotas and elastic jobs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support import shell

pytest.importorskip("kubernetes")

pytestmark = [pytest.mark.process, pytest.mark.slow]
# As docs/kubernetes.md has them.
RIGHTS = [
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["create", "get", "patch", "delete"]},
    {"apiGroups": [""], "resources": ["services", "secrets", "configmaps"], "verbs": ["create"]},
    {"apiGroups": [""], "resources": ["pods", "pods/log", "events"], "verbs": ["get", "list"]},
]


def test_manifests_that_were_written_are_applied(cluster, tmp_path):
    (tmp_path / "train.py").write_text("import os\nprint('shipped', os.environ['RANK'])\n")
    words = ["plan", "-o", "deploy", "--launcher", "kubernetes", "--image", "train:1"]
    words += ["--job-id", "j", "--nnodes", "2", "--ship", "true", "train.py"]
    subprocess.run([sys.executable, "-m", "msrun", *words], cwd=tmp_path, check=True, timeout=30)
    cluster.kubectl("apply", "-f", str(tmp_path / "deploy"))
    key = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "j-key"}}
    cluster.apply({**key, "stringData": {"key": os.urandom(32).hex()}})
    cluster.kubectl("wait", "--for=condition=complete", "job/j", "--timeout=40s", timeout=45)

    first = next(
        p["metadata"]["name"]
        for p in cluster.store.list("pods")
        if p["metadata"]["name"].startswith("j-0")
    )
    assert "shipped 0" in cluster.kubectl("logs", first).stdout


def test_an_elastic_job_runs_on_the_pods_that_find_a_place(new_cluster, tmp_path, launched):
    cluster = new_cluster(n0={"nvidia.com/gpu": 1}, n1={"nvidia.com/gpu": 1})
    words = "--nnodes 1:3 --last-call 2s --gpus-per-node 1 --workers-per-node 1"
    run = shell("echo $RANK of $WORLD_SIZE; sleep 1")
    front = launched(cluster, tmp_path, *words.split(" "), *run)

    assert front.wait() == 0, front.err + front.out
    assert "0 of 2" in front.out
    assert "Unschedulable" in front.err
    cluster.await_that(
        lambda: all(
            pod["status"]["phase"] == "Succeeded" or pod["metadata"].get("deletionTimestamp")
            for pod in cluster.store.list("pods")
        )
    )


def test_the_rights_of_the_page_are_enough(cluster, submit):
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role"}
    binding = {**role, "kind": "RoleBinding", "metadata": {"name": "ada"}}
    subject = {"kind": "ServiceAccount", "name": "ada", "namespace": "default"}
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "ada"}
    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "ada"}},
        {**role, "metadata": {"name": "ada"}, "rules": RIGHTS},
        {**binding, "subjects": [subject], "roleRef": ref},
    )
    access = cluster.server.access
    cluster.write_kubeconfig(cluster.kubeconfig, access.token("default", "ada"))
    front = submit("--nnodes", "2", *shell("echo up"))

    assert front.wait() == 0, front.err
    assert access.refused == []
    cluster.write_kubeconfig(cluster.kubeconfig, access.token("default", "nobody"))
    refused = submit("--nnodes", "2", *shell("echo up"))
    assert refused.wait() == 2
    assert "the cluster refuses Job sh-" in refused.err


def test_a_secret_of_somebody_else_is_not_used(cluster, submit, left):
    key = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "j-key"}}
    cluster.apply({**key, "stringData": {"key": "wrong"}})
    front = submit("--job-id", "j", "--nnodes", "2", *shell("echo up"))

    assert front.wait() == 2
    assert "there is a Secret j-key in namespace default already" in front.err
    cluster.await_that(lambda: left() == ["secrets/j-key"])


def test_a_quota_that_is_full_is_told(cluster, submit):
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}}
    cluster.apply({**quota, "spec": {"hard": {"pods": "1"}}})
    front = submit("--nnodes", "2", *shell("echo up"))
    front.until_said("exceeded quota: few")
    cluster.kubectl("delete", "resourcequota", "few")

    assert front.wait() == 0


def test_a_deadline_ends_the_job(submit):
    front = submit("--time", "3s", "--nnodes", "2", *shell("sleep 1000"))

    assert front.wait() == 143
    assert "Kubernetes ended the job: DeadlineExceeded" in front.err
