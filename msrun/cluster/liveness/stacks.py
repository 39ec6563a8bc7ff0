"""Where the ranks of a job are in their programs: stacks, read from text and grouped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath

import msgspec

from msrun.cluster.bounds import RankSet
from msrun.cluster.liveness import collectives
from msrun.cluster.liveness.collectives import Collective, MissedCollective

FRAMES_MAX = 40
FILE_CHARS_MAX = 120
FUNCTION_CHARS_MAX = 60
# Of ranks that are named one by one in a sentence about a group.
_GROUPS_MAX = 16
# As faulthandler writes it.
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>[0-9]{1,9}) in (?P<function>.*)')
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):")
# Frames below the program's own belong to the code that runs it.
_RUNNERS = ("<frozen runpy>", "runpy.py")
_OURS = re.compile(
    r"/msrun/(?:worker|supervise|processes|cli)/(?:\w+/)*\w+\.py$|/msrun/(?:entry|__main__)\.py$"
)
# Functions of torch that end when other ranks have come, or have written to the store.
_WAIT_FRAMES = 4
_WAIT_FILE = re.compile(r"/torch/distributed/|/msrun/(?:parallel|worker)/")
_WAIT_FUNCTION = re.compile(
    r"_?(?:all_reduce|all_gather|all_to_all|reduce_scatter|broadcast|barrier|monitored_barrier|gather|"
    r"scatter|reduce|send|recv|batch_isend_irecv|wait|wait_tensor|store_based_barrier|synchronize|"
    r"init_process_group|new_group|rendezvous)"
    r"(?:_coalesced|_tensor|_into_tensor|_single|_object|_object_list|_all|_first|_helper)*"
)
# Through which torch calls operators, such as that which waits for a tensor.
_OPERATOR_FILE = re.compile(r"/torch/(?:_ops\.py$|_library/)")
_TORCH_FILE = re.compile(r"/torch/(?:autograd|optim|nn/parallel)/")
_LIBRARIES = re.compile(r"/site-packages/|/dist-packages/|/lib/python[0-9.]+/|^<")


class Frame(msgspec.Struct, frozen=True):
    """One call: the file, the line that it has reached, and the function."""

    file: str
    line: int
    function: str

    def place(self) -> str:
        """Return the file's name and the line."""
        return f"{PurePath(self.file).name}:{self.line}"


