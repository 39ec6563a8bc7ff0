"""Keeps messages inside a frame: ranks as runs, long texts and lists cut short.

A shortened list says how many items it leaves out, so that it stays true.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

RUNS_MAX = 64
RANGES_MAX = 512
PROCESSES_MAX = 16
PROCESS_BYTES_MAX = 256
_NAMES_MAX = 8
_CUT = "..."
_MORE = re.compile("([0-9]{1,9}) more processes")


class RankSet(msgspec.Struct, frozen=True):
    """Some ranks.

    Args:
        count: How many they are.
        runs: First and last of each run of them, ascending; of more than `RUNS_MAX` the first.
    """

    count: int = 0
    runs: list[tuple[int, int]] = []

    @classmethod
    def of(cls, ranks: Iterable[int]) -> RankSet:
        """Return the set of `ranks`, in which each rank occurs once."""
        ordered = sorted(ranks)
        runs: list[tuple[int, int]] = []
        for rank in ordered:
            if runs and rank == runs[-1][1] + 1:
                runs[-1] = (runs[-1][0], rank)
            elif len(runs) < RUNS_MAX:
                runs.append((rank, rank))
            else:
                break
        return cls(len(ordered), runs)

    def __len__(self) -> int:
        """Return how many they are."""
        return self.count

    def __str__(self) -> str:
        """Return them as text such as `0-3,7`."""
        parts = [str(low) if low == high else f"{low}-{high}" for low, high in self.runs]
        more = self.count - sum(high - low + 1 for low, high in self.runs)
        return ",".join(parts) + f" and {more} more" * bool(more)


def clip(text: str, most: int) -> str:
    """Return `text`, or as much of its beginning as `most` bytes of UTF-8 have room for."""
    data = text.encode(errors="replace")
    if len(data) <= most:
        return text
    return data[: most - len(_CUT)].decode(errors="ignore") + _CUT


def newest(lines: Sequence[str], most: int) -> list[str]:
    """Return as many of the last of `lines` as `most` bytes of UTF-8 have room for."""
    sizes = accumulate(len(line.encode(errors="replace")) for line in reversed(lines))
    kept = sum(size <= most for size in sizes)
    return list(lines[len(lines) - kept :])


def few(processes: Iterable[str]) -> list[str]:
    """Return descriptions of `processes`, of many the first and how many more there are.

    They may be of several nodes, each of which has cut its own short.
    """
    named: list[str] = []
    more = 0
    for process in processes:
        if rest := _MORE.fullmatch(process):
            more += int(rest[1])
        elif len(named) < PROCESSES_MAX:
            named.append(clip(process, PROCESS_BYTES_MAX))
        else:
            more += 1
    return [*named, f"{more} more processes"] if more else named


def listed(names: Sequence[str], between: str = ", ") -> str:
    """Return `names` as text, of many the first and how many more there are."""
    more = len(names) - _NAMES_MAX
    return between.join(names[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
