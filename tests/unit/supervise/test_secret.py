"""The secret of several nodes: whose file it is, and how it comes to be."""

import hashlib
import os
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from msrun.errors import UsageError
from msrun.supervise.secret import FILE_BYTES_MAX, own_file, read_secret

NODES = 8
HINT = "name a file of 32 random bytes, the same on every node: --secret-file FILE"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def file_of(home, content, mode=0o600):
    path = home / "named"
    path.touch()
    path.chmod(mode)
    path.write_bytes(content)
    return path


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def refusal(path=None):
    with pytest.raises(UsageError) as caught:
        read_secret(path)
    return caught.value.message, caught.value.hint


@pytest.mark.parametrize("content", [bytes(32), b"x" * 33, b"\n" * FILE_BYTES_MAX])
def test_a_file_stands_for_its_whole_content(home, content):
    path = file_of(home, content)

    assert read_secret(str(path)) == hashlib.sha256(content).digest()
    assert not own_file().exists()


def test_a_link_to_a_file_of_ours(home):
    path = file_of(home, bytes(32))
    (home / "link").symlink_to(path)

    assert read_secret(str(home / "link")) == read_secret(str(path))


def test_the_users_own_is_made_once_and_for_its_owner_alone(home):
    first = read_secret(None)

    assert read_secret(None) == first
    assert own_file() == home / "config" / "msrun" / "secret"
    assert len(own_file().read_bytes()) == 32
    assert mode_of(own_file()) == 0o600
    assert mode_of(own_file().parent) == 0o700
    assert [path.name for path in own_file().parent.iterdir()] == ["secret"]


def test_two_users_have_two_secrets(home, monkeypatch):
    first = read_secret(None)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "other"))

    assert read_secret(None) != first


def test_nodes_that_start_together_agree(home, monkeypatch):
    start = Barrier(NODES)

    def node(_):
        start.wait(10)
        return read_secret(None)

    for name in ("first", "second", "third"):
        (home / name).mkdir()
        monkeypatch.setenv("XDG_CONFIG_HOME", str(home / name))
        with ThreadPoolExecutor(NODES) as nodes:
            assert len(set(nodes.map(node, range(NODES)))) == 1
        assert [path.name for path in own_file().parent.iterdir()] == ["secret"]


def test_a_directory_elsewhere_must_be_named_from_the_root(home, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", str(home))

    assert own_file() == home / ".config" / "msrun" / "secret"


def test_too_short_and_too_long(home):
    hint = "head -c 32 /dev/urandom makes enough of them"

    path = file_of(home, bytes(31))
    assert refusal(str(path)) == (
        f"secret file {path} holds 31 bytes (choose 32 to 65536 bytes)",
        hint,
    )
    path = file_of(home, bytes(FILE_BYTES_MAX + 1))
    assert refusal(str(path)) == (
        f"secret file {path} holds more (choose 32 to 65536 bytes)",
        hint,
    )


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o610])
def test_a_file_that_others_may_use(home, mode):
    path = file_of(home, bytes(32), mode)

    assert refusal(str(path)) == (
        f"secret file {path} may be used by others than its owner (mode {mode:04o})",
        f"chmod 600 {path}",
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user(home):
    path = file_of(home, bytes(32))
    os.chown(path, 12345, -1)

    assert refusal(str(path)) == (
        f"secret file {path} belongs to user 12345, who may read and change it",
        "copy it, and make the copy readable by you alone",
    )


@pytest.fixture
def mounted():
    """A key as Kubernetes mounts it for a container with `fsGroup` that is not root's."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "key")
        path.write_bytes(bytes(32))
        os.chown(path, 0, 12345)
        path.chmod(0o440)
        Path(folder).chmod(0o755)
        os.setegid(12345)
        os.seteuid(12345)
        yield path
        os.seteuid(0)
        os.setegid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_group_may_read_what_kubernetes_mounts(mounted, monkeypatch):
    assert "may be used by others" in refusal(str(mounted))[0]
    monkeypatch.setenv("MSRUN_POD_NODES", "2")
    assert len(read_secret(str(mounted))) == 32


def test_what_is_no_file(home):
    os.mkfifo(home / "pipe", 0o600)

    assert refusal(str(home / "pipe")) == (
        f"secret file {home / 'pipe'} is no regular file",
        HINT,
    )
    assert refusal(str(home)) == (f"secret file {home} cannot be read: Is a directory", HINT)
    assert refusal(str(home / "no")) == (
        f"secret file {home / 'no'} cannot be read: No such file or directory",
        HINT,
    )
    assert refusal("a\0b") == ("secret file a\0b cannot be read: embedded null byte", HINT)


def test_a_home_in_which_nothing_can_be_made(home, monkeypatch):
    (home / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "file"))
    path = home / "file" / "msrun" / "secret"

    assert refusal() == (f"secret file {path} cannot be made: File exists", HINT)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o702])
def test_a_directory_in_which_others_may_write(home, mode):
    directory = home / "config" / "msrun"
    directory.mkdir(parents=True)
    directory.chmod(mode)

    assert refusal() == (
        f"{directory} must belong to you, and nobody else may write to it",
        f"chmod 700 {directory}",
    )
    assert list(directory.iterdir()) == []


@pytest.mark.usefixtures("home")
def test_a_link_to_nothing_is_not_replaced():
    own_file().parent.mkdir(parents=True)
    own_file().symlink_to("nothing")

    assert refusal() == (
        f"secret file {own_file()} cannot be read: No such file or directory",
        HINT,
    )
    assert own_file().is_symlink()
    assert not Path(own_file().parent, "nothing").exists()
