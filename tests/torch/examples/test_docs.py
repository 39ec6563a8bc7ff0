"""Every snippet on the runtime runs on four ranks, under the configuration above it."""

import os
import re
from pathlib import Path

import pytest
from ranks import run_warm

pytestmark = pytest.mark.torch

DOCS = Path(__file__).parents[3] / "docs"
# The first one defines what the snippets of all of them use.
PAGES = (
    "parallel.md",
    "how-to/restart_and_resume.md",
    "how-to/other_layout.md",
    "how-to/pretrained.md",
    "how-to/from_accelerate.md",
    # It has definitions of its own.
    "auto.md",
)
BLOCK = re.compile(r"^```(\w+)( \w+)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets():
    """Yield the place of each snippet, its configuration, its code, and a package it needs."""
    prelude = ""
    for page in PAGES:
        text = (DOCS / page).read_text()
        config = ""
        heading = 0
        for match in BLOCK.finditer(text):
            section = text.rfind("\n## ", 0, match.start())
            if section != heading:
                heading, config = section, ""
            kind, word, code = match.groups()
            is_prelude = word == " prelude"
            needed = "" if is_prelude else (word or "").strip()
            place = f"{page} line {text.count(chr(10), 0, match.start()) + 2}"
            if kind == "yaml":
                config = code
                yield place, config, "", needed
            elif is_prelude:
                prelude = code
            elif kind == "python":
                yield place, config, prelude + code, needed


def run(code, config, folder):
    path = Path(folder, "p.yaml")
    if config:
        os.environ["MSRUN_CONFIG"] = str(path)
    os.chdir(folder)
    names = {"__name__": "__main__"}
    exec(code or "import msrun\nrt = msrun.init()", names)
    return names["rt"].config.mesh


def params(*, needs_package):
    for place, config, *rest, needed in snippets():
        if bool(needed) is not needs_package:
            continue
        # The compiler takes half a minute, and torch warns meanwhile.
        compiling = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
        marks = compiling if "  compile:" in config else []
        words = [needed] if needed else []
        yield pytest.param(config, *rest, *words, id=place, marks=marks)


@pytest.mark.parametrize(("config", "code"), [*params(needs_package=False)])
def test_a_snippet_runs(config, code, tmp_path):
    (tmp_path / "p.yaml").write_text(config)

    assert len(run_warm(run, 4, code, config, str(tmp_path))) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("config", "code", "package"), [*params(needs_package=True)])
def test_a_snippet_runs_with_its_package(config, code, package, tmp_path):
    pytest.importorskip(package)
    (tmp_path / "p.yaml").write_text(config)

    assert len(run_warm(run, 4, code, config, str(tmp_path))) == 4
