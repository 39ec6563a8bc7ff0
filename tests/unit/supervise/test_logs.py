"""Lines of workers' logs, made safe to show and followed as they grow."""

import pytest

from msrun.supervise.logs import LINE_CHARS_MAX, Tail, last_lines, make_log_dir, render_line


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"plain", "plain"),
        (b"", ""),
        ("Grüße 你好".encode(), "Grüße 你好"),
        (b"tab\there", "tab\there"),
        (b"\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        (b"bell\a null\0", r"bell\x07 null\x00"),
        ("\u202eright to left".encode(), r"\u202eright to left"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b" 10%\r 50%\r100%", "100%"),
        (b" 10%\r100%\r", "100%"),
        (b"windows\r", "windows"),
        (b"\r\r", ""),
    ],
)
def test_a_line_cannot_act_on_a_terminal(raw, expected):
    assert render_line("[rank 3] ", raw) == "[rank 3] " + expected


def test_a_long_line_is_cut_and_says_how_much_is_missing():
    assert render_line("", b"a" * (LINE_CHARS_MAX + 5)) == "a" * LINE_CHARS_MAX + (
        "... [5 more characters]"
    )


def test_a_line_of_the_largest_length_is_whole():
    assert render_line("", b"a" * LINE_CHARS_MAX) == "a" * LINE_CHARS_MAX


def test_the_log_directory_is_private_and_made_with_its_parents(tmp_path):
    path = tmp_path / "a/b"
    make_log_dir(str(path))
    make_log_dir(str(path))

    assert path.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def log(tmp_path):
    return tmp_path / "worker_0.log"


def test_last_lines_are_the_last_that_say_something(log):
    log.write_text("one\ntwo\n\n  \nthree\n\n")

    assert last_lines(str(log), 2) == ["two", "three"]


def test_last_lines_leave_out_what_earlier_generations_wrote(log):
    log.write_text("old\nnew\n")

    assert last_lines(str(log), 5, start=4) == ["new"]


def test_last_lines_are_cut_and_made_safe(log):
    log.write_bytes(b"\x1b[2J\n" + b"b" * 1000)

    assert last_lines(str(log), 5) == [r"\x1b[2J", "b" * 400]


def test_last_lines_of_a_huge_log_are_found_from_its_end(log):
    log.write_bytes(b"x" * 1_000_000 + b"\nend\n")

    assert last_lines(str(log), 1) == ["end"]


def test_a_log_that_is_not_there_has_no_last_lines(log):
    assert last_lines(str(log), 5) == []


def append(path, data):
    with path.open("ab") as file:
        file.write(data)


def test_a_tail_returns_a_line_once_it_is_whole(log):
    tail = Tail(str(log), "> ")
    seen = []
    for piece in (b"a", b"b\nc", b"d\n", b"", b"e"):
        append(log, piece)
        seen.append(tail.read())

    assert seen == [[], ["> ab"], ["> cd"], [], []]


def test_a_character_split_over_two_reads_is_one_character(log):
    tail = Tail(str(log), "")
    append(log, b"\xc3")
    tail.read()
    append(log, b"\xbc\n")

    assert tail.read() == ["ü"]


def test_a_tail_starts_where_it_is_told(log):
    log.write_bytes(b"old\nnew\n")

    assert Tail(str(log), "", start=4).read() == ["new"]


def test_an_unfinished_last_line_is_shown_at_the_end_only(log):
    append(log, b"whole\nunfinished")
    tail = Tail(str(log), "")

    assert [tail.read(), tail.read(final=True), tail.read(final=True)] == [
        ["whole"],
        ["unfinished"],
        [],
    ]


def test_a_final_read_goes_on_until_nothing_is_left(log):
    lines = [f"line {i}" for i in range(20_000)]
    log.write_text("\n".join(lines))
    tail = Tail(str(log), "")
    shown = []
    while piece := tail.read(final=True):
        shown += piece

    assert shown == lines


def test_a_line_that_never_ends_is_shown_in_bounded_pieces(log):
    log.write_bytes(b"x" * 200_000)
    tail = Tail(str(log), "")
    reads = [tail.read() for _ in range(4)]

    assert [len(lines) for lines in reads] == [0, 1, 0, 1]
    assert {len(line) < LINE_CHARS_MAX + 50 for lines in reads for line in lines} == {True}


def test_a_log_that_comes_later_is_followed(log):
    tail = Tail(str(log), "")
    before = tail.read(final=True)
    append(log, b"first\n")

    assert (before, tail.read()) == ([], ["first"])
