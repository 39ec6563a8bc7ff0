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


def batch_job(*conditions, completions=2, owner="u0", kind="MsrunJob", nodes=None, **status):
    reference = [{"uid": owner, "kind": kind, "name": "job"}]
    env = [{"name": "MSRUN_POD_NODES", "value": nodes or str(completions)}]
    pods = {"spec": {"containers": [{"name": "msrun", "env": env}]}}
    metadata = {"name": "job", "uid": "j0", "resourceVersion": "7", "ownerReferences": reference}
    held = [
        {"type": kind, "status": "True", "reason": reason, "message": "m"}
        for kind, reason in conditions
    ]
    return {
        "metadata": {**metadata, **NAMESPACE},
        "spec": {"completions": completions, "suspend": False, "template": pods},
        "status": {"conditions": held, **status},
    }


FOREIGN = batch_job(owner="someone", kind="CronJob")


def pod(index, phase, *, code=None, message="", conditions=(), waiting=None):
    named = {"name": f"job-{index}-x", "uid": f"p{index}"}
    metadata = {**named, "ownerReferences": [{"uid": "j0"}], **NAMESPACE}
    state = {"waiting": waiting} if waiting else {}
    if code is not None:
        state = {"terminated": {"exitCode": code, "message": message, "reason": "Error"}}
    statuses = [{"name": "msrun", "state": state}]
    status = {"phase": phase, "containerStatuses": statuses, "conditions": list(conditions)}
    return {"metadata": metadata, "status": status}


def decide(job, held=None, pods=(), events=()):
    return msrunjob.decide(job, held, pods, NOW, events)


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
        "--grace=10s",
        "--max-restarts=0",
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
    assert secret["metadata"]["name"] == "job-key-u0"
    assert pod_spec["volumes"][0]["secret"] == {"secretName": "job-key-u0", "defaultMode": 0o400}
    env = {e["name"]: e.get("value") or e["valueFrom"] for e in pod_spec["containers"][0]["env"]}
    assert env == {
        "MSRUN_POD_JOB": "job",
        "MSRUN_POD_NODES": "2:4",
        "MSRUN_POD_MESSAGE": "/dev/termination-log",
        "MSRUN_POD_SCHEDULER": "job-0.job:29500",
        "MSRUN_POD_SECRET_FILE": "/run/msrun-key/key",
        "MSRUN_POD_ADDRESS": {"fieldRef": {"fieldPath": "status.podIP"}},
    }
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
    assert container["env"][:1] == asked["env"]
    assert (pod_spec["nodeSelector"], pod_spec["priorityClassName"]) == ({"pool": "gpu"}, "high")
    assert pod_spec["automountServiceAccountToken"] is False


def test_a_template_is_merged_over_the_pods_and_keeps_our_labels():
    template = {
        "metadata": {"annotations": {"a": "b"}, "labels": {"team": "x", "msrun.io/job": "other"}},
        "spec": {
            "hostNetwork": True,
            "securityContext": {"runAsUser": 1000},
            "containers": [
                {"name": "msrun", "stdin": True},
                {"name": "side", "image": "log:1"},
            ],
        },
    }
    (made,) = objects(msrun_job(podTemplate=template))
    pods = made["spec"]["template"]
    assert pods["metadata"]["annotations"] == {"a": "b"}
    assert pods["metadata"]["labels"]["team"] == "x"
    assert pods["metadata"]["labels"]["msrun.io/job"] == "job"
    assert (pods["spec"]["hostNetwork"], pods["spec"]["securityContext"]) == (
        True,
        {"runAsUser": 1000},
    )
    ours, side = pods["spec"]["containers"]
    assert (ours["stdin"], ours["image"], side["name"]) == (True, "train:1", "side")


def test_a_template_that_contradicts_itself_fails_the_job():
    twice = [{"name": "msrun", "tty": True}, {"name": "msrun"}]
    decided = decide(msrun_job(podTemplate={"spec": {"containers": twice}}))
    assert decided.status["phase"] == "Failed"
    assert decided.status["verdict"]["code"] == 2
    assert "has name 'msrun' twice in one list" in decided.status["verdict"]["cause"]


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ({"metadata": {"labels": "team"}}, "metadata.labels is 'team'"),
        ({"metadata": {"annotations": ["a"]}}, "metadata.annotations is \"['a']\""),
        ({"metadata": "x"}, "metadata is 'x'"),
        ({"spec": None}, "spec is 'None'"),
    ],
)
def test_a_template_of_another_form_fails_the_job(template, path):
    decided = decide(msrun_job(podTemplate=template))

    assert decided.status["phase"] == "Failed"
    cause = f"spec.podTemplate: {path}, and pods have a mapping there"
    assert decided.status["verdict"] == {"code": 2, "cause": cause}


def test_servers_are_an_option_of_the_program():
    assert "--server-num=2" in words(msrun_job(nodes=2, servers=2))


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


