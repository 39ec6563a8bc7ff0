"""Every snippet of docs/parallel.md runs on four ranks, under the configuration above it."""

import os
import re
from pathlib import Path

import pytest
from ranks import run_warm

pytestmark = pytest.mark.torch

PAGE = Path(__file__).parents[3] / "docs" / "parallel.md"
BLOCK = re.compile(r"^```(\w+)( prelude)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets():
    """Yield the line of each snippet, its configuration and its code."""
    text = PAGE.read_text()
    prelude = config = ""
    heading = 0
    for match in BLOCK.finditer(text):
        section = text.rfind("\n## ", 0, match.start())
        if section != heading:
            heading, config = section, ""
        kind, is_prelude, code = match.groups()
        line = text.count("\n", 0, match.start()) + 2
        if kind == "yaml":
            config = code
            yield line, config, ""
        elif is_prelude:
            prelude = code
        elif kind == "python":
            yield line, config, prelude + code


def run(code, config, folder):
    path = Path(folder, "p.yaml")
    if config:
        os.environ["MSRUN_CONFIG"] = str(path)
    os.chdir(folder)
    names = {"__name__": "__main__"}
    exec(code or "import msrun\nrt = msrun.init()", names)
    return names["rt"].config.mesh


@pytest.mark.parametrize(
    ("config", "code"), [pytest.param(c, s, id=f"line {line}") for line, c, s in snippets()]
)
def test_a_snippet_runs(config, code, tmp_path):
    (tmp_path / "p.yaml").write_text(config)

    assert len(run_warm(run, 4, code, config, str(tmp_path))) == 4
