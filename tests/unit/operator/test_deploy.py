"""The files that deploy the operator, and the command that is the operator."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from launchers.operator import msjob, msrunjob

DEPLOY = Path(__file__).parents[3] / "launchers" / "operator" / "deploy"


def documents(name):
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def definition(kind):
    return next(d for d in documents("definitions.yaml") if d["spec"]["names"]["kind"] == kind)


def spec_schema(kind):
    schema = definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema["properties"]["spec"]["properties"]


@pytest.mark.parametrize(
    ("kind", "api_version"), [("MSJob", msjob.API_VERSION), ("MsrunJob", msrunjob.API_VERSION)]
)
def test_definitions_are_of_the_versions_that_the_operator_watches(kind, api_version):
    made = definition(kind)
    version = made["spec"]["versions"][0]
    assert f"{made['spec']['group']}/{version['name']}" == api_version
    assert version["subresources"] == {"status": {}}
    names = made["spec"]["names"]
    assert made["metadata"]["name"] == f"{names['plural']}.{made['spec']['group']}"


def test_the_defaults_of_the_schema_are_those_of_the_code():
    given = {
        name: each["default"] for name, each in spec_schema("MsrunJob").items() if "default" in each
    }
    assert given == msrunjob.DEFAULTS


def test_every_field_says_what_it_is():
    bare = [name for name, each in spec_schema("MsrunJob").items() if not each.get("description")]
    assert bare == []


def test_the_account_may_read_no_secret_and_nothing_of_all_kinds():
    role = next(d for d in documents("operator.yaml") if d["kind"] == "ClusterRole")
    for rule in role["rules"]:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        if "secrets" in rule["resources"]:
            assert rule["verbs"] == ["create"]


def test_the_deployment_fits_its_account_and_its_image():
    made = {d["kind"]: d for d in documents("operator.yaml")}
    pod = made["Deployment"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == made["ServiceAccount"]["metadata"]["name"]
    (container,) = pod["containers"]
    port = container["ports"][0]["containerPort"]
    assert container["args"] == ["run", f"--liveness=http://0.0.0.0:{port}/healthz"]
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["python", "-m", "msrun", "operator"]' in dockerfile
    assert f"-t {container['image']}" in dockerfile
    assert f"USER {pod['securityContext']['runAsUser']}" in dockerfile


def test_the_image_has_what_the_package_needs_but_torch():
    text = (DEPLOY.parents[2] / "pyproject.toml").read_text()
    needed = text.partition("dependencies = [")[2].partition("]")[0]
    names = set(re.findall(r'^  "([a-z]+)', needed, re.MULTILINE)) - {"torch", "numpy"}
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert names | {"kopf", "kubernetes"} == set(re.findall(r'"([a-z]+)>=', dockerfile))


def test_without_the_extra_the_error_names_it(msrun_operator, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    code, err = msrun_operator("run")
    assert code == 2
    assert "msrun operator needs kopf and kubernetes" in err
    assert "pip install 'msrun[kubernetes]'" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [(["walk"], "msrun operator has no verb 'walk' (choose run, manifests)"), ([], "Usage:")],
)
def test_verbs(msrun_operator, words, said):
    code, err = msrun_operator(*words)
    assert (code, said in err) == (2, True), err


@pytest.fixture
def msrun_operator(capsys):
    """Call the verb; returns the code and what stands on standard error."""
    from msrun.cli.main import main

    def call(*words):
        code = main(["operator", *words])
        return code, capsys.readouterr().err

    return call
