"""What becomes of an MSJob, step by step, in a cluster of plain data."""

from __future__ import annotations

import copy

import pytest

from launchers.operator.decision import WAIT_SECONDS
from launchers.operator.gang import GangScheduler
from launchers.operator.msjob import BadSpecError, read_spec

ALL = ["scheduler-0", "worker-0", "worker-1"]


def test_the_scheduler_comes_first_and_all_have_names_env_and_labels(new_job):
    job = new_job(ps=1)
    job.settle()
    assert job.pods() == ["scheduler-0"]
    assert job.job["status"]["phase"] == "Pending"
    job.start()
    assert sorted(job.pods()) == ["ps-0", *ALL]
    service = job.objects["Service", "job-scheduler-0"]
    assert service["spec"]["ports"] == [{"name": "msjob-port", "port": 2222}]
    assert job.environ("worker-1") == {
        "MSRUN_SECRET_FILE": "/run/msrun/key",
        "MS_SCHED_HOST": "job-scheduler-0",
        "MS_SCHED_PORT": "2222",
        "MS_WORKER_NUM": "2",
        "MS_SERVER_NUM": "1",
        "MS_ROLE": "MS_WORKER",
        "MS_NODE_ID": "1",
        "MSRUN_POD_SCHEDULER": "job-scheduler-0:2222",
    }
    assert job.environ("scheduler-0")["MS_ROLE"] == "MS_SCHED"
    assert job.environ("ps-0")["MS_ROLE"] == "MS_PSERVER"
    assert job.pod("worker-1")["metadata"]["labels"] == {
        "training.kubeflow.org/operator-name": "msjob-controller",
        "group-name": "mindspore.gitee.com",
        "training.kubeflow.org/job-name": "job",
        "job-name": "job",
        "replica-type": "worker",
        "replica-index": "1",
        "training.kubeflow.org/replica-type": "worker",
        "training.kubeflow.org/replica-index": "1",
        "msrun.io/generation": "0",
    }
    assert job.events == ["MSJobCreated", "MSJobRunning"]
    assert job.conditions() == ["Created", "Running"]


def test_a_policy_for_gangs_without_a_scheduler_for_them_is_told_to_have_no_effect(new_job):
    job = new_job(run_policy={"schedulingPolicy": {"minAvailable": 3}}).start()
    assert job.events == ["MSJobCreated", "NoGang", "MSJobRunning"]


def test_a_gang_of_volcano_is_made_at_once(new_job):
    """Its scheduler's pod would not be placed before all others are there."""
    policy = {"minAvailable": 2, "queue": "q", "priorityClass": "high", "minResources": {"cpu": 3}}
    job = new_job(run_policy={"schedulingPolicy": policy})
    job.gang_scheduler = GangScheduler.VOLCANO
    job.settle()
    assert sorted(job.pods()) == ALL
    assert job.events == ["MSJobCreated"]
    group = job.objects["PodGroup", "job"]
    assert group["apiVersion"] == "scheduling.volcano.sh/v1beta1"
    assert group["spec"] == {
        "minMember": 2,
        "minResources": {"cpu": 3},
        "queue": "q",
        "priorityClassName": "high",
    }
    pod = job.pod("worker-1")
    assert pod["spec"]["schedulerName"] == "volcano"
    assert pod["metadata"]["annotations"] == {
        "scheduling.k8s.io/group-name": "job",
        "volcano.sh/task-spec": "worker",
    }


def test_a_gang_of_the_scheduler_plugins(new_job):
    template = {
        "spec": {"schedulerName": "mine", "containers": [{"name": "mindspore", "image": "m"}]}
    }
    job = new_job(run_policy={"schedulingPolicy": {"priorityClass": "high"}}, template=template)
    job.gang_scheduler = GangScheduler.PLUGINS
    job.settle()
    assert job.objects["PodGroup", "job"]["spec"] == {"minMember": 3}
    pod = job.pod("worker-0")
    assert pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "job"
    assert (pod["spec"]["schedulerName"], pod["spec"]["priorityClassName"]) == ("mine", "high")


