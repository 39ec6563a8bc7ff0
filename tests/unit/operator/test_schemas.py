"""Everything that the operator makes, and what deploys it, against Kubernetes' own schemas."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launchers.operator import msrunjob
from launchers.operator.msrunjob_objects import objects

DEPLOY = Path(__file__).parents[3] / "launchers" / "operator" / "deploy"
MINORS = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")

pytestmark = pytest.mark.slow

validator = pytest.importorskip("kubernetes_validate")


def deployed():
    """Return the objects of the manifests."""
    texts = [(DEPLOY / name).read_text() for name in ("definitions.yaml", "operator.yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text)]


@pytest.mark.parametrize("minor", MINORS)
def test_the_manifests_are_valid(minor):
    for document in deployed():
        validator.validate(document, minor, strict=True)


@pytest.mark.parametrize("minor", MINORS)
def test_objects_of_an_msjob_are_valid(new_job, minor):
    made = new_job(ps=1, policy="ExitCode").start()
    assert {kind for kind, _ in made.objects} == {"Pod", "Service", "Secret"}
    for obj in made.objects.values():
        validator.validate({k: v for k, v in obj.items() if k != "status"}, minor, strict=True)


@pytest.mark.parametrize("minor", MINORS)
def test_objects_of_an_msrunjob_are_valid(minor):
    metadata = {"name": "job", "namespace": "default", "uid": "u0"}
    spec = {
        **msrunjob.DEFAULTS,
        "image": "train:1",
        "program": ["train.py"],
        "nodes": 4,
        "minNodes": 2,
        "activeDeadlineSeconds": 60,
        "sharedMemory": "1Gi",
        "resources": {"limits": {"nvidia.com/gpu": 8}},
        "queue": "team",
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "podTemplate": {
            "metadata": {"annotations": {"a": "b"}},
            "spec": {
                "affinity": {"podAffinity": {}},
                "securityContext": {"runAsUser": 1000, "fsGroup": 1000},
                "containers": [{"name": "msrun", "securityContext": {"privileged": False}}],
            },
        },
    }
    kind = {"apiVersion": msrunjob.API_VERSION, "kind": "MsrunJob", "metadata": metadata}
    made = objects({**kind, "spec": spec})
    assert [each["kind"] for each in made] == ["Secret", "Service", "Job"]
    for obj in made:
        validator.validate(obj, minor, strict=True)


def test_the_validation_finds_a_wrong_field():
    wrong = {**deployed()[2], "spce": {}}
    with pytest.raises(validator.ValidationError):
        validator.validate(wrong, "1.37", strict=True)
