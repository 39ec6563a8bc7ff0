"""The reference of the documentation site says everything that the code has."""

from __future__ import annotations

import msgspec
import pytest
import reference_pages

import msrun
from msrun import environ
from msrun.cli.options.table import PLAN_TABLE
from msrun.cli.verb_table import VERBS
from msrun.errors import ExitCode
from msrun.parallel.config import Optimizer, ParallelConfig
from msrun.parallel.settings.plan_rules import PlanRule


def page_of(name):
    path = reference_pages.ROOT / "docs" / "reference" / f"{name}.md"
    return reference_pages.on_page_markdown(path.read_text())


def test_every_spelling_of_every_option_is_on_the_page():
    page = page_of("cli")
    spellings = [s for o in PLAN_TABLE for s in (*o.spellings, *o.negatives)]

    assert [s for s in spellings if f"`{s}" not in page] == []


def test_every_verb_has_its_help():
    page = page_of("cli")

    assert [verb for verb in VERBS if f"\n## msrun {verb}\n" not in page] == []
    assert "\n### msrun ranktable convert\n" in page
    assert "Usage: msrun stop [OPTIONS] [JOB]" in page


@pytest.mark.parametrize("section", [ParallelConfig, Optimizer, PlanRule])
def test_every_key_has_a_row_with_a_meaning(section):
    page = page_of("configuration")
    keys = [field.encode_name for field in msgspec.structs.fields(section)]

    assert [key for key in keys if f"\n| `{key}` | " not in page] == []
    assert "|  |" not in page


def test_a_key_says_its_choices_and_its_default():
    page = page_of("configuration")

    assert "| `op` | `mean`, `sum` | `mean` | " in page
    assert "| `microbatches` | number | required | " in page


def test_every_exit_code_has_a_meaning():
    page = page_of("exit_codes")

    assert [code for code in ExitCode if f"\n| {code.value} | `{code.name}` | " not in page] == []
    assert "`AuthenticationError`" in page


def test_every_variable_of_a_worker_has_a_meaning():
    page = page_of("environment")
    identity = environ.WorkerIdentity.__doc__

    assert "| `RANK` | Global rank. |" in page
    assert "| `MASTER_PORT` | Port of " in page
    assert set(reference_pages.arguments(identity)) == set(environ.WorkerIdentity.__struct_fields__)


def test_every_public_name_is_on_the_page():
    page = page_of("python")

    public = [name for name in msrun.__all__ if not name.startswith("__")]
    assert [name for name in public if f"\n## msrun.{name}\n\n::: msrun." not in page] == []


def test_a_bar_in_code_is_no_escaped_bar():
    html = "<td><code>N\\|auto</code></td><pre><code class='x'>a\\|b</code></pre>"

    shown = "<td><code>N|auto</code></td><pre><code class='x'>a\\|b</code></pre>"
    assert reference_pages.on_page_content(html) == shown


def test_every_decision_is_listed():
    page = reference_pages.decisions()

    names = [path.name for path in reference_pages.DECISIONS.glob("0*.md")]
    assert [name for name in names if f"]({name})" not in page] == []
