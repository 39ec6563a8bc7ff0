"""`msrun install-shim`: a torchrun and an accelerate on PATH that are msrun."""

import os
import subprocess
import sys

import pytest
from support import environment, script

from msrun.cli.main import main

pytestmark = [pytest.mark.process, pytest.mark.torch]

MARK = "#!/bin/sh\n# made by msrun install-shim"
SAYS = """
    import os, sys
    print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MSRUN_GENERATION"],
        os.environ.get("ACCELERATE_MIXED_PRECISION"), *sys.argv[1:])
    sys.exit(int(os.environ.get("CODE", "0")))
"""


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "the shim"
    assert main(["install-shim", str(folder)]) == 0
    return folder


@pytest.fixture
def run(tmp_path, runtime, folder):
    """Run a command that is found on a PATH with the shim in front."""

    def run(*words, **variables):
        path = f"{folder}:{os.environ['PATH']}"
        return subprocess.run(
            list(map(str, words)),
            cwd=tmp_path,
            env=environment(runtime) | {"PATH": path, **variables},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    return run


def test_torchrun_is_msrun_with_one_worker(run, tmp_path):
    done = run("torchrun", script(tmp_path, SAYS), "--nproc-per-node=2", CODE="7")

    assert done.returncode == 7
    assert done.stdout == "[rank 0] 0 1 0 None --nproc-per-node=2\n"


def test_its_options_are_torchruns(run, tmp_path):
    words = "--nproc_per_node=2", "--standalone", "--max_restarts=1", script(tmp_path, SAYS)

    done = run("torchrun", *words)

    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 2 0 None", "[rank 1] 1 2 0 None"]


def test_a_script_with_the_name_of_a_verb_is_a_script(run, tmp_path):
    script(tmp_path, SAYS, "plan")

    assert run("torchrun", "plan").stdout == "[rank 0] 0 1 0 None\n"


def test_foreign_commands_are_left_alone(folder, capsys):
    (folder / "torchrun").write_text("#!/bin/sh\n")

    assert main(["install-shim", str(folder)]) == 2
    assert "torchrun is there already, and msrun did not make it" in capsys.readouterr().err
    (folder / "accelerate").write_text(f"{MARK}\n")
    assert main(["install-shim", "--remove", str(folder)]) == 0
    assert [path.name for path in folder.iterdir()] == ["torchrun"]
    assert (folder / "torchrun").read_text() == "#!/bin/sh\n"


def test_it_goes_as_it_came(folder, capsys):
    assert main(["install-shim", str(folder)]) == 0
    assert main(["install-shim", "--remove", str(folder)]) == 0
    assert not folder.exists()
    assert main(["install-shim", "--remove", str(folder)]) == 2
    assert "has no command that msrun install-shim made" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()

    assert main(["install-shim", str(tmp_path / "file" / "shim")]) == 2
    assert "file/shim: Not a directory" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("command", [("accelerate", "launch"), ("accelerate-launch",)])
def test_accelerate_starts_its_workers_by_msrun(run, tmp_path, command):
    pytest.importorskip("accelerate")
    words = "--multi_gpu", "--num_machines=1", "--num_processes=2", "--mixed_precision=bf16"

    done = run(*command, *words, script(tmp_path, SAYS), "--lr", "1", CODE="9")

    assert done.returncode == 9
    assert min(done.stdout.splitlines()) == "[rank 0] 0 2 0 bf16 --lr 1"


@pytest.mark.slow
def test_without_accelerate_its_shim_says_so(run):
    code = (
        "import sys, importlib.util; importlib.util.find_spec = lambda name: None;"
        "from msrun.cli.torchrun_shim import shim; sys.exit(shim('accelerate', ['launch']))"
    )

    done = run(sys.executable, "-c", code)

    assert done.returncode == 2
    assert f"error: accelerate is a shim of msrun, and {sys.executable} has no accelerate" in (
        done.stderr
    )
