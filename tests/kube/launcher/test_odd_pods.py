"""Pods as strict clusters want them, and images, names and files that are not as usual."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support import shell

pytest.importorskip("kubernetes")

pytestmark = [pytest.mark.process, pytest.mark.slow]
PAGE = Path(__file__).parents[3] / "docs" / "kubernetes.md"
PYTHON = ("--remote-python", sys.executable)
SAY = """
import os, pathlib
try:
    pathlib.Path("/opt/written").write_text("")
except OSError as error:
    print("root:", error.strerror)
print("user", os.getuid(), "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
print(os.environ.get("GREETING", ""))
"""


def restricted():
    """Return the patch of the page for restricted pods."""
    found = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return next(text for text in found if "runAsNonRoot" in text)


def test_a_restricted_pod_runs_the_job_and_writes_only_its_volumes(submit, tmp_path):
    (tmp_path / "patch.yaml").write_text(restricted())
    (tmp_path / "say.py").write_text(SAY)
    words = ["--nnodes", "2", "--workers-per-node", "1", "--k8s-patch", "../patch.yaml"]
    front = submit(*words, *PYTHON, "--ship", "true", "../say.py")

    assert front.wait() == 0, front.err + front.out
    assert "user 1000 rank 0 of 2" in front.out
    assert "root: Read-only file system" in front.out or "root: Permission denied" in front.out


def test_an_image_that_runs_as_root_where_root_is_forbidden_is_told(submit, tmp_path, left):
    (tmp_path / "patch.yaml").write_text(
        "spec: {template: {spec: {securityContext: {runAsNonRoot: true}}}}"
    )
    front = submit("--nnodes", "2", "--k8s-patch", "../patch.yaml", *shell("true"))
    front.until_said("container has runAsNonRoot and image will run as root")
    front.process.terminate()

    assert front.wait() == 143
    assert left() == []


def test_an_image_without_python_is_told(submit, cluster, left):
    front = submit("--job-id", "j", "--nnodes", "2", "--remote-python", "python9", "train.py")

    assert front.wait() == 128, front.err
    assert "could not start its container: failed to create containerd task" in front.err
    assert '"python9": executable file not found in $PATH' in front.err
    cluster.kubectl("delete", "job", "j")
    cluster.await_that(lambda: not left())


def test_words_of_any_language_reach_the_program(submit, tmp_path):
    """In a script whose name begins with a digit, and is long."""
    name = f"01_{'long_' * 12}name.py"
    text = "import os, sys; print(os.environ['GREETING'], *sys.argv[1:], sep='|')"
    (tmp_path / name).write_text(text)
    (tmp_path / "patch.yaml").write_text(
        "spec: {template: {spec: {containers: [{name: msrun, env: "
        "[{name: GREETING, value: 'grüße, 世界 😀 $(HOME) $$'}]}]}}}",
        encoding="utf-8",
    )
    front = submit(
        "--ship",
        "true",
        "--k8s-patch",
        "../patch.yaml",
        *PYTHON,
        f"../{name}",
        "ß $HOME",
        "",
        "$(A)",
    )

    assert front.wait() == 0, front.err
    assert "grüße, 世界 😀" in front.out
    assert "|ß $HOME||$(A)" in front.out


def test_a_namespace_that_is_not_there(submit):
    front = submit("--namespace", "nowhere", "--nnodes", "2", *shell("true"))

    assert front.wait() == 2
    assert 'namespaces "nowhere" not found' in front.err


def test_a_job_in_another_namespace(submit, cluster):
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
    front = submit("--namespace", "team", "--nnodes", "2", *shell("echo rank $RANK"))

    assert front.wait() == 0, front.err
    assert "rank 0" in front.out
