"""Every snippet of docs/servers.md runs on two ranks and two servers."""

import os
import re
from pathlib import Path

import pytest
import yaml
from ranks import run_warm
from server_jobs import serving

import msrun
from msrun.parallel.config_file import parse_config

pytestmark = pytest.mark.torch

PAGE = Path(__file__).parents[3] / "docs" / "servers.md"
BLOCK = re.compile(r"^```(\w+)( prelude)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONFIG = {"servers": {"params": ["items.weight", "users.weight"]}}


def run_all(prelude, snippets, folder):
    """Run each snippet as a script of its own."""
    os.chdir(folder)
    losses = []
    for snippet in snippets:
        names = {"__name__": "__main__"}
        msrun.init(CONFIG)
        exec(prelude + snippet, names)
        losses.append(names.get("loss"))
        names["rt"].close()
    return len(losses)


def test_snippets_run(tmp_path, monkeypatch):

    blocks = [match.groups() for match in BLOCK.finditer(PAGE.read_text())]
    [prelude] = [code for kind, is_prelude, code in blocks if is_prelude]
    snippets = [code for kind, is_prelude, code in blocks if kind == "python" and not is_prelude]
    for kind, _, code in blocks:
        if kind == "yaml":
            assert parse_config(yaml.safe_load(code)).servers.params

    with serving(tmp_path / "servers", monkeypatch, 2, 2):
        counts = run_warm(run_all, 2, prelude, snippets, tmp_path)

    assert counts == [len(snippets)] * 2
    assert len(snippets) > 2
