"""Build sdist and wheel, and show that they work: `check_package.py [FOLDER [VERSION]]`.

FOLDER gets the files; without it they are thrown away.  VERSION is what they must have, such
as that of a tag.  The wheel is built from the sdist, checked, and installed into a clean
environment, in which `msrun --help`, `msrun-torch` and the README's first job must run.

Needs `build` and `twine`, and an index that has torch.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"launchers", "msrun", "ranktable"}
# What a wheel must have beside modules: without the marker no type checker reads the rest.
MARKERS = {f"{package}/py.typed" for package in PACKAGES}


def first_job(readme: str) -> list[str]:
    """Return the words of the README's first job, after `msrun`."""
    block = re.search(r"<!-- main-command -->\n```sh\n(.*?)\n```", readme, re.DOTALL)
    if not block:
        raise SystemExit("check_package: README.md has no block after <!-- main-command -->")
    return shlex.split(block[1].rpartition("&&")[2])[1:]


def wheel_problems(names: list[str], version: str) -> list[str]:
    """Return what is wrong with a wheel of files `names`, a sentence each."""
    metadata = f"msrun-{version}.dist-info"
    problems = [f"{marker} is missing" for marker in sorted(MARKERS - set(names))]
    tops = {name.partition("/")[0] for name in names}
    problems += [f"{top}/ does not belong here" for top in sorted(tops - PACKAGES - {metadata})]
    problems += [f"{name} is no source" for name in names if "__pycache__" in name]
    if metadata not in tops:
        problems.append(f"the version is not {version}")
    return problems


def run(*words: str | Path, folder: Path) -> None:
    """Run a command and end when it fails."""
    print("package:", shlex.join(map(str, words)), flush=True)
    code = subprocess.run(words, cwd=folder, check=False).returncode
    if code:
        raise SystemExit(f"check_package: exit code {code}")


def build(folder: Path) -> tuple[Path, Path]:
    """Return an sdist of this checkout and the wheel of that, in `folder`."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, folder=folder)
    [sdist], [wheel] = folder.glob("msrun-*.tar.gz"), folder.glob("msrun-*.whl")
    return sdist, wheel


def try_out(wheel: Path, folder: Path) -> None:
    """Install `wheel` into a clean environment in `folder` and use it as a new user does."""
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[examples]", folder=folder)
    msrun = environment / "bin" / "msrun"
    run(msrun, "--help", folder=folder)
    run(environment / "bin" / "msrun-torch", "--version", folder=folder)
    # Beside the copy there is no checkout, so what is imported is what was installed.
    shutil.copytree(ROOT / "examples", folder / "examples")
    run(msrun, *first_job((ROOT / "README.md").read_text(encoding="utf-8")), folder=folder)


def main(arguments: list[str]) -> int:
    """Return 0 when everything works."""
    kept = Path(arguments[0]) if arguments else None
    with tempfile.TemporaryDirectory(prefix="msrun-package-") as name:
        folder = Path(name)
        sdist, wheel = build(folder)
        run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, folder=folder)
        version = arguments[1] if arguments[1:] else sdist.name[len("msrun-") : -len(".tar.gz")]
        with zipfile.ZipFile(wheel) as archive:
            problems = wheel_problems(archive.namelist(), version)
        for problem in problems:
            print(f"{wheel.name}: {problem}")
        if problems:
            return 1
        try_out(wheel, folder)
        if kept:
            kept.mkdir(parents=True, exist_ok=True)
            for file in (sdist, wheel):
                shutil.copy2(file, kept)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