def test_a_queue_of_kueue_is_a_label_of_the_job(new_job):
    job = new_job(policy="ExitCode", run_policy={"schedulingPolicy": {}})
    job.job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    job.start()
    assert not [name for kind, name in job.objects if kind == "PodGroup"]
    labels = job.pod("ps-0" if "ps-0" in job.pods() else "worker-0")["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "team"
    assert labels["kueue.x-k8s.io/pod-group-name"] == "job-0"
    annotations = job.pod("worker-0")["metadata"]["annotations"]
    assert annotations == {"kueue.x-k8s.io/pod-group-total-count": "3"}
    job.end("worker-1", 137).start()
    labels = job.pod("worker-0")["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/pod-group-name"] == "job-1"
    assert "NoGang" not in job.events


def test_one_pod_is_no_gang(new_job):
    job = new_job(scheduler=False, workers=1)
    job.gang_scheduler = GangScheduler.VOLCANO
    job.settle()
    assert list(job.objects) == [("Pod", "job-worker-0")]


def test_why_pods_wait_stands_in_the_status_while_they_do(new_job):
    job = new_job().settle()
    state = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    held = {"name": "mindspore", "state": state}
    job.pod("scheduler-0")["status"] = {"phase": "Pending", "containerStatuses": [held]}
    job.settle()
    assert job.job["status"]["message"] == "ImagePullBackOff: no such image"
    assert job.again_in == 10
    job.start()
    assert job.job["status"]["message"] == ""


def test_the_key_of_a_job_is_that_of_no_other(new_job):
    job = new_job().start()
    (name,) = [name for kind, name in job.objects if kind == "Secret"]
    assert name == "job-key-u0"
    volume = job.pod("worker-0")["spec"]["volumes"][-1]
    assert volume["secret"]["secretName"] == name


def test_everything_has_the_job_as_its_owner(new_job):
    job = new_job(ps=1)
    job.gang_scheduler = GangScheduler.VOLCANO
    job.start()
    assert {kind for kind, _ in job.objects} == {"Pod", "Service", "Secret", "PodGroup"}
    for obj in job.objects.values():
        (owner,) = obj["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == ("u0", True)
        assert "finalizers" not in obj["metadata"]


def test_worker_10_is_rank_10(new_job):
    job = new_job(workers=11).start()
    assert [job.environ(f"worker-{i}")["MS_NODE_ID"] for i in (2, 10)] == ["2", "10"]


def test_one_worker_alone_has_no_service_and_no_variables(new_job):
    job = new_job(scheduler=False, workers=1).settle()
    assert list(job.objects) == [("Pod", "job-worker-0")]
    assert job.environ("worker-0") == {}


def test_workers_without_a_scheduler_meet_at_worker_0(new_job):
    job = new_job(scheduler=False, workers=3).settle()
    assert ("Service", "job-worker-0") in job.objects
    assert job.environ("worker-2") == {
        "MSRUN_SECRET_FILE": "/run/msrun/key",
        "MASTER_ADDR": "job-worker-0",
        "MASTER_PORT": "2222",
        "RANK": "2",
        "WORLD_SIZE": "3",
    }


def test_a_port_and_variables_of_the_user_are_kept(new_job):
    container = {
        "name": "mindspore",
        "image": "m",
        "env": [{"name": "A", "value": "1"}, {"name": "MS_ROLE", "value": "mine"}],
        "ports": [{"name": "msjob-port", "containerPort": 3333}],
    }
    job = new_job(template={"spec": {"containers": [container]}}).start()
    assert job.environ("worker-0")["A"] == "1"
    assert job.environ("worker-0")["MS_ROLE"] == "MS_WORKER"  # the last one wins
    assert job.environ("worker-0")["MS_SCHED_PORT"] == "3333"
    assert job.pod("worker-0")["spec"]["containers"][0]["ports"] == container["ports"]


@pytest.mark.parametrize(
    ("policy", "done", "expected"),
    [
        ("", ["worker-1"], False),
        ("", ["worker-0"], True),
        ("AllWorkers", ["worker-0"], False),
        ("AllWorkers", ["worker-0", "worker-1"], True),
    ],
)
def test_when_a_job_has_succeeded(new_job, policy, done, expected):
    job = new_job(successPolicy=policy).start()
    for name in done:
        job.end(name, 0)
    assert ("Succeeded" in job.conditions()) == expected
    if expected:
        assert job.job["status"]["verdict"] == {"code": 0}
        assert job.job["status"]["replicaStatuses"]["Worker"] == {
            "active": 0,
            "succeeded": 2,
            "failed": 0,
        }


@pytest.mark.parametrize(
    ("policy", "left"),
    [("None", ALL), ("Running", ["worker-0"]), ("All", [])],
)
def test_which_pods_are_cleaned(new_job, policy, left):
    job = new_job(run_policy={"cleanPodPolicy": policy}).start().end("worker-0", 0)
    assert sorted(job.pods()) == left
    assert (("Service", "job-scheduler-0") in job.objects) == (policy == "None")


def test_the_cause_is_the_pod_that_ended_first(new_job):
    job = new_job(workers=3).start()
    job.end("worker-0", 1, at="2026-01-01T00:00:09Z", look=False)
    said = "x\nerror: rank 2 (node c, local_rank 0) exited with code 3 after 9s; log: l\n"
    job.end("worker-2", 3, at="2026-01-01T00:00:05Z", message=said)
    assert job.conditions() == ["Created", "Failed"]
    assert job.job["status"]["verdict"] == {
        "code": 3,
        "rank": 2,
        "cause": "rank 2 (node c, local_rank 0) exited with code 3 after 9s; log: l",
    }
    assert job.job["status"]["replicaStatuses"]["Worker"] == {
        "active": 0,
        "succeeded": 0,
        "failed": 2,
    }


def test_out_of_memory_is_called_that(new_job):
    job = new_job().start().end("worker-1", 137, reason="OOMKilled")
    assert job.job["status"]["verdict"]["cause"] == (
        "pod job-worker-1 ended with code 137: out of memory"
    )


@pytest.mark.parametrize(
    ("policy", "code", "restarts"),
    [
        *(("ExitCode", code, 1) for code in (130, 137, 138, 143)),
        *(("ExitCode", code, 0) for code in (1, 2, 126, 127, 128, 139)),
        ("Never", 137, 0),
    ],
)
def test_after_which_codes_all_pods_start_again(new_job, policy, code, restarts):
    job = new_job(policy=policy).start()
    before = {name: job.pod(name)["metadata"]["uid"] for name in ALL}
    job.end("worker-1", code)
    assert job.job["status"].get("restarts", 0) == restarts
    if not restarts:
        assert "Failed" in job.conditions()
        return
    assert job.conditions() == ["Created", "Restarting"]
    job.start()
    assert job.conditions() == ["Created", "Running"]
    assert sorted(job.pods()) == ALL
    assert all(job.pod(name)["metadata"]["uid"] != before[name] for name in ALL)


def test_a_job_starts_again_only_so_often_and_later_each_time(new_job):
    job = new_job(policy="ExitCode", run_policy={"backoffLimit": 3}).start()
    waits = []
    for _ in range(3):
        job.end("worker-0", 137)
        waits.append(job.again_in)
        job.now += job.again_in or 0
        job.start()
    job.end("worker-0", 137)
    assert waits == [WAIT_SECONDS, 2.0, 4.0]  # after the first there are pods, which wait
    assert job.job["status"]["verdict"]["cause"].endswith("backoffLimit 3 is spent")


@pytest.mark.parametrize("lost", ALL)
def test_a_deleted_pod_starts_the_group_again(new_job, lost):
    job = new_job().start()
    del job.objects["Pod", f"job-{lost}"]
    job.settle()
    assert job.job["status"]["lastCause"] == f"pod {lost} was deleted"
    job.start()
    assert sorted(job.pods()) == ALL
    assert job.conditions() == ["Created", "Running"]


def test_a_pod_that_the_cluster_took_starts_the_group_again(new_job):
    job = new_job().start()
    taken = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    job.end("worker-1", 143, look=False)
    job.pod("worker-1")["status"]["conditions"] = [taken]
    job.settle()
    assert job.job["status"]["lastCause"] == (
        "pod job-worker-1 ended with code 143: PreemptionByScheduler"
    )


def test_a_pod_that_the_cluster_is_about_to_take_starts_the_group_again(new_job):
    """It is removed as soon as it has ended, so nobody could ask it why later."""
    job = new_job().start()
    pod = job.pod("worker-1")
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    job.settle()
    assert "restarts" not in job.job["status"]  # somebody deleted it, who may not be the cluster
    held = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    pod["status"]["conditions"] = [held]
    job.settle()
    assert job.job["status"]["lastCause"] == "pod job-worker-1: EvictionByEvictionAPI"
    del job.objects["Pod", "job-worker-1"]
    job.start()
    assert job.conditions() == ["Created", "Running"]


def test_dynamic_workers_come_and_go(new_job):
    job = new_job(enableDynamicWorker=True).start()
    job.end("worker-1", 1)
    assert job.conditions() == ["Created", "Running"]
    del job.objects["Pod", "job-worker-1"]
    job.start()
    assert sorted(job.pods()) == ALL
    assert "restarts" not in job.job["status"]


def test_a_deadline_and_a_ttl_need_no_other_event(new_job):
    policy = {"activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 30}
    job = new_job(run_policy=policy).start()
    assert job.again_in == 60
    job.now += 59
    assert not job.look()
    job.now += 1
    job.settle()
    assert job.conditions() == ["Created", "Failed"]
    assert job.job["status"]["verdict"]["code"] == 124
    assert (job.again_in, job.pods(), job.is_deleted) == (30, [], False)
    job.now += 30
    job.look()
    assert job.is_deleted


def test_containers_that_the_kubelet_starts_again_are_counted(new_job):
    job = new_job(policy="OnFailure", run_policy={"backoffLimit": 2}).start()
    for restarts in (1, 2):
        job.pod("worker-0")["status"]["containerStatuses"] = [
            {"name": "mindspore", "restartCount": restarts, "state": {"running": {}}}
        ]
        job.settle()
        assert ("Failed" in job.conditions()) == (restarts == 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"Chief": {}}, "spec.msReplicaSpecs.Chief: no such role (choose Scheduler, PS, Worker)"),
        ({"worker": {}}, "spec.msReplicaSpecs.worker.template.spec.containers: there is no list"),
        ({"Worker": None}, "there is no list of containers"),
        ({"Worker": {"template": "t"}}, "there is no list of containers"),
        ({"Worker": {"template": {"spec": {"containers": ["c"]}}}}, "there is no list"),
        ({"Worker": {"template": {"spec": {"containers": []}}}}, "no container is named mindspore"),
        ({}, "spec.msReplicaSpecs: there is no Worker"),
    ],
)
def test_what_cannot_run_fails_with_a_sentence(new_job, change, said):
    job = new_job()
    job.job["spec"]["msReplicaSpecs"] = change
    job.settle()
    assert job.conditions() == ["Failed"]
    assert said in job.job["status"]["conditions"][0]["message"]
    assert (job.objects, job.events) == ({}, ["MSJobInvalid"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "spec.msReplicaSpecs.Worker.replicas: 0 (at least 1)"),
        ({"scheduler": False, "ps": 1}, "spec.msReplicaSpecs.PS: servers need a Scheduler"),
        ({"policy": "Sometimes"}, "(choose Never, OnFailure, Always, ExitCode)"),
        ({"successPolicy": "Any"}, "spec.successPolicy: Any"),
        ({"run_policy": {"cleanPodPolicy": "Some"}}, "spec.runPolicy.cleanPodPolicy: Some"),
        ({"template": {"spec": {"containers": [{"name": "mindspore"}]}}}, "has no image"),
        (
            {"run_policy": {"schedulingPolicy": {"minAvailable": 9}}},
            "schedulingPolicy.minAvailable: 9 (choose 1 to 3, the pods it has)",
        ),
    ],
)
def test_values_that_no_job_takes(new_job, options, said):
    with pytest.raises(BadSpecError, match=said.replace("(", r"\(").replace(")", r"\)")):
        read_spec(new_job(**options).job)


