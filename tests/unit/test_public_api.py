"""The names of `import msrun`: there, and loaded only on use; tests/typing has their types."""

import subprocess
import sys

import pytest

import msrun


@pytest.mark.parametrize("name", msrun.__all__)
def test_every_public_name_is_there(name):
    assert getattr(msrun, name) is not None
    assert name in dir(msrun)


def test_another_name_is_refused_as_python_does():
    with pytest.raises(AttributeError, match="module 'msrun' has no attribute 'launchpad'"):
        _ = msrun.launchpad


def test_importing_msrun_loads_nothing_but_its_version():
    code = "import sys, msrun; print(sorted(name for name in sys.modules if 'msrun' in name))"
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert answer.stdout == "['msrun', 'msrun.version']\n"
