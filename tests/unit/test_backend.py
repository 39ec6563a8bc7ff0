"""Backends by name, also where a user's folder has the name of ours."""

import subprocess
import sys
from pathlib import Path

import pytest

import msrun
from msrun import backend
from msrun.errors import UsageError
from msrun.fleet import FleetLauncher

HOME = Path(msrun.__file__).parent.parent


def test_names_are_sorted_and_hold_the_built_in_ones():
    names = backend.names()

    assert names == sorted(names)
    assert set(backend.BUILT_IN) <= set(names)


@pytest.mark.parametrize("name", backend.BUILT_IN)
def test_every_built_in_backend_is_a_launcher(name):
    assert isinstance(backend.load(name), backend.Launcher)


@pytest.mark.parametrize("name", ["ssh", "slurm"])  # mpirun's is opened by asking a real one
def test_every_backend_of_fleets_is_one(name):
    assert isinstance(backend.open_fleet(name, {}), FleetLauncher)


def test_an_unknown_backend_is_refused_with_the_choices():
    with pytest.raises(UsageError) as refusal:
        backend.load("slrum")

    choices = ", ".join(backend.names())
    assert refusal.value.message == f"--launcher 'slrum' is not installed (choose {choices})"


LOAD = """
from msrun import backend
from msrun.errors import UsageError
try:
    backend.load("dynamic")
except UsageError as refusal:
    print(refusal.render())
"""


@pytest.mark.parametrize("files", [("__init__.py",), ("__init__.py", "dynamic.py")])
def test_a_folder_that_hides_ours_is_named(tmp_path, files):
    decoy = tmp_path / "launchers"
    decoy.mkdir()
    for name in files:
        (decoy / name).write_text("")
    script = f"import sys\nsys.path[:0] = [{str(tmp_path)!r}, {str(HOME)!r}]\n{LOAD}"
    out = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=30)

    assert out == (
        f'error: "launchers" resolves to {decoy}, which hides msrun\'s own at {HOME}/launchers\n'
        f"  hint: remove {tmp_path} from PYTHONPATH\n"
    )


def test_a_folder_that_is_no_package_hides_nothing(tmp_path):
    (tmp_path / "launchers").mkdir()
    script = f"import sys\nsys.path[:0] = [{str(tmp_path)!r}, {str(HOME)!r}]\n{LOAD}"
    out = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=30)

    assert out == ""


FOREIGN = """
from msrun import backend
from msrun.errors import UsageError
print(backend.names())
for name in ("good", "bad"):
    try:
        print(backend.load(name).plan(None, None))
    except UsageError as refusal:
        print(refusal.render())
"""


def test_a_backend_of_another_distribution_is_loaded_or_refused_with_its_error(tmp_path):
    info = tmp_path / "foreign-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[msrun.launchers]\ngood = foreign:Good\nbad = foreign_bad:Bad\n"
    )
    (tmp_path / "foreign.py").write_text(
        "class Good:\n    def plan(self, job, machine):\n        return 'planned'\n"
    )
    (tmp_path / "foreign_bad.py").write_text("import no_such_module\n")
    script = f"import sys\nsys.path[:0] = [{str(tmp_path)!r}, {str(HOME)!r}]\n{FOREIGN}"

    out = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=30)

    assert out == (
        "['bad', 'dynamic', 'good', 'kubernetes', 'mpirun', 'slurm', 'ssh']\n"
        "planned\n"
        "error: --launcher bad (foreign_bad:Bad) cannot be loaded\n"
        "  hint: ModuleNotFoundError: No module named 'no_such_module'\n"
    )
