"""Every command of docs/kubernetes.md can be planned, and its options are those there are."""

import re
from pathlib import Path

import pytest
import yaml

from launchers.kubernetes.options import read_options
from launchers.kubernetes.patch import apply_patches, read_patches
from msrun.environ import Pod

PAGE = (Path(__file__).parents[3] / "docs/kubernetes.md").read_text()
WORDS = re.findall(r"^    msrun (.*)$", PAGE, re.MULTILINE)
COMMANDS = [words for words in WORDS if words.startswith(("plan", "--"))]
VERBS = [words for words in WORDS if words not in COMMANDS]
OPTIONS = re.findall(r"`(--[a-z0-9-]+) ([a-zA-Z0-9.:/=,-]+)`", PAGE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_planned(msrun, here, command):
    (here / "train.py").write_text("")

    assert msrun(command if command.startswith("plan") else f"plan {command}").code == 0


@pytest.mark.parametrize("words", VERBS)
def test_a_verb_is_understood(msrun, system, words):
    assert msrun(words).code == 7
    assert system.elsewhere[0][:2] == ("kubernetes", words.partition(" ")[0])


@pytest.mark.parametrize(("flag", "text"), OPTIONS)
def test_an_option_takes_its_example(flag, text):
    name = flag.removeprefix("--")
    if name not in (
        "nnodes",
        "max-restarts",
        "grace",
        "join-timeout",
        "workdir",
        "k8s-patch",
        "parallel",
    ):
        example = "zone" if text.isupper() else text
        read_options({"image": "t", name: example.lower() if text.isupper() else example})


def test_the_patch_of_the_page_can_be_merged():
    _, patch, restricted = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    container = {"name": "msrun", "env": [{"name": "A", "value": "1"}]}
    job = {"kind": "Job", "spec": {"template": {"spec": {"containers": [container]}}}}

    merged, service = apply_patches([job, {"kind": "Service"}], read_patches(patch, "p"), "p")

    names = [each["name"] for each in merged["spec"]["template"]["spec"]["containers"][0]["env"]]
    assert names == ["A", "NCCL_DEBUG"]
    assert yaml.safe_dump(service["metadata"]) == "annotations:\n  owner: vision\n"
    assert apply_patches([job], read_patches(restricted, "p"), "p") != [job]


def test_the_page_has_every_variable():
    assert [name for name in Pod if f"`{name}`" not in PAGE] == []
