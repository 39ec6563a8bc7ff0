"""A cluster of plain data, in which decisions about one MSJob are carried out."""

from __future__ import annotations

import copy

import pytest

from launchers.operator import msjob
from launchers.operator.decision import Create, Delete, RecordEvent

START = 1_000_000.0


class Sandbox:
    """One MSJob, its objects and the time."""

    def __init__(self, spec, name="job"):
        metadata = {"name": name, "namespace": "default", "uid": "u0"}
        kind = {"apiVersion": msjob.API_VERSION, "kind": "MSJob", "metadata": metadata}
        self.job = {**kind, "spec": spec}
        self.objects = {}
        self.now = START
        self.again_in = None
        self.events = []
        self.is_deleted = False
        self.made = 0
        self.gang_scheduler = None

    def look(self, most=None):
        """Decide once, and do what was decided, or only the `most` first actions."""
        pods = [copy.deepcopy(o) for (kind, _), o in self.objects.items() if kind == "Pod"]
        decided = msjob.decide(
            copy.deepcopy(self.job), pods, self.now, gang_scheduler=self.gang_scheduler
        )
        self.again_in = decided.again_in
        is_quiet = decided.status == self.job.get("status") and not decided.actions
        self.job["status"] = copy.deepcopy(decided.status)
        for action in decided.actions[:most]:
            self._act(action)
        return not is_quiet

    def settle(self):
        """Look until nothing is left to do, at most as often as any job needs."""
        for _ in range(20):
            if not self.look():
                return self
        raise AssertionError(f"no rest: {self.job['status']}")

    def _act(self, action):
        match action:
            case RecordEvent():
                self.events.append(action.reason)
            case Create(obj):
                where = (obj["kind"], obj["metadata"]["name"])
                if where not in self.objects:
                    self.made += 1
                    obj = copy.deepcopy(obj)
                    obj["metadata"]["uid"] = f"u{self.made}"
                    self.objects[where] = obj
            case Delete(_, "MSJob"):
                self.is_deleted = True
            case Delete():
                found = self.objects.get((action.kind, action.name))
                if found and action.uid in ("", found["metadata"]["uid"]):
                    del self.objects[action.kind, action.name]

    # What the cluster does.

    def pod(self, name):
        return self.objects["Pod", f"job-{name}"]

    def run(self, *names):
        """Have pods run, all of them by default."""
        self.settle()
        for name in names or self.pods():
            self.pod(name)["status"] = {"phase": "Running", "podIP": "10.0.0.1"}
        return self.settle()

    def start(self):
        """Have all pods of the job run."""
        while True:
            before = self.pods()
            self.run()
            if self.pods() == before:
                return self

    def end(self, name, code, *, at="2026-01-01T00:00:00Z", reason="", message="", look=True):
        """Have a pod end with a code."""
        ended = {"exitCode": code, "finishedAt": at, "message": message}
        ended["reason"] = reason or ("Error" if code else "Completed")
        held = {"name": "mindspore", "state": {"terminated": ended}}
        phase = "Failed" if code else "Succeeded"
        self.pod(name)["status"] = {"phase": phase, "containerStatuses": [held]}
        return self.settle() if look else self

    def pods(self):
        return [name.removeprefix("job-") for kind, name in self.objects if kind == "Pod"]

    def conditions(self):
        """Return the conditions that hold."""
        held = self.job["status"]["conditions"]
        return [each["type"] for each in held if each["status"] == "True"]

    def environ(self, name):
        env = self.pod(name)["spec"]["containers"][0].get("env", [])
        return {each["name"]: each["value"] for each in env}


def spec(
    *, scheduler=True, policy="Never", template=None, ps=0, run_policy=None, workers=2, **more
):
    """Return the spec of an MSJob."""
    template = template or {"spec": {"containers": [{"name": "mindspore", "image": "m"}]}}
    worker = {"replicas": workers, "restartPolicy": policy, "template": template}
    roles = {"Scheduler": {"template": template}} if scheduler else {}
    if ps:
        roles["PS"] = {"replicas": ps, "template": template}
    return {"msReplicaSpecs": {**roles, "Worker": worker}, "runPolicy": run_policy or {}, **more}


@pytest.fixture
def new_job():
    """Make a sandbox with an MSJob."""

    def make(**options):
        return Sandbox(spec(**options))

    return make
