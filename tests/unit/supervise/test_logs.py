"""Lines of workers' logs, made safe to show and followed as they grow."""

import pytest

from msrun.supervise.logs import LINE_CHARS_MAX, LogGap, Tail, joined, last_lines, make_log_dir


@pytest.fixture
def log(tmp_path):
    return tmp_path / "worker_0.log"


def shown(log, data, prefix="", **options):
    """Return what the console shows of a log that ends with `data`."""
    log.write_bytes(data)
    tail = Tail(str(log), prefix, **options)
    pieces = []
    while piece := tail.read(final=True):
        pieces += piece
    return "".join(text for _, text in pieces)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"plain", "plain"),
        ("Grüße 你好".encode(), "Grüße 你好"),
        (b"tab\there", "tab\there"),
        (b"\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        (b"\x1b[2Jclear\x1b[Aup", r"\x1b[2Jclear\x1b[Aup"),
        (b"bell\a null\0", r"bell\x07 null\x00"),
        ("\u202eright to left".encode(), r"\u202eright to left"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"windows\r", "windows"),
    ],
)
def test_a_line_cannot_act_on_a_terminal_but_for_its_colours(log, raw, expected):
    assert shown(log, raw + b"\n", "[rank 3] ") == f"[rank 3] {expected}\n"


def test_an_empty_line_is_a_line(log):
    assert shown(log, b"\n\n", "> ") == "> \n> \n"


def test_every_state_of_a_progress_bar_is_shown_and_overwritten(log):
    assert shown(log, b"\r 10%\r 50%\r100%\ndone", "> ") == ">  10%\r>  50%\r> 100%\n> done\n"


def test_a_long_line_is_cut_and_says_how_much_is_missing(log):
    expected = "a" * LINE_CHARS_MAX + "... [5 more characters]\n"

    assert shown(log, b"a" * (LINE_CHARS_MAX + 5) + b"\n") == expected


def test_a_line_of_the_largest_length_is_whole(log):
    assert shown(log, b"a" * LINE_CHARS_MAX + b"\n") == "a" * LINE_CHARS_MAX + "\n"


def test_the_log_directory_is_private_and_made_with_its_parents(tmp_path):
    path = tmp_path / "a/b"
    make_log_dir(str(path))
    make_log_dir(str(path))

    assert path.stat().st_mode & 0o777 == 0o700


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

    assert seen == [[], [(1, "> ab\n")], [(1, "> cd\n")], [], []]


def test_a_live_tail_returns_what_there_is_of_a_line(log):
    tail = Tail(str(log), "> ", is_live=True)
    seen = []
    for piece in (b"\r 10%", b"\r 20%", b" slow", b"\r 30%\n", b"say: "):
        append(log, piece)
        seen.append("".join(text for _, text in tail.read()))

    assert seen == [">  10%", "\r>  20%", " slow", "\r>  30%\n", "> say: "]
    assert tail.read(final=True) == [(1, "\n")]


def test_a_character_split_over_two_reads_is_one_character(log):
    tail = Tail(str(log), "", is_live=True)
    append(log, b"\xc3")
    tail.read()
    append(log, b"\xbc\n")

    assert tail.read() == [(1, "ü\n")]


def test_a_tail_starts_where_it_is_told(log):
    log.write_bytes(b"old\nnew\n")

    assert Tail(str(log), "", start=4).read() == [(1, "new\n")]


def test_an_unfinished_last_line_is_shown_at_the_end_only(log):
    append(log, b"whole\nunfinished")
    tail = Tail(str(log), "")

    assert [tail.read(), tail.read(final=True), tail.read(final=True)] == [
        [(1, "whole\n")],
        [(1, "unfinished\n")],
        [],
    ]


def test_a_final_read_goes_on_until_nothing_is_left(log):
    text = "".join(f"line {i}\n" for i in range(20_000))

    assert shown(log, text.encode()) == text


def test_a_line_that_never_ends_is_shown_in_bounded_pieces(log):
    log.write_bytes(b"x" * 200_000)
    tail = Tail(str(log), "")
    reads = [tail.read() for _ in range(4)]

    assert [len(pieces) for pieces in reads] == [0, 1, 0, 1]
    assert {len(text) < LINE_CHARS_MAX + 50 for pieces in reads for _, text in pieces} == {True}


def test_a_gap_in_the_midst_of_a_line_is_a_line_of_its_own():
    note = LogGap(5, 12).note()

    assert joined(b"r1 00", note + b"rest\n") == b"r1 00\n" + note + b"rest\n"
    assert joined(b"", note) == note
    assert joined(b"r1 00", b"01\n") == b"r1 0001\n"


def test_a_log_that_comes_later_is_followed(log):
    tail = Tail(str(log), "")
    before = tail.read(final=True)
    append(log, b"first\n")

    assert (before, tail.read()) == ([], [(1, "first\n")])
