import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.errors import UsageError
from msrun.units import (
    counted,
    parse_duration,
    parse_size,
    quoted,
    render_duration,
    render_size,
    shown,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("10m", 600.0),
        ("1h30m", 5400.0),
        ("2d", 172800.0),
        ("500ms", 0.5),
        ("1m0.5s", 60.5),
        ("0", 0.0),
        ("0.5", 0.5),
        ("600", 600.0),
        ("inf", math.inf),
        ("Infinity", math.inf),
    ],
)
def test_duration(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "s", "10x", "-1", "1m1h", "1s1s", "1h 30m", "1e3", "nan", "٣s", "1.s", ".5", "10m30"],
)
def test_what_is_no_duration(text):
    with pytest.raises(UsageError) as caught:
        parse_duration(text)

    assert caught.value.message == (
        f"{text!r} is no duration (choose such as 90s, 10m, 1h30m, 0.5 or inf)"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (0.25, "0.25s"),
        (90.0, "90s"),
        (119.9996, "2m"),
        (600.0, "10m"),
        (5400.0, "1h30m"),
        (86401.0, "1d1s"),
        (math.inf, "inf"),
    ],
)
def test_render_duration(seconds, text):
    assert render_duration(seconds) == text


@given(st.integers(min_value=0, max_value=10**9))
def test_a_rendered_duration_is_read_back(milliseconds):
    seconds = milliseconds / 1000

    assert parse_duration(render_duration(seconds)) == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4GiB", 4 << 30),
        ("512MiB", 512 << 20),
        ("1.5KiB", 1536),
        ("64kB", 64000),
        ("2 TB", 2 * 10**12),
        ("17B", 17),
    ],
)
def test_size(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4G", "4gib", "-1", "1e3", "4 GiB ", "inf"])
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match="is no size"):
        parse_size(text)


def test_a_size_is_whole_bytes():
    with pytest.raises(UsageError, match=r"'0\.3B' is not a whole number of bytes"):
        parse_size("0.3B")


def test_quoted_is_short_and_escaped():
    assert quoted("a\x1b\n") == r"'a\x1b\n'"
    assert quoted("x" * 100) == "'" + "x" * 57 + "...'"


def test_shown_quotes_only_what_needs_it():
    assert [shown("a b"), shown(""), shown("a\n")] == ["a b", "''", r"'a\n'"]


def test_counted():
    assert [counted(number, "node") for number in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]


@pytest.mark.parametrize(
    ("size", "text"),
    [(1 << 20, "1MiB"), (3 << 30, "3GiB"), (1536, "1536"), (5 << 10, "5KiB"), (0, "0")],
)
def test_render_size(size, text):
    assert render_size(size) == text
    assert parse_size(text) == size
