"""The objects that the Kubernetes backend renders: byte for byte, and valid for every minor."""

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from launchers.kubernetes import KubernetesLauncher, open_launcher
from launchers.kubernetes.manifests import SECRET_KEY, secret_manifest
from launchers.kubernetes.yaml_text import render_yaml
from msrun.errors import UsageError
from msrun.fleet import Fleet

GOLDEN = Path(__file__).parents[2] / "golden" / "kubernetes"
SCRIPT = "print('tab\there')\nprint(1e3)\n"
PATCH = """
spec:
  template:
    spec:
      schedulerName: volcano
      containers:
        - name: msrun
          env:
            - {name: NCCL_DEBUG, value: INFO}
          ports: null
        - {name: sidecar, image: "log:1"}
---
kind: Service
metadata:
  annotations: {who: me}
"""
FILES = {"patch.yaml": PATCH, "train.py": SCRIPT, "plan.yaml": "mesh: {dp: 4}\n"}
EVERYTHING = {
    "image": "registry/train:1",
    "namespace": "team",
    "k8s-queue": "gpus",
    "time": "1h30m",
    "ttl": "1h",
    "resources": "nvidia.com/gpu=8,cpu=32,memory=256Gi",
    "shm": "64Gi",
    "workdir": "/train",
    "node-selector": "gpu=a100,pool=train",
    "tolerations": "nvidia.com/gpu,dedicated=train:NoSchedule",
    "topology-spread": "topology.kubernetes.io/zone,rack:required",
    "priority-class": "high",
    "service-account": "trainer",
    "image-pull-secrets": "registry",
    "volumes": "pvc:data:/data:ro,host:/nvme:/scratch,empty::/tmp/x,empty:1Gi:/y,secret:s:/s,"
    "configmap:c:/c",
}
# Name of the golden file -> options, changes of the fleet.
PLANS = {
    "plain": ({"image": "registry/train:1"}, {}),
    "one_node": ({"image": "registry/train:1"}, {"nnodes": 1}),
    "everything": (EVERYTHING, {}),
    "elastic": (
        {"image": "t"},
        {"nnodes": 8, "words": ("--nnodes=2:8", "--max-restarts=3", "t.py")},
    ),
    "gang": (
        {"image": "t", "k8s-gang": "volcano"},
        {"nnodes": 8, "words": ("--nnodes=2:8", "t.py")},
    ),
    "coscheduling": ({"image": "t", "k8s-gang": "scheduler-plugins"}, {}),
    "jobset": ({**EVERYTHING, "k8s-kind": "jobset"}, {}),
    "npu": ({"image": "t", "resources": "huawei.com/Ascend910=8", "shm": "off", "ttl": "off"}, {}),
    "shipped": (
        {"image": "t", "ship": "true"},
        {
            "words": (
                "--parallel=plan.yaml",
                "--grace=1m",
                "train.py",
                "a$b",
                "$(HOME)",
                "1e3",
                "on",
            )
        },
    ),
    "patched": ({"image": "t", "k8s-patch": "patch.yaml"}, {}),
}


def read(path, _name):
    return FILES[path].encode()


def plan_of(fleet, texts, **changes):
    launcher = KubernetesLauncher(open_launcher(texts)._options, read=read)
    return launcher.plan(replace(fleet, **{"python": "", **changes}))


def objects(plan):
    return {name: yaml.safe_load(text) for name, text in plan.files.items()}