def test_pods_of_others_are_left_alone(new_job):
    job = new_job().start()
    other = copy.deepcopy(job.pod("worker-0"))
    other["metadata"] |= {"name": "other", "ownerReferences": [{"uid": "x"}]}
    other["status"] = {"phase": "Failed"}
    job.objects["Pod", "other"] = other
    job.settle()
    assert job.conditions() == ["Created", "Running"]


def life(job, kill_at):
    """Run a job through a restart; at one look the operator dies after some actions."""
    looks = 0

    def settle():
        nonlocal looks
        for _ in range(30):
            looks += 1
            is_dying = looks == kill_at[0]
            if not job.look(most=kill_at[1] if is_dying else None) and not is_dying:
                break
        for name in job.pods():
            job.pod(name)["status"] = {"phase": "Running", "podIP": "10.0.0.1"}

    settle()
    settle()
    job.end("worker-1", 137, look=False)
    settle()
    settle()
    settle()
    status = job.job["status"]
    return sorted(job.objects), status["restarts"], status["phase"], status["generation"]


@pytest.mark.parametrize("look", range(1, 15))
def test_an_operator_killed_between_any_two_actions_loses_and_doubles_nothing(new_job, look):
    expected = life(new_job(policy="ExitCode"), (0, 0))
    assert expected[1:] == (1, "Running", 1)
    for actions in range(4):
        assert life(new_job(policy="ExitCode"), (look, actions)) == expected
