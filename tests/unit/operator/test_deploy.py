"""The files that deploy the operator, and the command that is the operator."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

from launchers.operator import msjob, msrunjob

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "launchers" / "operator" / "deploy"


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
    roles = [d for d in documents("operator.yaml") if d["kind"] in ("ClusterRole", "Role")]
    assert len(roles) == 2
    for rule in (rule for role in roles for rule in role["rules"]):
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        if "secrets" in rule["resources"]:
            assert rule["verbs"] == ["create"]


def test_the_deployment_fits_its_account_and_its_image():
    made = {d["kind"]: d for d in documents("operator.yaml")}
    pod = made["Deployment"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == made["ServiceAccount"]["metadata"]["name"]
    (container,) = pod["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert container["args"] == [
        "run",
        "--leader-elect",
        f"--metrics-bind-address=:{ports['metrics']}",
        f"--health-probe-bind-address=:{ports['health']}",
    ]
    probes = {container[each]["httpGet"]["port"] for each in ("livenessProbe", "readinessProbe")}
    assert probes == {"health"}
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
    # In the versions of the package and of its extra.
    asked = set(re.findall(r'"([a-z]+>=[0-9.]+)', dockerfile))
    assert asked - set(re.findall(r'"([a-z]+>=[0-9.]+)', text)) == set()


def instructions(path):
    """Return the instructions of a Dockerfile, each with its text on one line."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


@pytest.mark.parametrize("path", [DEPLOY / "Dockerfile", ROOT / "examples/kubernetes/Dockerfile"])
def test_an_image_is_built_of_what_there_is(path):
    found = instructions(path)
    words = [word for word, _ in found]
    assert set(words) <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"}
    assert words.index("FROM") <= 1
    args = dict(text.split("=", 1) for word, text in found if word == "ARG")
    base = next(text for word, text in found if word == "FROM")
    base = base.replace("${BASE}", args.get("BASE", ""))
    assert re.fullmatch(r"[a-z/]+:[0-9][a-z0-9.-]+", base)
    copied = [name for word, text in found if word == "COPY" for name in text.split()[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    needed = ["pyproject.toml", "README.md", "LICENSE", "msrun", "launchers", "ranktable"]
    assert copied[: len(needed)] == needed
    for word, text in found:
        if word == "RUN":
            assert text.count("pip install") == text.count("pip install --no-cache-dir")
        if word in ("ENTRYPOINT", "CMD"):  # as a list, so that no shell takes the signals
            assert all(isinstance(each, str) for each in json.loads(text))


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--metrics-bind-address", "8080"], "is no address (choose :8080, HOST:PORT or 0)"),
        (["--gang-scheduler-name", "kueue"], "is unknown (choose volcano or scheduler-plugins)"),
        (["--leader-elect-lease-duration", "0s"], "is out of range (choose 1s to 3600s)"),
        (["--leader-elect-lease-duration", "soon"], "--leader-elect-lease-duration"),
    ],
)
def test_values_that_no_operator_takes(msrun_operator, words, said):
    pytest.importorskip("kopf")
    code, err = msrun_operator("run", *words)
    assert (code, said in err) == (2, True), err
