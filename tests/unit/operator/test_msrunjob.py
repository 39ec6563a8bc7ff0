"""What an MsrunJob is made of, and what its status says of the Job that runs it."""

from __future__ import annotations

import pytest

from launchers.operator import msrunjob
from launchers.operator.decision import Create, Delete, Patch, RecordEvent
from launchers.operator.msrunjob_objects import objects, words

NOW = 1_000_000.0
NAMESPACE = {"namespace": "default"}


def msrun_job(status=None, **spec):
    metadata = {"name": "job", "uid": "u0", "generation": 1, **NAMESPACE}
    given = {**msrunjob.DEFAULTS, "image": "train:1", "program": ["train.py", "--lr", "$LR"]}
    kind = {"apiVersion": msrunjob.API_VERSION, "kind": "MsrunJob", "metadata": metadata}
    return {**kind, "spec": {**given, **spec}, **({"status": status} if status else {})}


def batch_job(*conditions, completions=2, owner="u0", **status):
    reference = [{"uid": owner}]
    metadata = {"name": "job", "uid": "j0", "resourceVersion": "7", "ownerReferences": reference}
    held = [
        {"type": kind, "status": "True", "reason": reason, "message": "m"}
        for kind, reason in conditions
    ]
    return {
        "metadata": {**metadata, **NAMESPACE},
        "spec": {"completions": completions, "suspend": False},
        "status": {"conditions": held, **status},
    }


def pod(index, phase, *, code=None, message="", conditions=(), waiting=None):
    metadata = {"name": f"job-{index}-x", "ownerReferences": [{"uid": "j0"}], **NAMESPACE}
    state = {"waiting": waiting} if waiting else {}
    if code is not None:
        state = {"terminated": {"exitCode": code, "message": message, "reason": "Error"}}
    statuses = [{"name": "msrun", "state": state}]
    status = {"phase": phase, "containerStatuses": statuses, "conditions": list(conditions)}
    return {"metadata": metadata, "status": status}


def decide(job, held=None, pods=()):
    return msrunjob.decide(job, held, pods, NOW)


def started(job=None, held=None, pods=()):
    """Return the status of a job after its first look at what there is."""
    job = job or msrun_job(nodes=2)
    first = decide(job).status
    return decide({**job, "status": first}, held or batch_job(), pods).status


