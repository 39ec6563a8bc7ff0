"""Scripts, modules, folders and archives are found and named as under `python`."""

import subprocess
import sys
import textwrap
import zipfile

import pytest
from plain_python import OURS, end, run_both, start, write

pytestmark = pytest.mark.process

REPORT = """\
    import sys
    print(__name__, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__)
    print(sys.argv, sys.path, sys.orig_argv[1:])
    """


@pytest.mark.parametrize("path", ["x.py", "./x.py", "a/../x.py", "a//../a/./../x.py", "link.py"])
def test_the_path_of_a_script_is_kept_as_it_was_given(tmp_path, path):
    (tmp_path / "a").mkdir()
    write(tmp_path, "x.py", REPORT)
    (tmp_path / "link.py").symlink_to("a/../x.py")
    plain, ours = run_both(tmp_path, path)

    assert ours == plain


def test_an_absolute_path_is_kept_too(tmp_path):
    path = write(tmp_path, "x.py", REPORT)
    plain, ours = run_both("/", f"{path.parent}//./{path.name}")

    assert ours == plain


def test_a_link_takes_its_modules_from_where_it_points(tmp_path):
    write(tmp_path, "real/x.py", "import beside")
    write(tmp_path, "real/beside.py", "print('beside')")
    (tmp_path / "x.py").symlink_to("real/x.py")

    assert end(start([*OURS, "script", "x.py"], tmp_path)) == (0, "beside\n", "")


def test_endless_recursion_is_an_error_and_no_crash(tmp_path):
    write(tmp_path, "x.py", "def f(n):\n    return f(n + 1)\n\n\nf(0)\n")
    plain, ours = run_both(tmp_path, "x.py")

    assert ours[:2] == plain[:2] == (1, "")
    assert ours[2].splitlines()[-1] == plain[2].splitlines()[-1]


def test_a_module_with_relative_imports(tmp_path):
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/beside.py", "name = 'beside'")
    write(tmp_path, "package/x.py", "from . import beside\nprint(beside.name)\n" + "import sys\n")
    write(tmp_path, "package/report.py", REPORT)

    for arguments in (("package.x",), ("package.report", "--flag", "a b")):
        plain, ours = run_both(tmp_path, "-m", *arguments)
        assert ours == plain
        assert ours[0] == 0


MODULES = {
    "a package": "package",
    "a package without main": "bare",
    "no such module": "nothing",
    "no such submodule": "package.nothing",
    "an exception": "package.fails",
    "a name of a file": "package/fails.py",
}


@pytest.mark.parametrize("name", MODULES.values(), ids=MODULES)
def test_modules_end_as_under_python(tmp_path, name):
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/__main__.py", REPORT)
    write(tmp_path, "package/fails.py", "def f():\n    raise ValueError('x')\n\nf()\n")
    write(tmp_path, "bare/__init__.py", "")
    plain, ours = run_both(tmp_path, "-m", name, "argument")

    assert ours == plain


def test_a_directory_is_run_by_its_main(tmp_path):
    write(tmp_path, "app/__main__.py", REPORT + "import beside\n")
    write(tmp_path, "app/beside.py", "print('beside')")
    plain, ours = run_both(tmp_path, "app", "argument")

    assert ours == plain
    assert ours[0] == 0


@pytest.mark.parametrize("name", ["app.zip", "app.pyz", "app"])
def test_an_archive_is_run_by_its_main_whatever_its_name(tmp_path, name):
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("__main__.py", textwrap.dedent(REPORT))
    plain, ours = run_both(tmp_path, name, "argument")

    assert ours == plain
    assert ours[0] == 0


def test_a_directory_without_main_is_refused(tmp_path):
    (tmp_path / "app").mkdir()
    plain, ours = run_both(tmp_path, "app")

    assert ours == plain
    assert ours[0] == 1


def test_a_missing_file_is_refused(tmp_path):
    plain, ours = run_both(tmp_path, "missing.py")

    assert ours == plain
    assert ours[0] == 2


def test_compiled_code_is_run(tmp_path):
    write(tmp_path, "x.py", REPORT)
    compiling = "import py_compile; py_compile.compile('x.py', 'x.pyc')"
    subprocess.run([sys.executable, "-c", compiling], cwd=tmp_path, check=True, timeout=30)
    plain, ours = run_both(tmp_path, "x.pyc")

    assert ours == plain
    assert ours[0] == 0
