"""`--data-tls`: keys of a job for Gloo's TLS, and torch without that transport.

No build of torch in a package index has the transport, so the torch that has it is made up.
"""

import os
import shutil
import stat
import subprocess
import sys

import pytest
from support import script, shell

pytestmark = pytest.mark.process

FILES = ["ca.pem", "certificate.pem", "key.pem"]
NAMES = ["GLOO_DEVICE_TRANSPORT", *(f"GLOO_DEVICE_TRANSPORT_TCP_TLS_{x}" for x in ("PKEY", "CERT"))]
NAMES.append("GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE")
SHOW = "; ".join(f'echo "{name}=${name}"' for name in NAMES)
WAIT = "until [ -e go ]; do sleep 0.01; done"


def variables(job, rank):
    return dict(line.split("=", 1) for line in job.log(rank).splitlines() if "=" in line)


def test_a_torch_without_the_transport_is_refused_before_any_worker_runs(msrun, tmp_path):
    job = msrun("--data-tls", script(tmp_path, "print('ran')"))

    assert job.wait() == 2
    assert job.err.count("error: ") == 1
    assert "error: --data-tls: torch on this node cannot open Gloo's TLS transport: " in job.err
    assert "hint: use a build of torch with USE_GLOO_WITH_OPENSSL=1" in job.err
    assert "Traceback" not in job.err
    assert not [path for path in job.logs.glob("worker_*.log") if "ran" in path.read_text()]


def test_workers_have_keys_that_only_their_user_reads_and_that_end_with_the_job(msrun):
    """A command is not asked for its torch, which refuses what it cannot do."""
    job = msrun("--data-tls", "--workers-per-node", 2, *shell(f"{SHOW}; echo up; {WAIT}"))
    job.until_logged("up", 0, 1)
    keys = job.run_dir / "tls"

    for rank in (0, 1):
        assert variables(job, rank) == {
            NAMES[0]: "TCP_TLS",
            NAMES[1]: str(keys / "key.pem"),
            NAMES[2]: str(keys / "certificate.pem"),
            NAMES[3]: str(keys / "ca.pem"),
        }
    assert sorted(path.name for path in keys.iterdir()) == FILES
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys.iterdir()} == {0o600}
    assert not list(job.run_dir.glob("tls-*"))
    (job.folder / "go").touch()
    assert job.wait() == 0
    assert not keys.exists()


def test_a_restart_makes_the_keys_again_in_a_directory_that_was_removed(msrun):
    fail = '[ "$MSRUN_GENERATION" = 1 ] || { rm -rf "$MSRUN_RUN_DIR"; exit 3; }'
    program = f'{fail}; ls "$MSRUN_RUN_DIR/tls"'
    job = msrun("--data-tls", "--max-restarts", 1, *shell(program))

    assert job.wait() == 0
    assert [line for line in job.log(0).splitlines() if line.endswith(".pem")] == FILES


def test_the_users_own_keys_stay(msrun):
    own = [f"{NAMES[1]}=/own/key", f"{NAMES[2]}=/own/cert", f"{NAMES[3]}=/own/ca"]
    words = [word for pair in own for word in ("--env", pair)]
    job = msrun("--data-tls", *words, *shell(f"{SHOW}; ls $MSRUN_RUN_DIR"))

    assert job.wait() == 0
    assert [f"{name}={value}" for name, value in variables(job, 0).items()] == [
        f"{NAMES[0]}=TCP_TLS",
        *own,
    ]
    assert "tls" not in job.log(0).splitlines()


def test_without_openssl_the_sentence_names_it(msrun, tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("sh", "true"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    job = msrun("--data-tls", *shell("true"), env={"PATH": str(tmp_path / "bin")})

    assert job.wait() == 2
    assert "error: --data-tls needs the program openssl, which is not on PATH" in job.err


def test_no_secret_and_no_key_is_in_a_command_line(msrun, tmp_path):
    """An openssl of ours writes down how it is started."""
    (tmp_path / "bin").mkdir()
    seen = tmp_path / "seen"
    wrapper = tmp_path / "bin" / "openssl"
    wrapper.write_text(
        f'#!/bin/sh\necho "$@" >> {seen}\nenv >> {seen}\nexec {shutil.which("openssl")} "$@"\n'
    )
    wrapper.chmod(0o700)
    secret = tmp_path / "secret"
    secret.write_bytes(b"treasure" * 8)
    secret.chmod(0o600)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    copy = f"cp -r $MSRUN_RUN_DIR/tls {tmp_path}/copy; grep -rl treasure $MSRUN_RUN_DIR"
    job = msrun("--data-tls", "--secret-file", secret, *shell(f"{copy}; true"), env={"PATH": path})

    assert job.wait() == 0
    text = seen.read_text()
    assert text.count("-keyfile /dev/stdin") == 2
    assert "treasure" not in text
    assert "PRIVATE" not in text
    assert not job.log(0).strip()
    # The key that is there is of this node: the authority's is nowhere.
    key, certificate, authority = (
        subprocess.check_output(["openssl", *words], cwd=tmp_path / "copy")
        for words in (
            ["pkey", "-in", "key.pem", "-pubout"],
            ["x509", "-in", "certificate.pem", "-pubkey", "-noout"],
            ["x509", "-in", "ca.pem", "-pubkey", "-noout"],
        )
    )
    assert key == certificate
    assert key != authority


def test_the_torch_of_python_workers_opens_the_transport_with_the_keys(msrun, tmp_path):
    """One that is made up says what it found where it looked."""
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "import os, pathlib\n"
        "class ProcessGroupGloo:\n"
        "    def create_device(hostname):\n"
        f"        found = [os.environ[name] for name in {NAMES!r}]\n"
        "        texts = [pathlib.Path(name).read_text()[:20] for name in found[1:]]\n"
        "        raise RuntimeError(f'{hostname} {found[0]} {texts}\\nmore')\n"
    )
    job = msrun(
        "--data-tls",
        "--start-method",
        "exec",
        script(tmp_path, "print('ran')"),
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )

    assert job.wait() == 2
    assert "127.0.0.1 TCP_TLS ['-----BEGIN PRIVATE K', '-----BEGIN CERTIFICA', " in job.err
    assert "more" not in job.err


def test_another_transport_is_a_contradiction(msrun):
    job = msrun("--data-tls", *shell("true"), env={NAMES[0]: "TCP"})

    assert job.wait() == 2
    assert "error: --data-tls contradicts GLOO_DEVICE_TRANSPORT=TCP" in job.err


def test_keys_in_part_are_refused(msrun):
    job = msrun("--data-tls", *shell("true"), env={NAMES[2]: "/own/cert"})

    assert job.wait() == 2
    sentence = f"--data-tls: {NAMES[2]} is set and {NAMES[1]} and {NAMES[3]} is not"
    assert sentence in job.err


def test_a_forked_worker_takes_the_transport_from_its_environment(msrun, tmp_path):
    """Torch is loaded before the fork, and reads the variable when it opens the transport."""
    program = "import torch.distributed as dist; dist.init_process_group('gloo')"
    job = msrun("--env", f"{NAMES[0]}=NO_SUCH", script(tmp_path, program))

    assert job.wait() == 1
    assert "unsupported gloo device" in job.log(0)