def test_warnings_say_why_pods_wait_or_are_not_there():
    def warning(uid, reason, message, at="1"):
        about = {"involvedObject": {"uid": uid}, "lastTimestamp": at}
        return {**about, "reason": reason, "message": message}

    job = msrun_job(nodes=2)
    status = decide(job).status
    events = [
        warning("j0", "FailedCreate", "exceeded quota: few"),
        warning("p1", "FailedMount", 'secret "x" not found'),
        warning("p1", "FailedMount", "later", at="2"),
        warning("p9", "FailedMount", "of another job", at="9"),
        warning("j0", "BackOff", "no reason to wait", at="9"),
    ]
    waiting = decide({**job, "status": status}, batch_job(), [pod(1, "Pending")], events)
    assert waiting.status["message"] == "FailedMount: later"
    assert waiting.again_in == 10
    lacking = decide({**job, "status": status}, batch_job(), [], events)
    assert lacking.status["message"] == "FailedCreate: exceeded quota: few"


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
        (FOREIGN, 2, "a Job job is there already, and another owns it"),
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
    bigger = msrun_job(status, nodes=3, minNodes=2, suspend=True)
    held = batch_job(nodes="2:4")
    (patch,) = [a for a in decide(bigger, held).actions if isinstance(a, Patch)]
    assert patch.obj["spec"] == {
        "completions": 3,
        "parallelism": 3,
        "maxFailedIndexes": 1,
        "suspend": True,
    }
    assert patch.obj["metadata"]["resourceVersion"] == "7"


def test_a_change_without_effect_is_said_once():
    status = started()
    changed = msrun_job(status, nodes=2, env=[{"name": "A", "value": "1"}])
    first = decide(changed, batch_job())
    assert [action.reason for action in first.actions] == ["SpecNotApplied"]
    assert decide({**changed, "status": first.status}, batch_job()).actions == ()


@pytest.mark.parametrize("change", [{"owner": "u9"}, {"owner": "x", "kind": "CronJob"}])
def test_a_job_of_an_earlier_msrunjob_is_waited_for(change):
    """Somebody deleted a job and made it anew: the old Job takes its time to go."""
    job, held = msrun_job(nodes=2), batch_job(**change)
    if "kind" in change:
        held["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    looked = decide(job, held)
    assert (looked.status["phase"], looked.again_in) == ("Pending", 1)
    assert looked.status["message"] == "waits until the earlier Job job is gone"
    then = decide({**job, "status": looked.status})
    assert [type(action) for action in then.actions] == [Create, Create, Create]


def test_a_job_cannot_grow_beyond_what_its_agents_were_told():
    job = msrun_job(nodes=9, minNodes=2)
    job["status"] = started(msrun_job(nodes=4, minNodes=2), batch_job(completions=4, nodes="2:4"))
    looked = decide(job, batch_job(completions=4, nodes="2:4"))
    (told,) = looked.actions
    assert told.message == "spec.nodes 9 has no effect beyond 4, with which the job was made"
    assert looked.status["nodes"] == "0/4"
    again = decide({**job, "status": looked.status}, batch_job(completions=4, nodes="2:4"))
    assert again.actions == ()


@pytest.mark.parametrize(
    ("scheduler", "name", "label"),
    [
        ("volcano", "volcano", None),
        ("scheduler-plugins", "scheduler-plugins-scheduler", "scheduling.x-k8s.io/pod-group"),
    ],
)
def test_a_gang_needs_as_many_pods_as_the_job(scheduler, name, label):
    *_, group, made = objects(msrun_job(nodes=4, minNodes=2, gangScheduler=scheduler))
    assert (group["kind"], group["spec"]) == ("PodGroup", {"minMember": 2})
    template = made["spec"]["template"]
    assert template["spec"]["schedulerName"] == name
    assert ("job" in template["metadata"]["labels"].get(label, "")) == bool(label)
    kinds = [made["kind"] for made in objects(msrun_job(gangScheduler=scheduler))]
    assert kinds == ["Job"]  # one pod is no gang


def life(kill_at):
    """Run an MsrunJob to its end; at one look the operator dies after some actions."""
    job, there, events, looks = msrun_job(nodes=2), {}, [], 0

    def settle(held=None, pods=()):
        nonlocal looks
        for _ in range(10):
            looks += 1
            looked = msrunjob.decide(job, there.get("Job") and (held or batch_job()), pods, NOW)
            is_dying = looks == kill_at[0]
            if looked.status == job.get("status") and not looked.actions:
                return
            job["status"] = looked.status
            for action in looked.actions[: kill_at[1] if is_dying else None]:
                if isinstance(action, Create):
                    assert action.obj["kind"] not in there or is_again
                    there.setdefault(action.obj["kind"], action.obj)
                elif isinstance(action, RecordEvent):
                    events.append(action.reason)

    is_again = bool(kill_at[0])
    settle()
    settle(pods=[pod(0, "Running"), pod(1, "Running")])
    settle(batch_job(("Complete", "")))
    return sorted(there), job["status"]["phase"], job["status"]["verdict"]


@pytest.mark.parametrize("look", range(7))
def test_an_operator_killed_between_any_two_actions_loses_and_doubles_nothing(look):
    expected = (["Job", "Secret", "Service"], "Succeeded", {"code": 0})
    for actions in range(5):
        assert life((look, actions)) == expected