class RankStack(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank is.

    Args:
        rank: The rank.
        frames: Its main thread, innermost first.
        problem: Why there are no frames; empty when there are.
        idle: Seconds since its last beat; 0 for one that never beat.
        entered: The latest collective of each of its process groups; None if that is not known.
    """

    rank: int
    frames: tuple[Frame, ...] = ()
    problem: str = ""
    idle: float = 0.0
    entered: tuple[Collective, ...] | None = None


class StackGroup(msgspec.Struct, frozen=True):
    """Ranks that are in one place.

    Args:
        ranks: The ranks.
        frames: Where they are, innermost first.
        problem: Why that is not known; empty when it is.
    """

    ranks: RankSet
    frames: list[Frame]
    problem: str = ""

    def where(self) -> str:
        """Return the words that follow "ranks 0-2"."""
        if not self.frames:
            return f"without a stack: {self.problem}"
        inner = self.frames[0]
        own = next((frame for frame in self.frames if not _LIBRARIES.search(frame.file)), inner)
        called = "" if own == inner else f", called at {own.place()}"
        return f"in {inner.function} at {inner.place()}{called}"


def parse(text: str) -> tuple[Frame, ...]:
    """Return the main thread of what faulthandler wrote, innermost first.

    Of all threads, the interpreter lists the newest first, so the main thread is the last.
    """
    frames: list[Frame] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            frames = []
        elif match := _FRAME.fullmatch(line):
            file, function = match["file"][-FILE_CHARS_MAX:], match["function"][:FUNCTION_CHARS_MAX]
            frames.append(Frame(file, int(match["line"]), function))
    while frames and (_OURS.search(frames[-1].file) or frames[-1].file.endswith(_RUNNERS)):
        frames.pop()
    return tuple(frames[:FRAMES_MAX])


def group(stacks: Iterable[RankStack]) -> list[StackGroup]:
    """Return `stacks` grouped by where they are, larger groups first."""
    groups = _alike(stacks)
    ordered = sorted(groups, key=lambda place: (-len(groups[place]), min(groups[place])))
    return [
        StackGroup(RankSet.of(groups[frames, problem]), list(frames), problem)
        for frames, problem in ordered
    ]


def _alike(stacks: Iterable[RankStack]) -> dict[tuple[tuple[Frame, ...], str], list[int]]:
    groups: dict[tuple[tuple[Frame, ...], str], list[int]] = {}
    for stack in stacks:
        groups.setdefault((stack.frames, stack.problem), []).append(stack.rank)
    return groups


class Suspect(msgspec.Struct, frozen=True):
    """The rank that most likely keeps the others waiting.

    Args:
        rank: The rank.
        is_sure: Whether it is the only one that does not wait for others.
    """

    rank: int
    is_sure: bool


def suspect(stacks: Sequence[RankStack], stalled: Mapping[int, float]) -> Suspect:
    """Return the rank that most likely keeps the others waiting.

    Of ranks that have entered fewer collectives than others it is one that does not wait itself.
    Without such a one the stacks decide.  A rank inside a collective, a barrier or a wait for the
    store waits for others, and is not chosen while another is elsewhere.  Among the rest that make
    no progress it is one whose stack could not be had, since what is stopped can show none; else
    one of the smallest group of equal stacks; of these the one that has been silent for longest.

    Args:
        stacks: Where all ranks are.
        stalled: Rank -> seconds without progress, of those that were reported; at least one.
    """
    least = min(stalled.values()) / 2
    size = {rank: len(ranks) for ranks in _alike(stacks).values() for rank in ranks}
    shown = {stack.rank: bool(stack.frames) for stack in stacks}
    silent = {stack.rank: stack.idle for stack in stacks if stack.idle >= least} | dict(stalled)
    waiting = {stack.rank for stack in stacks if waits(stack.frames)}
    elsewhere = {stack.rank for stack in stacks} - waiting
    in_torch = {stack.rank for stack in stacks if _may_wait(stack.frames)}
    behind = collectives.causes(missed(stacks)) & elsewhere
    chosen = set(silent)
    if behind:
        chosen = behind
    elif waiting and elsewhere:
        chosen = elsewhere - in_torch or elsewhere
        chosen = (set(silent) & chosen) or chosen
    rank = min(
        chosen,
        key=lambda rank: (
            shown.get(rank, False),
            size.get(rank, 0),
            -silent.get(rank, 0.0),
            rank,
        ),
    )
    # In a backward pass, a rank may compute or wait: only the numbers tell.
    others = elsewhere - in_torch - {rank}
    is_alone = bool(waiting) and elsewhere == {rank} and rank not in in_torch
    return Suspect(rank, is_sure=is_alone or (behind == {rank} and not others))


def missed(stacks: Iterable[RankStack]) -> list[MissedCollective]:
    """Return the collectives that some ranks have entered and others have not."""
    entered = {stack.rank: stack.entered for stack in stacks if stack.entered is not None}
    return collectives.missed(entered)


def _may_wait(frames: Sequence[Frame]) -> bool:
    """Return whether a rank is in torch's C++ code, which may wait for a collective there."""
    return bool(frames) and bool(_TORCH_FILE.search(frames[0].file))


def waits(frames: Sequence[Frame]) -> bool:
    """Return whether a rank with these frames, innermost first, waits for other ranks."""
    # Of torch's functions that call each other, the outer ones have the same names.
    inner = [f for f in frames if not _OPERATOR_FILE.search(f.file)][:_WAIT_FRAMES]
    return any(_WAIT_FILE.search(f.file) and _WAIT_FUNCTION.fullmatch(f.function) for f in inner)


def summary(groups: Sequence[StackGroup]) -> str:
    """Return where all ranks are, as one line."""
    parts = [f"{_count(group.ranks)} {group.where()}" for group in groups[:_GROUPS_MAX]]
    if len(groups) > _GROUPS_MAX:
        parts.append(f"and {len(groups) - _GROUPS_MAX} more groups")
    return "; ".join(parts)


def render(groups: Sequence[StackGroup]) -> str:
    """Return the stack of each group, innermost call first, below a line of its ranks."""
    lines: list[str] = []
    for group in groups:
        lines.append(f"{_count(group.ranks)} {group.where()}")
        lines += [f"    {f.file}:{f.line} in {f.function}" for f in group.frames]
    return "\n".join(lines)


def _count(ranks: RankSet) -> str:
    return f"rank {ranks}" if len(ranks) == 1 else f"{len(ranks)} ranks ({ranks})"
