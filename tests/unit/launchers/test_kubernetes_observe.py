"""What the objects of a job say: why pods wait, how the job ended, and which log lines are new."""

import sys

import pytest

from launchers.kubernetes.observe import End, pod_index, read_end, waiting_reasons
from launchers.kubernetes.submission import _comparable, _Seen, create_objects
from msrun.errors import UnreachableError, UsageError

INDEX = "batch.kubernetes.io/job-completion-index"


def pod(index, *, phase="Running", state=None, conditions=()):
    statuses = [{"name": "sidecar", "state": {"running": {}}}]
    statuses += [{"name": "msrun", "state": state}] if state else []
    return {
        "metadata": {"name": f"j-{index}", "labels": {INDEX: str(index)}},
        "status": {"phase": phase, "containerStatuses": statuses, "conditions": list(conditions)},
    }


def ended(index, code, at="2026-01-01T00:00:00Z", why="Error", message=""):
    end = {"exitCode": code, "finishedAt": at, "reason": why, "message": message}
    return pod(index, phase="Failed", state={"terminated": end})


def job(*conditions, parallelism=2, suspend=False):
    found = [{"type": kind, "status": "True", "reason": r, "message": m}
             for kind, r, m in conditions]  # fmt: skip
    return {
        "metadata": {"name": "j"},
        "spec": {"parallelism": parallelism, "suspend": suspend},
        "status": {"conditions": found},
    }


FAILED = ("Failed", "PodFailurePolicy", "exit code 7")
LIMIT = ("Failed", "MaxFailedIndexesExceeded", "too many")
TIME = ("Failed", "DeadlineExceeded", "Job was active longer than specified deadline")


@pytest.mark.parametrize(
    ("it", "pods", "end"),
    [
        (job(), [pod(0)], None),
        (job(("FailureTarget", "PodFailurePolicy", "")), [ended(0, 7)], None),
        (job(("Complete", "", "")), [], End(code=0)),
        (job(("Completed", "AllJobsCompleted", "")), [], End(code=0)),  # a JobSet
        (job(FAILED), [ended(0, 7), ended(1, 7)], End(code=7)),
        (
            job(FAILED),
            [ended(0, 128, why="StartError", message='exec: "python": not found'), ended(1, 143)],
            End(code=128, reason='pod j-0 could not start its container: exec: "python": not found '
                "(the image needs Python with msrun)"),
        ),
        # Kubernetes ends the other pods of a job that failed.
        (job(FAILED), [ended(0, 143, "2026-01-01T00:00:00Z"), ended(1, 7)], End(code=7)),
        (job(FAILED), [ended(0, 9, "2026-01-01T00:00:09Z"), ended(1, 7)], End(code=7)),
        (
            job(TIME),
            [ended(0, 143)],
            End(code=143, reason="Kubernetes ended the job: DeadlineExceeded: Job was active "
                "longer than specified deadline"),
        ),
        (
            job(LIMIT),
            [ended(0, 120), ended(1, 137, "2026-01-01T00:00:05Z", "OOMKilled")],
            End(code=137, reason="the container of pod j-1 was killed: out of memory "
                "(its limit is in --resources)"),
        ),
        (
            job(LIMIT),
            [ended(1, 120, "2026-01-01T00:00:09Z"), ended(0, 137)],
            End(code=120, reason="pod j-0 was lost (exit code 137): MaxFailedIndexesExceeded: "
                "too many"),
        ),
        (  # a worker was killed, and no restart was left
            job(LIMIT),
            [ended(0, 143), ended(1, 137, message="exit code 137: rank 1 was killed by SIGKILL")],
            End(code=137),
        ),
        (
            job(LIMIT),
            [],
            End(code=120, reason="the job failed, and no pod is left that says how: "
                "MaxFailedIndexesExceeded: too many"),
        ),
    ],
)  # fmt: skip
def test_how_a_job_ended(it, pods, end):
    assert read_end(it, pods) == end


def unscheduled(index, text="0/3 nodes are available"):
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                 "message": text}  # fmt: skip
    return pod(index, phase="Pending", conditions=[condition])


def waiting(index, reason):
    return pod(index, phase="Pending", state={"waiting": {"reason": reason, "message": "a\n b"}})


def warning(name, reason):
    return {"involvedObject": {"name": name}, "reason": reason, "message": "exceeded quota: q"}


