"""Every command of docs/how-to is one that msrun takes."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from msrun.cli.main import main
from msrun.cli.verb_table import VERBS

pytestmark = pytest.mark.process

HOME = Path(__file__).parents[3]
BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
COMMANDS = [
    pytest.param(line.strip(), id=f"{page.stem}: {line.strip()}")
    for page in sorted((HOME / "docs" / "how-to").glob("*.md"))
    for block in BLOCK.findall(page.read_text())
    for line in block.splitlines()
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with all files that the pages name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "train.py").touch()
    (tmp_path / "simulate").touch(mode=0o700)
    (tmp_path / "hosts").write_text("node0 slots=2\nnode[1-3] slots=2\n")
    (tmp_path / "job.secret").write_bytes(b"s" * 32)
    (tmp_path / "job.secret").chmod(0o600)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_taken(capsys, command):
    program, *words = shlex.split(command, comments=True)
    assert program == "msrun"
    if "mpirun" in words and not shutil.which("mpirun"):
        pytest.skip("needs mpirun")
    # Elsewhere than on the named node a job would be refused for its name alone.
    words = [word.replace("node0", "localhost") for word in words]
    if words[0] not in VERBS or words[0] == "plan":
        code = main(["plan", *(words[1:] if words[0] == "plan" else words)])
        assert code == 0, capsys.readouterr().err
        return

    main([words[0], "--help"])

    text = capsys.readouterr().out
    flags = [word for word in words if word.startswith("-")]
    assert [flag for flag in flags if not re.search(rf"{flag}[ ,]", text)] == []
