"""How a process shows to others."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

SCRIPT = """
import json, sys, psutil
from msrun.supervise import title
title.set_name("a name that is too long to be kept")
title.show_as(["python", "train.py", "--name", "x" * 5000, "\\udcff"], {"RANK": "3", "A": "b=c"})
me = psutil.Process()
print(json.dumps([me.cmdline(), me.environ(), open("/proc/self/comm").read()]))
"""


@pytest.fixture(scope="module")
def shown():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=30
    )
    return json.loads(done.stdout)


def test_the_command_line_is_the_given_one_in_full_length(shown):
    assert shown[0] == ["python", "train.py", "--name", "x" * 5000, "\udcff"]


def test_the_environment_is_the_given_one(shown):
    assert shown[1] == {"RANK": "3", "A": "b=c"}


def test_the_name_is_cut_to_what_the_kernel_keeps(shown):
    assert shown[2] == "a name that is \n"
