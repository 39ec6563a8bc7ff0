"""The snippets of docs/how-to/python.md do what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "python.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_first_returns_the_values_in_order(said):
    lines = said(SNIPPETS[0])

    assert len(lines) == 1
    assert re.fullmatch(r"\[\(0, 0\.30*\d*\), \(1, 0\.30*\d*\)\]", lines[0])


def test_options_have_python_names(said, tmp_path):
    assert said(SNIPPETS[1]) == []
    assert (tmp_path / "logs" / "verdict.json").exists()


def test_a_failure_is_described(said, tmp_path):
    lines = said(SNIPPETS[2])

    assert re.fullmatch(r"[01] \S+ 1 ValueError: no luck \S+/worker_[01]\.log", lines[0])
    assert str(tmp_path) in lines[0]
    assert lines[1] == "Traceback (most recent call last):"


def test_a_job_runs_beside_the_program(said):
    lines = said(SNIPPETS[3])

    assert re.fullmatch(r"train-[0-9a-f]{6} (starting|forming|running|done)", lines[0])
    assert lines[1:] == ["trained", " 0"]
    assert len(SNIPPETS) == 4
