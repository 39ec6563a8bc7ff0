"""Ends of workers, the root cause among them, and the verdict of a job, with their texts."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Annotated

import msgspec

from msrun.cluster.bounds import RankSet, clip, newest
from msrun.errors import ExitCode, PeerRankError, signal_exit_code, signal_name

TAIL_LINES = 20
_TAIL_BYTES_MAX = 24_000
_TEXT_BYTES_MAX = 2_000
_PATH_BYTES_MAX = 4_096
_GROUPS_MAX = 16
# Finite, because the scheduler's log is JSON, which has no infinity and no NaN.
Seconds = Annotated[float, msgspec.Meta(ge=-1e10, le=1e10)]
# Range of exit codes and signals: no process can end with a number beyond it.
Status = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
# The name of a host, a job, a version.
Name = Annotated[str, msgspec.Meta(max_length=255)]
# A process that one of these ends was not ended by the loss of a peer.
_NEVER_COLLATERAL = frozenset(
    {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
)
# Seconds: a peer may see the broken connection before the kernel tells us which process broke it.
_HEAD_START = 0.1
# The exception of a worker that ended because another one failed, and said so.
_OF_PEER = f"{PeerRankError.__module__}.{PeerRankError.__qualname__}:"


class RankExit(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker ended.

    Args:
        rank: Global rank.
        node_rank: Its node.
        host: Its node's host name.
        local_rank: Rank on its node.
        pid: Its pid, 0 when it could not be started.
        code: Exit code; None when a signal ended it.
        signum: The signal that ended it.
        core: A core was dumped.
        oom: The kernel counted an out-of-memory kill at its death.
        ran_for: Seconds from start to end.
        age: Seconds since it failed: since its exception, if it left one, else its end.
        stopped: Its node had asked it to stop before it ended.
        swept: It ended while its node was swept, so a SIGKILL was ours.
        stalled: Seconds without progress of one that runs but hangs; 0 for one that ended.
        error: First line of the exception that ended it; empty without one.
        tail: Last lines of its log, at most `TAIL_LINES`.
        log_file: Path of its log on its node.
        is_server: It was no worker but a parameter server, whose number is `rank`.
    """

    rank: int
    node_rank: int
    host: Name
    local_rank: int
    pid: int
    code: Status | None
    signum: Status | None = None
    core: bool = False
    oom: bool = False
    ran_for: Seconds
    age: Seconds = 0.0
    stopped: bool = False
    swept: bool = False
    stalled: Seconds = 0.0
    error: str = ""
    tail: list[str] = []
    log_file: str = ""
    is_server: bool = False

    @property
    def succeeded(self) -> bool:
        """Whether the worker exited with code 0."""
        return self.code == 0

    @property
    def exit_code(self) -> int:
        """The code a shell would show: the worker's own, or 128 + signal."""
        if self.signum is not None:
            return signal_exit_code(self.signum)
        if self.stalled:
            return ExitCode.HUNG
        return ExitCode.INTERNAL if self.code is None else self.code

    def how(self) -> str:
        """Return how it ended, in words that follow "rank 3"."""
        if self.stalled:
            return f"made no progress for {render_seconds(self.stalled)} and was given up"
        if self.signum is None:
            return f"exited with code {self.code}"
        words = f"was killed by {signal_name(self.signum)}"
        if self.oom:
            words += " (out of memory)"
        elif self.core:
            words += " (core dumped)"
        return words

    def sentence(self) -> str:
        """Return a sentence: which worker it was, how it ended and after how long."""
        who = f"rank {self.rank} (node {self.host}, local_rank {self.local_rank}, pid {self.pid})"
        if self.is_server:
            who = f"server {self.rank} (node {self.host}, pid {self.pid})"
        return f"{who} {self.how()} after {render_seconds(self.ran_for)}"


def fit(end: RankExit) -> RankExit:
    """Return `end` with no more text than a message has room for, of its log the last lines."""
    return msgspec.structs.replace(
        end,
        error=clip(end.error, _TEXT_BYTES_MAX),
        tail=newest(end.tail, _TAIL_BYTES_MAX),
        log_file=clip(end.log_file, _PATH_BYTES_MAX),
    )


def bare(end: RankExit) -> RankExit:
    """Return `end` without the texts, which only a root cause needs."""
    return msgspec.structs.replace(end, host="", error="", tail=[], log_file="")


