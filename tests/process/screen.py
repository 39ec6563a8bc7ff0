"""A terminal as a person sees it, at which a test starts launchers."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time

from support import PATIENCE, until

WIDTH, HEIGHT = 300, 40
CONTROL = re.compile(r"\x1b\[(\?25[lh]|\d*A|2K|[\d;]*m)|[\r\n]|[^\x1b\r\n]")
STATUS = re.compile(r"\S+  (\w+) (\d)/(\d)  (\d+):(\d\d)( +generation \d)?")


class Screen:
    """A terminal that knows what rich writes and fails on everything else."""

    def __init__(self):
        self.lines = [""]
        self.row = 0
        self.column = 0
        self.has_cursor = True
        self.seen = []
        self.colours = set()

    def feed(self, text):
        at = 0
        while at < len(text):
            match = CONTROL.match(text, at)
            assert match, f"stray control bytes: {text[at : at + 20]!r}"
            self._take(match[0], match[1])
            at = match.end()
        self._see()

    def _take(self, piece, control):
        if piece == "\n":
            self._see()
            self.row += 1
            self.lines += [""] * (self.row + 1 - len(self.lines))
        elif piece == "\r":
            self._see()
            self.column = 0
        elif control is None:
            assert piece.isprintable(), f"stray control byte: {piece!r}"
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + piece + line[self.column + 1 :]
            self.column += 1
        elif control.endswith("A"):
            self.row -= int(control[:-1] or 1)
        elif control == "2K":
            self.lines[self.row] = ""
        elif control.endswith("m"):
            self.colours.add(control)
        else:
            self.has_cursor = control == "?25h"

    def _see(self):
        if not self.seen or self.lines[self.row] != self.seen[-1]:
            self.seen.append(self.lines[self.row])

    def statuses(self):
        """Return the phase, running workers and wanted workers of each live line."""
        matches = map(STATUS.fullmatch, self.seen)
        return [(m[1], int(m[2]), int(m[3])) for m in matches if m]

    def elapsed(self):
        matches = map(STATUS.fullmatch, self.seen)
        return [60 * int(m[4]) + int(m[5]) for m in matches if m]

    def text(self):
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n") + "\n"


class Terminal:
    """A pseudo terminal and what was shown on it."""

    def __init__(self):
        self._ours, self.theirs = pty.openpty()
        self.resize(HEIGHT, WIDTH)
        self.raw = b""

    def resize(self, height, width):
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def modes(self):
        return termios.tcgetattr(self._ours)

    def until_raw(self, text):
        """Wait until the bytes `text` were written to it."""
        until(lambda: self._read(0.02) and text in self.raw, f"for {text!r} at the terminal")

    def started(self):
        """The job has its own copies of the other side."""
        os.close(self.theirs)

    def type(self, keys):
        os.write(self._ours, keys)

    def until(self, condition, what):
        """Wait until the screen fulfils `condition`, and return it."""
        return until(lambda: self._read(0.02) and condition(self.screen()) and self.screen(), what)

    def until_closed(self):
        deadline = time.monotonic() + PATIENCE
        while self._read(0.1, at_end=False):
            assert time.monotonic() < deadline, self.raw
        return self.screen()

    def _read(self, seconds, *, at_end=True):
        """Take what is there; return whether more may come, or `at_end` once none can."""
        ready, _, _ = select.select([self._ours], [], [], seconds)
        try:
            self.raw += os.read(self._ours, 65536) if ready else b""
        except OSError:  # nobody has the other side open any more
            return at_end
        return True

    def screen(self):
        screen = Screen()
        screen.feed(self.raw.decode(errors="ignore").replace("^C", ""))
        return screen

    def close(self):
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1
