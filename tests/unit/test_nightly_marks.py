"""Tests that need a library of the extra `nightly` are `slow`, or they run nowhere.

CI does not install them and skips what needs them, but for transformers, of which it trains a few
models; the nightly workflow does, and runs the tests that are marked `slow`.
"""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Of distributions whose module has another name.
MODULES = {"pillow": "PIL"}


def nightly_modules():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [line.partition(">=")[0] for line in project["optional-dependencies"]["nightly"]]
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


def needs_nightly(node, modules):
    """Return whether a call skips where a library is missing that may be one of `modules`."""
    if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("importorskip")):
        return False
    name = node.args[0]
    if isinstance(name, ast.Constant):
        return name.value.partition(".")[0] in modules
    return True  # a name that the test decides


def is_slow(nodes):
    return any("mark.slow" in ast.unparse(node) for node in nodes)


def unmarked(text, modules):
    """Return the tests of a file that need one of `modules` and are not `slow`."""
    if "importorskip" not in text:
        return []
    body = ast.parse(text).body
    marks = [node for node in body if isinstance(node, ast.Assign)]
    if is_slow(node for node in marks if ast.unparse(node.targets[0]) == "pytestmark"):
        return []
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    outside = [node for node in body if node not in functions.values()]
    if any(needs_nightly(each, modules) for node in outside for each in ast.walk(node)):
        return [name for name, node in functions.items() if not is_slow(node.decorator_list)]
    calls = {
        name: {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        for name, node in functions.items()
    }
    found = {
        name
        for name, node in functions.items()
        if any(needs_nightly(each, modules) for each in ast.walk(node))
    }
    while more := {name for name, names in calls.items() if names & found} - found:
        found |= more
    tests = sorted(name for name in found if name.startswith("test_"))
    return [name for name in tests if not is_slow(functions[name].decorator_list)]


def test_tests_that_need_a_nightly_library_are_slow():
    modules = nightly_modules()
    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if (names := unmarked(path.read_text(), modules))
    }

    assert found == {}


SKIPPING = 'pytest.importorskip("timm.optim")'


def test_a_test_that_is_not_marked_is_found_through_what_it_calls():
    text = f"def train():\n    {SKIPPING}\n\ndef test_it():\n    train()\n"

    assert unmarked(text, {"timm"}) == ["test_it"]
    assert unmarked(text, {"peft"}) == []
    assert unmarked(text.replace("def test", "@pytest.mark.slow\ndef test"), {"timm"}) == []
    assert unmarked(f"pytestmark = [pytest.mark.slow]\n{text}", {"timm"}) == []
    assert unmarked(f"{SKIPPING}\ndef test_it(): ...\n", {"timm"}) == ["test_it"]
