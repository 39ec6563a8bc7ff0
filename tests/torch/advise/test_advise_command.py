"""`msrun advise`: what it prints and writes, and how it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from msrun.cli.main import main
from msrun.parallel.config_file import read_config

pytestmark = [pytest.mark.torch, pytest.mark.own_process]

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.mean()


def make():
    return Net(), (torch.randn(16, 256),)
"""


PAGE = Path(__file__).parents[3] / "docs" / "which_strategy.md"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    return tmp_path


def advise(capsys, *words):
    code = main(["advise", "net.py:make", "--world", "4", "--topology", "cpu", *words])
    return code, *capsys.readouterr()


def test_the_first_technique_that_fits_is_recommended(capsys, here):
    code, out, _ = advise(capsys, "--memory", "64MiB")
    assert code == 0
    assert "  recommended  data parallel\n" in out
    assert "  parameters   263,168\n" in out
    code, out, _ = advise(capsys, "--memory", "4300KiB", "--json", "-o", "parallel.yaml")
    found = json.loads(out)
    assert (code, found["chosen"]) == (0, "zero 1")
    assert [row["fits"] for row in found["rows"][:2]] == [False, True]
    assert yaml.safe_load((here / "parallel.yaml").read_text()) == {"parallel": found["config"]}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--optimizer", "lion"), "--optimizer lion is not known (choose adam, momentum, sgd)"),
        (("--batch", "6"), "--batch 6 does not divide over 4 ranks"),
        (("--batch", "none"), "--batch 'none' is no number from 1 to 1048576"),
        (("--memory", "1MiB"), "no technique that advise knows fits; the smallest takes"),
        (("-o", "away/parallel.yaml"), "-o away/parallel.yaml cannot be written: No such file"),
    ],
)
@pytest.mark.few(3)
def test_a_mistake_is_one_sentence(capsys, words, sentence):
    code, _, error = advise(capsys, *words)
    assert code == 2
    assert sentence in error


def test_the_command_of_the_page_writes_a_configuration(capsys, here):
    text = PAGE.read_text()
    (here / "model.py").write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1])
    words = re.search(r"^    msrun (.*)$", text, re.MULTILINE)[1].split()
    assert main(words) == 0
    assert "  recommended  data parallel\n" in capsys.readouterr().out
    assert read_config(here / "parallel.yaml").mesh == {"dp": -1}
