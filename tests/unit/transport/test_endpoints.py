"""Where the control connection may be served, and with which library."""

import pytest

from msrun.errors import UsageError
from msrun.transport.sockets import check_library, check_own_library, endpoint, listen


@pytest.mark.parametrize(
    ("version", "has_curve", "problem"),
    [
        ((4, 3, 4), True, "libzmq is version 4.3.4, and the control connection needs 4.3.5 or"),
        ((4, 3, 5), False, "libzmq 4.3.5 was built without CURVE"),
    ],
)
def test_a_library_that_cannot_keep_strangers_out_is_refused(version, has_curve, problem):
    with pytest.raises(UsageError, match=problem):
        check_library(version, has_curve=has_curve)


@pytest.mark.parametrize("version", [(4, 3, 5), (4, 4, 0), (5, 0, 0)])
def test_a_newer_library_is_taken(version):
    check_library(version, has_curve=True)
    check_own_library()


def test_a_used_port_is_refused():
    with listen("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "expected"), [("10.0.0.1", "tcp://10.0.0.1:80"), ("::1", "tcp://[::1]:80")]
)
def test_an_endpoint_has_brackets_where_they_are_needed(host, expected):
    assert endpoint(host, 80) == expected
