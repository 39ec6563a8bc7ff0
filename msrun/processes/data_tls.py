"""`--data-tls`: keys with which Gloo's connections between workers are encrypted and authenticated.

The job has a certificate authority.  Its private key follows from the job's secret, so each node
makes the same one, signs a certificate for its own workers, and forgets the key: it is written to
no file and no command line, and nothing has to travel between the nodes.  A node accepts a peer
with any certificate of this authority, that is of any holder of the secret.

The program `openssl` makes the files, since Python's standard library cannot.  The certificates
are valid for all time: clocks of nodes differ, and the files end with the job.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from msrun import entry
from msrun.environ import TLS_CA, TLS_CERTIFICATE, TLS_KEY
from msrun.errors import UsageError
from msrun.transport.keys import hkdf
from msrun.worker.gloo_transport import READY

_OPENSSL = "openssl"
_OPENSSL_SECONDS = 30.0
_TORCH_SECONDS = 120.0
_OWN_KEYS = (
    "or set GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY, GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT and "
    "GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE to files of your own"
)
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256
_SCALAR_BYTES = 32
# 16 bytes more than the order has make the remainder unbiased: FIPS 186-5, A.2.1.
_SEED_BYTES = _SCALAR_BYTES + 16
# RFC 5915's ECPrivateKey on P-256 without the public key, around the 32 bytes of the private one.
_DER_BEFORE = bytes.fromhex("30310201010420")
_DER_AFTER = bytes.fromhex("a00a06082a8648ce3d030107")
_CONFIG = """
[req]
distinguished_name = name
[name]
[ca]
default_ca = job
[job]
database = index.txt
new_certs_dir = .
rand_serial = yes
default_md = sha256
policy = any
[any]
commonName = supplied
[of_authority]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[of_node]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
authorityKeyIdentifier = keyid
"""
_ALWAYS = ("-startdate", "20000101000000Z", "-enddate", "99991231235959Z")
_REQUEST = ("req", "-new", "-config", "config", "-out", "request", "-subj")
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_SIGN = ("ca", "-config", "config", "-batch", "-notext", "-keyfile", "/dev/stdin", "-in", "request")


def authority_key(secret: bytes, job_id: str) -> bytes:
    """Return the private key of the job's authority in PEM, the same for all holders of `secret`.

    Args:
        secret: The job's secret.
        job_id: Its name: jobs of one secret have authorities of their own.
    """
    seed = hkdf(secret, f"msrun data tls {job_id}".encode(), length=_SEED_BYTES)
    scalar = int.from_bytes(seed) % (_ORDER - 1) + 1
    der = _DER_BEFORE + scalar.to_bytes(_SCALAR_BYTES) + _DER_AFTER
    lines = base64.encodebytes(der)
    return b"-----BEGIN EC PRIVATE KEY-----\n" + lines + b"-----END EC PRIVATE KEY-----\n"


def write_keys(directory: Path, secret: bytes, job_id: str) -> None:
    """Write key, certificate and the authority's certificate of this node to `directory`.

    Args:
        directory: Private to this user; it is made, and made anew if it is there.
        secret: As of `authority_key`, as is the next.
        job_id: The job.

    Raises:
        UsageError: There is no `openssl`, or it cannot make them.
        OSError: They cannot be written.
    """
    if shutil.which(_OPENSSL) is None:
        msg = f"--data-tls needs the program {_OPENSSL}, which is not on PATH"
        raise UsageError(msg, hint=f"install it on every node, {_OWN_KEYS}")
    authority = authority_key(secret, job_id)
    with tempfile.TemporaryDirectory(prefix="tls-", dir=directory.parent) as draft:
        place = Path(draft)
        (place / "config").write_text(_CONFIG)
        (place / "index.txt").touch()
        _openssl(place, (*_REQUEST, "/CN=msrun job", "-key", "/dev/stdin"), authority)
        of_authority = ("-out", TLS_CA, "-extensions", "of_authority", "-selfsign")
        _openssl(place, (*_SIGN, *_ALWAYS, *of_authority), authority)
        _openssl(place, (*_REQUEST, "/CN=msrun node", *_NEW_KEY, "-keyout", TLS_KEY))
        of_node = ("-out", TLS_CERTIFICATE, "-extensions", "of_node", "-cert", TLS_CA)
        _openssl(place, (*_SIGN, *_ALWAYS, *of_node), authority)
        directory.mkdir(mode=0o700, exist_ok=True)
        for name in (TLS_CA, TLS_CERTIFICATE, TLS_KEY):
            (place / name).chmod(0o600)
            (place / name).replace(directory / name)


def _openssl(place: Path, words: tuple[str, ...], stdin: bytes = b"") -> None:
    try:
        done = subprocess.run(
            [_OPENSSL, *words],
            cwd=place,
            input=stdin,
            capture_output=True,
            timeout=_OPENSSL_SECONDS,
            check=False,
            umask=0o077,
        )
    except subprocess.TimeoutExpired:
        said = f"it does not end within {_OPENSSL_SECONDS:g}s"
    else:
        if not done.returncode:
            return
        said = _last_line(done.stderr.decode(errors="replace"))
    msg = f"--data-tls: `{_OPENSSL} {words[0]}` cannot make the keys of this node: {said}"
    raise UsageError(msg, hint=f"repair it, {_OWN_KEYS}")


def check_torch(environment: Mapping[str, str]) -> None:
    """Check that the torch of Python workers has Gloo's TLS and takes the keys.

    Costs an import of torch in a short-lived process: no process from which workers are forked may
    have opened a transport.

    Args:
        environment: Of the workers.

    Raises:
        UsageError: It has not, or does not answer.
    """
    what = "--data-tls: torch on this node cannot open Gloo's TLS transport"
    command = [sys.executable, str(Path(entry.__file__)), "msrun.worker.gloo_transport:main"]
    try:
        answer = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TORCH_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"{what}: it does not answer within {_TORCH_SECONDS:g}s") from None
    said = _last_line(answer.stderr if answer.returncode else answer.stdout)
    if answer.returncode or said != READY:
        hint = "use a build of torch with USE_GLOO_WITH_OPENSSL=1, or leave --data-tls out"
        raise UsageError(f"{what}: {said}", hint=hint)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it says nothing"
