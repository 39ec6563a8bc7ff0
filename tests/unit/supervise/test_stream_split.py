"""Which bytes of one log were written to stdout, and which to stderr."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from msrun.supervise.logs import STDERR, STDOUT, StreamSplit, Tail

FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT

# A worker as `bootstrap.py` makes it.  What begins with "raw" goes past Python's streams.
WORKER = """
import os, sys
from msrun.worker import stdio

stdio.install()
stdio.tell_apart(sys.argv[1])
for word in sys.argv[2:]:
    if word.startswith("raw"):
        os.write(1 if "out" in word else 2, word.encode() + b"\\n")
    else:
        print(word, file=sys.stdout if "out" in word else sys.stderr)
"""


class Written:
    """A log that is opened once for each stream."""

    def __init__(self, folder):
        self.path, self.samples = folder / "log", folder / "samples"
        self.samples.touch()
        self.split = StreamSplit()
        self.begin()

    def begin(self):
        """A worker begins."""
        self.streams = {each: os.open(self.path, FLAGS) for each in (STDOUT, STDERR)}
        owned = [os.dup(stream) for stream in self.streams.values()]
        start = self.path.stat().st_size
        self.split.attach(owned, os.open(self.samples, os.O_RDONLY), start)

    def end(self):
        for stream in self.streams.values():
            os.close(stream)

    def write(self, stream, data):
        os.write(self.streams[stream], data)

    def runs(self):
        data = self.path.read_bytes()[: self.split.look()]
        return list(self.split.take(0, data))

    def run(self, *words):
        """Have a Python worker write `words`, each a line, without a look at it meanwhile."""
        command = [sys.executable, "-c", WORKER, str(self.samples), *words]
        subprocess.run(
            command, stdout=self.streams[1], stderr=self.streams[2], check=True, timeout=60
        )


@pytest.fixture
def written(tmp_path):
    written = Written(tmp_path)
    yield written
    written.end()
    written.split.close()


def test_one_look_tells_two_runs_apart(written):
    written.write(STDERR, b"a")
    written.write(STDOUT, b"b")
    written.write(STDOUT, b"c")

    assert written.runs() == [(STDERR, b"a"), (STDOUT, b"bc")]


def test_looks_tell_all_runs_apart(written):
    for stream, data in ((1, b"a"), (2, b"b"), (1, b"c"), (2, b"d"), (2, b"e"), (1, b"f")):
        written.write(stream, data)
        written.split.look()

    assert written.runs() == [(1, b"a"), (2, b"b"), (1, b"c"), (2, b"d"), (2, b"e"), (1, b"f")]


def test_a_python_worker_tells_its_own_writes_apart_without_any_look(written):
    choice = random.Random(7)
    words = [f"{choice.choice(('out', 'err'))}{i}" for i in range(300)]
    written.run(*words)

    got = {STDOUT: b"", STDERR: b""}
    for stream, data in written.runs():
        got[stream] += data
    for stream, name in ((STDOUT, "out"), (STDERR, "err")):
        assert got[stream].decode().split() == [word for word in words if word.startswith(name)]
    assert written.path.read_text().split() == words


def test_other_writes_between_those_of_python_are_told_apart(written):
    words = ["out", "raw-err", "out", "raw-out", "err", "raw-err", "out"]
    written.run(*words)

    assert [data.decode().split() for _, data in written.runs()] == [
        ["out"],
        ["raw-err"],
        ["out", "raw-out"],
        ["err", "raw-err"],
        ["out"],
    ]


def test_a_later_worker_goes_on_in_the_same_log(written):
    written.write(STDERR, b"a")
    written.end()
    written.begin()
    written.write(STDOUT, b"b")
    written.write(STDERR, b"c")

    assert written.runs() == [(STDERR, b"a"), (STDOUT, b"b"), (STDERR, b"c")]


def test_a_line_that_the_other_stream_interrupts_is_whole_on_the_console(written):
    tail = Tail(str(written.path), "> ", split=written.split)
    shown = []
    for stream, data in ((1, b"ab"), (2, b"X\n"), (1, b"cd\n")):
        written.write(stream, data)
        shown += tail.read()

    assert shown == [(STDERR, "> X\n"), (STDOUT, "> abcd\n")]


def test_only_the_chosen_streams_are_shown(written):
    tail = Tail(str(written.path), "", split=written.split, shown=frozenset((STDERR,)))
    written.write(STDOUT, b"a\n")
    written.write(STDERR, b"b\n")

    assert tail.read() == [(STDERR, "b\n")]