class ExitGroup(msgspec.Struct, frozen=True):
    """Ranks that ended in the same way."""

    how: str
    ranks: RankSet


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The one result of a job.

    Args:
        job_id: The job.
        code: Exit code of every node's launcher.
        reason: One sentence; empty after a success.
        generation: The last generation.
        restarts: Restarts that were used.
        hint: Advice to the user; empty without any.
        root: The first failure of the last generation; None without one.
        collateral: Ends that followed from it, grouped; small groups beyond many are one.
        finished: Ranks that had exited with code 0 before they were asked to stop.
        stuck: Processes that could not be killed; of many the first, and how many more.
        insecure: The job ran without authentication.
    """

    job_id: str
    code: int
    reason: str
    generation: int
    restarts: int
    hint: str = ""
    root: RankExit | None = None
    collateral: list[ExitGroup] = []
    finished: RankSet = RankSet()
    stuck: list[str] = []
    insecure: bool = False


def root_cause(exits: Iterable[tuple[RankExit, float]]) -> RankExit:
    """Return the failure that came first.

    Args:
        exits: Ends of workers, at least one of which failed, each with the time at which
            it failed, all on one clock, in the order of their reports.
    """
    failures = [(_failed_at(e, at), e) for e, at in exits if not e.succeeded]
    # A worker that ended because of another's exception may be faster than that one.
    causes = [each for each in failures if each[1].error and not each[1].error.startswith(_OF_PEER)]
    first = min(failures, key=lambda failure: failure[0])
    if causes and first[1].error.startswith(_OF_PEER):
        first = min(causes, key=lambda failure: failure[0])
    return first[1]


def _failed_at(end: RankExit, at: float) -> float:
    return at - _HEAD_START if end.signum in _NEVER_COLLATERAL and not end.swept else at


def group_exits(exits: Iterable[RankExit]) -> list[ExitGroup]:
    """Return `exits` grouped by how they ended, larger groups first, the smallest together."""
    groups: dict[str, list[int]] = {}
    for end in exits:
        groups.setdefault(end.how(), []).append(end.rank)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    grouped = [ExitGroup(how, RankSet.of(ranks)) for how, ranks in ordered[:_GROUPS_MAX]]
    if others := [rank for _, ranks in ordered[_GROUPS_MAX:] for rank in ranks]:
        grouped.append(ExitGroup("ended in other ways", RankSet.of(others)))
    return grouped


def interrupted(job_id: str, signum: int, *, generation: int, restarts: int) -> Verdict:
    """Return the verdict of a job that its user stopped with `signum`."""
    return Verdict(
        job_id=job_id,
        code=signal_exit_code(signum),
        reason=f"stopped by {signal_name(signum)}",
        generation=generation,
        restarts=restarts,
    )


def render(verdict: Verdict) -> str:
    """Return the last thing that is printed about a failed job, without a final newline."""
    lines = [f"error: {verdict.reason}"]
    if root := verdict.root:
        lines += _render_root(root)
    if verdict.finished:
        lines.append(f"  {_ranks(verdict.finished)} had finished with code 0")
    lines += [f"  could not be killed: {process}" for process in verdict.stuck]
    if verdict.hint:
        lines.append(f"  hint: {verdict.hint}")
    if verdict.collateral:
        lines.append(f"collateral: {'; '.join(map(_render_group, verdict.collateral))}")
    return "\n".join(lines)


def _render_root(root: RankExit) -> list[str]:
    lines = [f"  {root.error}"] if root.error else []
    if root.tail:
        count = len(root.tail)
        lines.append(
            f"  last {count} lines of its log:" if count > 1 else "  last line of its log:"
        )
        lines += [f"  | {line}" for line in root.tail]
    return [*lines, f"  log: {root.log_file}"]


def _render_group(group: ExitGroup) -> str:
    how = group.how if len(group.ranks) == 1 else group.how.replace("was ", "were ", 1)
    return f"{_ranks(group.ranks)} {how}"


def _ranks(ranks: RankSet) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks}"


def render_seconds(seconds: float) -> str:
    """Return a duration with as many digits as a person wants to read."""
    return f"{seconds:.2f}s" if seconds < 10 else f"{seconds:.0f}s"  # noqa: PLR2004


def internal(job_id: str, reason: str, *, generation: int, code: int) -> Verdict:
    """Return the verdict of a job that one of our own processes failed."""
    return Verdict(
        job_id=job_id,
        code=code or ExitCode.INTERNAL,
        reason=reason,
        generation=generation,
        restarts=max(generation, 0),
    )
