"""What a release must have, and the first job that it must run."""

from __future__ import annotations

import check_package
import pytest

GOOD = [
    "launchers/py.typed",
    "msrun/py.typed",
    "msrun/cli/main.py",
    "ranktable/py.typed",
    "msrun-0.1.0.dist-info/METADATA",
]


def test_a_wheel_of_the_three_packages_is_good():
    assert check_package.wheel_problems(GOOD, "0.1.0") == []


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["tests/conftest.py", *GOOD], "tests/ does not belong here"),
        (GOOD[1:], "launchers/py.typed is missing"),
        (["msrun/__pycache__/a.pyc", *GOOD], "msrun/__pycache__/a.pyc is no source"),
    ],
)
def test_any_other_is_not(names, problem):
    assert check_package.wheel_problems(names, "0.1.0") == [problem]


def test_a_tag_of_another_version_is_refused():
    assert "the version is not 0.2.0" in check_package.wheel_problems(GOOD, "0.2.0")


def test_the_first_job_is_the_readmes():
    readme = (check_package.ROOT / "README.md").read_text()
    assert check_package.first_job(readme)[-1] == "examples/train_digits.py"