def test_one_node_needs_only_a_job():
    (made,) = objects(msrun_job())
    assert made["kind"] == "Job"
    container = made["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["python", "-P", "-m", "msrun"]
    assert container["args"] == [
        "run",
        "--job-id=job",
        "--grace=10s",
        "--max-restarts=0",
        "train.py",
        "--lr",
        "$$LR",  # of which Kubernetes makes one dollar
    ]
    assert made["spec"]["template"]["spec"]["volumes"] == []


def test_several_nodes_have_a_name_a_key_and_a_number():
    job = msrun_job(
        nodes=4, minNodes=2, workersPerNode=8, options={"b": "2", "a": "1"}, module=True
    )
    secret, service, made = objects(job)
    assert [secret["kind"], service["kind"], made["kind"]] == ["Secret", "Service", "Job"]
    assert "data" not in secret  # the key is made when the Secret is
    assert words(job) == [
        "run",
        "--job-id=job",
        "--grace=10s",
        "--max-restarts=0",
        "--nnodes=2:4",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        "--master-addr=job-0.job",
        "--master-port=29500",
        "--workers-per-node=8",
        "--a=1",
        "--b=2",
        "-m",
        "train.py",
        "--lr",
        "$LR",
    ]
    pod_spec = made["spec"]["template"]["spec"]
    assert pod_spec["subdomain"] == service["metadata"]["name"]
    assert pod_spec["volumes"][0]["secret"] == {"secretName": "job-key", "defaultMode": 0o400}
    assert made["spec"]["maxFailedIndexes"] == 2
    assert made["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def test_a_queued_job_waits_for_kueue():
    (made,) = objects(msrun_job(queue="team"))
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert made["spec"]["suspend"] is True


def test_what_a_job_may_ask_of_its_pods():
    asked = {
        "resources": {"limits": {"nvidia.com/gpu": 8}},
        "sharedMemory": "16Gi",
        "nodeSelector": {"pool": "gpu"},
        "priorityClassName": "high",
        "env": [{"name": "LR", "value": "1"}],
    }
    (made,) = objects(msrun_job(**asked))
    pod_spec = made["spec"]["template"]["spec"]
    container = pod_spec["containers"][0]
    memory = {"emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}, "name": "msrun-shm"}
    assert pod_spec["volumes"] == [memory]
    assert container["volumeMounts"] == [{"name": "msrun-shm", "mountPath": "/dev/shm"}]
    assert container["resources"] == asked["resources"]
    assert container["env"] == asked["env"]
    assert (pod_spec["nodeSelector"], pod_spec["priorityClassName"]) == ({"pool": "gpu"}, "high")
    assert pod_spec["automountServiceAccountToken"] is False


def test_the_first_look_creates_and_the_second_only_watches():
    job = msrun_job(nodes=2)
    first = decide(job)
    assert [type(action) for action in first.actions] == [RecordEvent, Create, Create, Create]
    assert first.status["phase"] == "Pending"
    second = decide({**job, "status": first.status}, batch_job(), [])
    assert second.actions == ()
    assert second.status["nodes"] == "0/2"


@pytest.mark.parametrize(
    ("pods", "said"),
    [
        ([pod(0, "Pending", waiting={"reason": "ImagePullBackOff", "message": "no such image"})],
         "ImagePullBackOff: no such image"),
        ([pod(0, "Running"),
          pod(1, "Pending", conditions=[
              {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
               "message": "0/2 nodes are available"}])],
         "Unschedulable: 0/2 nodes are available"),
        ([pod(0, "Running"), pod(1, "Running")], ""),
    ],
)  # fmt: skip
def test_why_pods_wait_stands_in_the_status(pods, said):
    assert started(pods=pods)["message"] == said


def test_phases_of_a_job_that_goes_well():
    job = msrun_job(nodes=2, ttlSecondsAfterFinished=5)
    status = started(job, pods=[pod(0, "Running"), pod(1, "Running")])
    assert (status["phase"], status["nodes"]) == ("Running", "2/2")
    lost = decide({**job, "status": status}, batch_job(failed=1), []).status
    assert (lost["phase"], lost["restarts"]) == ("Restarting", 1)
    done = decide({**job, "status": status}, batch_job(("Complete", "")), [])
    assert (done.status["phase"], done.status["verdict"]) == ("Succeeded", {"code": 0})
    assert done.again_in == 5
    later = msrunjob.decide({**job, "status": done.status}, None, [], NOW + 5)
    assert later.actions == (Delete(msrunjob.API_VERSION, "MsrunJob", "default", "job", "u0"),)


def test_the_verdict_is_what_the_agents_said():
    said = "msrun: x\nerror: rank 3 (node job-1) exited with code 7; log: l\n  hint: h\n"
    pods = [pod(0, "Failed", code=137), pod(1, "Failed", code=7, message=said)]
    held = batch_job(("Failed", "PodFailurePolicy"))
    status = started(held=held, pods=pods)
    cause = "rank 3 (node job-1) exited with code 7; log: l"
    assert status["verdict"] == {"code": 7, "cause": cause, "rank": 3}
    assert status["phase"] == "Failed"


def test_a_verdict_stays_when_its_pod_is_gone():
    job = msrun_job(nodes=2)
    status = started(job, pods=[pod(1, "Failed", code=7, message="error: rank 3 ended")])
    assert status["phase"] == "Pending"
    end = decide({**job, "status": status}, batch_job(("Failed", "PodFailurePolicy")), []).status
    assert end["verdict"] == {"code": 7, "cause": "rank 3 ended", "rank": 3}


@pytest.mark.parametrize(
    ("held", "code", "cause"),
    [
        (batch_job(("Failed", "DeadlineExceeded")), 124, "DeadlineExceeded: m"),
        (batch_job(("Failed", "FailedIndexes")), 1, "FailedIndexes: m"),
        (batch_job(owner="someone"), 2, "a Job job is there already, and another owns it"),
    ],
)
def test_other_ends(held, code, cause):
    assert started(held=held)["verdict"] == {"code": code, "cause": cause}


def test_a_job_that_somebody_deleted_has_ended():
    job = msrun_job(nodes=2)
    status = started(job)
    assert decide({**job, "status": status}).status["verdict"] == {
        "code": 143,
        "cause": "Job job was deleted",
    }


def test_a_suspended_job_says_so_and_a_changed_one_is_patched():
    job = msrun_job(nodes=2)
    assert started(job, batch_job(("Suspended", "")))["phase"] == "Suspended"
    status = started(job)
    bigger = msrun_job(status, nodes=3, suspend=True)
    (patch,) = [a for a in decide(bigger, batch_job()).actions if isinstance(a, Patch)]
    assert patch.obj["spec"] == {"completions": 3, "parallelism": 3, "suspend": True}
    assert patch.obj["metadata"]["resourceVersion"] == "7"


def test_a_change_without_effect_is_said_once():
    status = started()
    changed = msrun_job(status, nodes=2, env=[{"name": "A", "value": "1"}])
    first = decide(changed, batch_job())
    assert [action.reason for action in first.actions] == ["SpecNotApplied"]
    assert decide({**changed, "status": first.status}, batch_job()).actions == ()