@pytest.mark.parametrize("name", PLANS)
def test_the_objects_are_those_of_the_golden_file(fleet, name):
    texts, changes = PLANS[name]
    text = "---\n".join(plan_of(fleet, texts, **changes).files.values())
    golden = GOLDEN / f"{name}.yaml"

    if os.environ.get("REWRITE"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


def test_every_golden_file_has_objects():
    assert sorted(path.stem for path in GOLDEN.glob("*")) == sorted(PLANS)


@pytest.mark.parametrize("name", PLANS)
def test_no_object_has_a_key(fleet, name):
    texts, changes = PLANS[name]
    plan = plan_of(fleet, texts, **changes)

    assert "kind: Secret" not in str(plan.files)
    assert all("secret.yaml" not in file for file in plan.files)


WORDS = ("3e-4", "1_000", "0o7", "0x1F", "1:30", "on", "No", "null", "~", "", "=", "<<", ".inf",
         "-", "- a", "a: b", "a #b", "{}", "[", "*x", "&x", "!x", "%x", "@x", "`x", "'", '"', "é",
         " a", "a ", "a\nb", "a\tb\n", "a\n\n", "\n", "a \nb", "y", "1.0", "a:b", "nan",
         "\x07", "😀")  # fmt: skip


def test_every_text_stays_that_text():
    document = {"args": list(WORDS), **{f"k{n}": word for n, word in enumerate(WORDS)}}

    assert yaml.safe_load(render_yaml(document)) == document


@pytest.mark.parametrize("word", WORDS)
def test_a_text_stands_bare_only_where_no_yaml_reads_another_value(word):
    bare = render_yaml({"k": word}).removeprefix("k: ").rstrip("\n")

    if bare[0] not in "\"|'":
        assert bare.isascii()
        assert bare[0].isalpha() or bare[0] in "/_"
        assert bare.lower() not in ("y", "n", "yes", "no", "on", "off", "true", "false", "null")


def expanded(text):
    """Return what a container gets for a word, as Kubernetes' own `expansion.Expand` does it."""
    data, out = text.encode(), b""
    while data:
        head, rest = data[:1], data[1:]
        if head != b"$" or not rest:
            out, data = out + head, rest
        elif rest[:1] == b"$":
            out, data = out + b"$", rest[1:]
        elif rest[:1] == b"(" and b")" in rest:
            out, data = out + b"<a variable>", rest.partition(b")")[2]
        else:  # Go makes a character of the byte, whatever it is a part of.
            out, data = out + b"$" + chr(rest[0]).encode(), rest[1:]
    return out.decode()


@given(st.text(alphabet="$()aé\n ", max_size=8))
@example("$(HOME)")
@example("$$")
@example("$é")
def test_the_words_of_the_program_are_not_expanded_by_kubernetes(word):
    fleet = Fleet(job_id="t", words=("t.py", word), nnodes=1, python="", cwd="/")
    job = objects(plan_of(fleet, {"image": "t"}))["job.yaml"]

    container = job["spec"]["template"]["spec"]["containers"][0]
    assert [expanded(each) for each in container["args"]] == ["t.py", word]


def test_a_secret_has_the_key_alone():
    secret = secret_manifest("train", "team", "AAAA")

    assert (secret["data"], secret["immutable"]) == ({SECRET_KEY: "AAAA"}, True)
    assert secret["metadata"]["name"] == "train-key"


REFUSED = [
    ({}, "--launcher kubernetes needs the image of its pods"),
    ({"image": "a b"}, "--image 'a b' has a space or a control character"),
    ({"image": "t", "partition": "p"}, "--launcher kubernetes has no option --partition (choose "),
    ({"image": "t", "resources": "gpu"}, "--resources 'gpu' is no NAME=VALUE"),
    ({"image": "t", "resources": "gpu=x"}, "--resources 'x' is no quantity (choose such as 8, "),
    ({"image": "t", "resources": "a=1,a=2"}, "--resources 'a=1,a=2' names a twice"),
    ({"image": "t", "gpus-per-node": "a100:8"}, "--gpus-per-node 'a100:8' is no number, as nvidia"),
    ({"image": "t", "gpus-per-node": "8", "resources": "nvidia.com/gpu=4"},
     "--gpus-per-node 8 contradicts --resources nvidia.com/gpu=4"),
    ({"image": "t", "shm": "big"}, "--shm 'big' is no quantity"),
    ({"image": "t", "volumes": "data:/data"}, "--volumes 'data:/data' is no volume (choose "),
    ({"image": "t", "volumes": "pvc:data:data"}, "--volumes 'data' is no absolute path"),
    ({"image": "t", "volumes": "pvc:D:/data"}, "--volumes 'D' is no name of a volume's source"),
    ({"image": "t", "tolerations": "a=b:Never"}, "--tolerations 'a=b:Never' is no toleration"),
    ({"image": "t", "topology-spread": "zone:hard"}, "--topology-spread 'zone:hard' is no "),
    ({"image": "t", "node-selector": "a=b c"}, "--node-selector 'b c' is no value of a label"),
    ({"image": "t", "k8s-kind": "pod"}, "--k8s-kind 'pod' is unknown (choose job or jobset)"),
    ({"image": "t", "namespace": "A"}, "--namespace 'A' is no name of a namespace in Kubernetes"),
    ({"image": "t", "time": "0"}, "--time '0' is less than a second"),
    ({"image": "t", "ttl": "soon"}, "--ttl 'soon' is no duration"),
    ({"image": "t", "ship": "yes!"}, "--ship 'yes!' is neither true nor false"),
]  # fmt: skip


@pytest.mark.parametrize(("texts", "beginning"), REFUSED)
def test_options_that_are_refused(texts, beginning):
    with pytest.raises(UsageError) as refusal:
        open_launcher(texts)

    assert refusal.value.message.startswith(beginning)


def patched(patch):
    return {"image": "t", "k8s-patch": patch}


@pytest.mark.parametrize(
    ("texts", "changes", "beginning"),
    [
        ({}, {"master_addr": "node0"}, "--master-addr node0 has no place in --launcher kubernetes"),
        ({}, {"job_id": "--"}, "--job-id '--' cannot be the name of a Job in Kubernetes"),
        ({}, {"job_id": "x" * 41}, "--job-id 'xxxx"),
        (
            {"ship": "true"},
            {"words": ("--module=true", "pkg.main")},
            "--ship true sends the script, ",
        ),
        ({"ship": "true"}, {"words": ("--no-python=true", "sh")}, "--ship true sends the script, "),
        (
            {"ship": "true"},
            {"words": ("--parallel=x/train.py", "train.py")},
            "--ship: two files are ",
        ),
        ({"ship": "true"}, {"words": ("my train.py",)}, "--ship: 'my train.py' cannot be the name"),
        ({"ship": "true"}, {"words": ("zug_ü.py",)}, "--ship: 'zug_ü.py' cannot be the name of a"),
        (
            {"ship": "true"},
            {"words": ("large.py",)},
            "--ship: the files have 921601 bytes (at most",
        ),
        ({"k8s-patch": "a"}, {}, "--k8s-patch a is no YAML: "),
        ({"k8s-patch": "b"}, {}, "--k8s-patch b has a 'Secret' (choose Service, Job)"),
        ({"k8s-patch": "c"}, {}, "--k8s-patch c sets metadata.name of the Job to 'other', and"),
        ({"k8s-patch": "d"}, {}, "--k8s-patch d holds '7', which is no mapping"),
        ({"k8s-patch": "e"}, {}, "the patch has name 'A' twice in one list"),
    ],
)
def test_fleets_that_are_refused(fleet, monkeypatch, texts, changes, beginning):
    env = "[{name: A, value: x}, {name: A, value: y}]"
    more = {
        "a": "{", "b": "kind: Secret", "c": "metadata: {name: other}", "d": "7",
        "e": f"spec: {{template: {{spec: {{containers: [{{name: msrun, env: {env}}}]}}}}}}",
        "x/train.py": "", "my train.py": "", "zug_ü.py": "", "large.py": "x" * 921_601,
    }  # fmt: skip
    for name, text in more.items():
        monkeypatch.setitem(FILES, name, text)

    with pytest.raises(UsageError) as refusal:
        plan_of(fleet, {"image": "t", **texts}, **changes)

    assert refusal.value.message.startswith(beginning)


def test_a_file_whose_name_begins_with_a_dot_is_shipped(fleet, monkeypatch):
    monkeypatch.setitem(FILES, ".plan.yaml", "mesh: {dp: 2}")
    words = ("--parallel=.plan.yaml", "train.py")
    found = objects(plan_of(fleet, {"image": "t", "ship": "true"}, words=words))

    assert any(".plan.yaml" in (each.get("data") or {}) for each in found.values())


def test_names_that_begin_with_a_digit_or_have_dots(fleet):
    def name(job_id):
        return objects(plan_of(fleet, {"image": "t"}, job_id=job_id))["job.yaml"]["metadata"][
            "name"
        ]

    assert name("01_train.v2-4be1c7") == "job-01-train-v2-4be1c7"
    assert name("Größe.A") == "gr-e-a"


MINORS = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")


@pytest.mark.slow
@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize("name", PLANS)
def test_every_object_is_valid_for_every_supported_minor(fleet, name, minor):
    validator = pytest.importorskip("kubernetes_validate")
    texts, changes = PLANS[name]
    found = list(objects(plan_of(fleet, texts, **changes)).values())
    found.append(secret_manifest("train", "team", "AAAA"))

    for manifest in found:
        if manifest["kind"] == "PodGroup":  # of schedulers that come from elsewhere
            continue
        if manifest["kind"] == "JobSet":  # no object of Kubernetes itself, but its Job is
            template = manifest["spec"]["replicatedJobs"][0]["template"]
            manifest = {"apiVersion": "batch/v1", "kind": "Job", **template}  # noqa: PLW2901
        validator.validate(manifest, minor, strict=True)


@pytest.mark.slow
def test_the_validation_finds_a_wrong_field(fleet):
    validator = pytest.importorskip("kubernetes_validate")
    job = objects(plan_of(fleet, {"image": "t"}))["job.yaml"]
    job["spec"]["completion"] = 2

    with pytest.raises(validator.ValidationError):
        validator.validate(job, "1.37", strict=True)
