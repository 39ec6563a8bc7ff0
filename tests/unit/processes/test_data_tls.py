"""Keys of a job's nodes for TLS between their workers."""

import shutil
import socket
import ssl
import subprocess
import threading

import pytest

from msrun.errors import UsageError
from msrun.processes import data_tls

SECRET = bytes(range(32))
# The point on the curve, in hexadecimal digits.
PUBLIC = (
    "e21f09e6a9ef4ca5c03a98b92c3c132c6440dad9fee9810057d3d018c4e63555"
    "f2355884eec093e47925bf61de0138bc2ffcf90c8ebb3af0debef559fe6226ae"
)

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl on PATH")


@pytest.fixture
def node(tmp_path):
    """Make the keys of a node."""

    def make(name, secret=SECRET, job_id="job"):
        directory = tmp_path / name / "tls"
        directory.parent.mkdir()
        data_tls.write_keys(directory, secret, job_id)
        return directory

    return make


def verify(authority, certificate, purpose):
    words = ["openssl", "verify", "-x509_strict", "-purpose", purpose]
    words += ["-CAfile", authority / "ca.pem", certificate / "certificate.pem"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def talks(server, client):
    """Tell whether a connection comes about in which both ends ask for a certificate."""
    ends = []
    for own, purpose in ((server, ssl.PROTOCOL_TLS_SERVER), (client, ssl.PROTOCOL_TLS_CLIENT)):
        context = ssl.SSLContext(purpose)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(own / "ca.pem")
        context.load_cert_chain(own / "certificate.pem", own / "key.pem")
        ends.append(context)
    left, right = socket.socketpair()
    said = []

    def serve():
        try:
            with ends[0].wrap_socket(left, server_side=True) as sock:
                said.append(sock.recv(5))
        except OSError:
            left.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with ends[1].wrap_socket(right) as sock:
            sock.sendall(b"hello")
    except OSError:
        right.close()
    thread.join()
    return said == [b"hello"]


@pytest.mark.parametrize("purpose", ["sslserver", "sslclient"])
def test_each_node_accepts_the_other(node, purpose):
    a, b = node("a"), node("b")

    assert verify(a, b, purpose)
    assert verify(b, a, purpose)
    assert (a / "key.pem").read_text() != (b / "key.pem").read_text()


def test_nodes_talk_over_tls(node):
    a, b = node("a"), node("b")

    assert talks(a, b)
    assert talks(b, a)


@pytest.mark.parametrize("other", [{"secret": bytes(32)}, {"job_id": "other"}])
def test_another_secret_or_job_is_not_accepted(node, other):
    a, stranger = node("a"), node("stranger", **other)

    assert not verify(a, stranger, "sslclient")
    assert not talks(a, stranger)
    assert not talks(stranger, a)


def test_a_node_cannot_sign_for_others(node):
    """Its certificate is no authority's."""
    a = node("a")
    text = subprocess.check_output(
        ["openssl", "x509", "-in", a / "certificate.pem", "-noout", "-ext", "basicConstraints"]
    )

    assert b"CA:FALSE" in text


def test_the_key_of_the_authority_is_the_same_everywhere():
    """So it stays, since nodes of one release must agree."""
    found = [data_tls.authority_key(SECRET, "job") for _ in range(2)]

    assert found[0] == found[1]
    digest = subprocess.check_output(
        ["openssl", "pkey", "-pubout", "-outform", "DER"], input=found[0]
    ).hex()
    assert digest[-128:] == PUBLIC


def test_what_openssl_says_is_in_the_sentence(tmp_path, monkeypatch):
    wrapper = tmp_path / "openssl"
    wrapper.write_text("#!/bin/sh\necho no entropy today >&2\nexit 1\n")
    wrapper.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    with pytest.raises(
        UsageError, match=r"`openssl req` cannot make the keys .*: no entropy today"
    ):
        data_tls.write_keys(tmp_path / "tls", SECRET, "job")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["openssl"]