@pytest.mark.parametrize(
    ("it", "pods", "events", "lines"),
    [
        (job(), [pod(0), pod(1)], [warning("j-0", "FailedMount")], []),
        (job(), [waiting(0, "ContainerCreating"), pod(1, state={"running": {}})], [], []),
        (
            job(suspend=True),
            [],
            [],
            ["the job is suspended: a queue, or kubectl, has to start it"],
        ),
        (
            job(),
            [unscheduled(0), unscheduled(1)],
            [],
            ["2 pods (j-0, j-1) wait: Unschedulable: 0/3 nodes are available"],
        ),
        (
            job(parallelism=5),
            [unscheduled(n) for n in range(5)],
            [],
            ["5 pods (j-0, j-1, j-2, ...) wait: Unschedulable: 0/3 nodes are available"],
        ),
        (job(), [waiting(0, "ErrImagePull"), pod(1)], [], ["pod j-0 waits: ErrImagePull: a b"]),
        (
            job(),
            [],
            [warning("j", "FailedCreate"), warning("other", "FailedCreate")],
            ["j: FailedCreate: exceeded quota: q"],
        ),
        (
            job(),
            [waiting(0, "ContainerCreating"), pod(1)],
            [warning("j-0", "FailedMount"), warning("j-0", "BackOff")],
            ["j-0: FailedMount: exceeded quota: q"],
        ),
    ],
)
def test_why_pods_wait(it, pods, events, lines):
    running = [p if p["status"]["phase"] != "Running" else pod(1, state={"running": {}})
               for p in pods]  # fmt: skip
    assert waiting_reasons(it, running, events) == lines


def test_a_pod_without_an_index():
    assert pod_index({"metadata": {"name": "p"}}) == -1


def test_lines_that_were_there_are_known_after_a_broken_connection():
    times = [b"2026-01-01T00:00:00.9Z", b"2026-01-01T00:00:01Z", b"2026-01-01T00:00:01.1Z"]
    times += [b"2026-01-01T00:00:01.12Z", b"2026-01-01T00:00:01.12Z"]
    seen = _Seen(_comparable(b"2026-01-01T00:00:01.12Z"), 1)

    assert [seen.has(_comparable(at)) for at in times] == [True, True, True, True, False]


class FakeCluster:
    """Keeps what is created, and refuses one kind."""

    namespace = "team"

    def __init__(self, refused=""):
        self.refused, self.made, self.deleted, self.patched = refused, [], [], []

    def create(self, manifest):
        if manifest["kind"] == self.refused:
            raise UnreachableError("gone")
        self.made.append(manifest)
        return {**manifest, "metadata": {**manifest["metadata"], "uid": "u"}}

    def patch(self, kind, name, changes):
        self.patched.append((kind, name, changes))

    def delete(self, kind, name):
        self.deleted.append((kind, name))


def manifests(**spec):
    kinds = {"Service": {}, "Job": spec, "Secret": {}}
    return [
        {"apiVersion": "v1", "kind": kind, "metadata": {"name": "j"}, "spec": each}
        for kind, each in kinds.items()
    ]


def test_the_job_is_first_and_owns_the_rest_and_then_goes_on():
    cluster = FakeCluster()
    create_objects(cluster, manifests())

    owners = [each["metadata"].get("ownerReferences") for each in cluster.made]
    owner = {"apiVersion": "v1", "kind": "Job", "name": "j", "uid": "u"}
    assert [each["kind"] for each in cluster.made] == ["Job", "Service", "Secret"]
    assert owners == [None, [owner], [owner]]
    assert cluster.made[0]["spec"] == {"suspend": True}
    assert cluster.patched == [("Job", "j", {"spec": {"suspend": False}})]


def test_a_job_that_is_to_be_suspended_stays_so():
    cluster = FakeCluster()
    create_objects(cluster, manifests(suspend=True))

    assert cluster.patched == []


def test_nothing_is_left_of_a_job_whose_secret_cannot_be_made():
    cluster = FakeCluster("Secret")

    with pytest.raises(UnreachableError):
        create_objects(cluster, manifests())
    assert cluster.deleted == [("Job", "j")]


def test_without_the_client_one_sentence_names_the_extra(monkeypatch):
    from launchers.kubernetes.api import open_cluster

    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(UsageError) as refusal:
        open_cluster()

    assert refusal.value.message.startswith("--launcher kubernetes needs the Python package")
    assert 'pip install "msrun[kubernetes]"' in refusal.value.hint


CONFIG = """
apiVersion: v1
kind: Config
current-context: a
contexts: [{name: a, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "http://localhost:1"}}]
users: [{name: u, user: {}}]
"""


@pytest.mark.parametrize(
    ("text", "context", "beginning"),
    [
        ("", "", "there is no cluster: "),
        ("a: [", "", "there is no cluster: "),
        (CONFIG, "b", "--context b is not in the kubeconfig (choose a)"),
        (CONFIG.replace("cluster: c,", "cluster: d,"), "", "there is no cluster: Invalid kube-"),
    ],
)
def test_kubeconfigs_that_are_refused(tmp_path, monkeypatch, text, context, beginning):
    kube_config = pytest.importorskip("kubernetes").config.kube_config
    from launchers.kubernetes.api import open_cluster

    (tmp_path / "config").write_text(text)
    # The client reads the variable when it is imported.
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    with pytest.raises(UsageError) as refusal:
        open_cluster(context=context)

    assert refusal.value.message.startswith(beginning)
