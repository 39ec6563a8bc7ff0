"""Builds the verdict of a job from its last generation, the failures in it and the reason."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from msrun.cluster import verdict as verdicts
from msrun.cluster.bounds import RankSet
from msrun.cluster.scheduler.generation import Generation
from msrun.cluster.scheduler.restart_policy import GiveUp
from msrun.cluster.verdict import RankExit, Verdict
from msrun.errors import ExitCode, signal_exit_code, signal_name


@dataclass(frozen=True, slots=True)
class VerdictBuilder:
    """The verdicts that a job may end with at one moment.

    Args:
        job_id: The job.
        number: Number of its generation.
        restarts: Restarts so far.
        generation: The last generation; empty before the first.
    """

    job_id: str
    number: int
    restarts: int
    generation: Generation

    def success(self) -> Verdict:
        """Return the verdict of a job whose ranks all exited with code 0."""
        return self.build(ExitCode.OK, "")

    def build(self, code: int, reason: str) -> Verdict:
        """Return a verdict without a failed rank, with the processes that could not be killed."""
        return Verdict(
            job_id=self.job_id,
            code=code,
            reason=reason,
            generation=self.number,
            restarts=self.restarts,
            stuck=self.generation.all_stuck(),
        )

    def interrupted(self, signum: int) -> Verdict:
        """Return the verdict of a job that its user stopped with `signum`."""
        return self.build(signal_exit_code(signum), f"stopped by {signal_name(signum)}")

    def failure(self, root: RankExit | None, step: GiveUp) -> Verdict:
        """Return the verdict of a job that ends with its generation.

        Args:
            root: The first worker that failed; None if the loss of a node came first.
            step: Why there is no restart, and the code that replaces the failure's own.
        """
        own_code = root.exit_code if root else ExitCode.NODE_LOST
        reason = self.generation.sentence(root) + (f"; {step.reason}" if step.reason else "")
        verdict = self.build(own_code if step.code is None else step.code, reason)
        return self.with_ends(msgspec.structs.replace(verdict, hint=step.hint), root)

    def server_failure(self, end: RankExit, step: GiveUp) -> Verdict:
        """Return the verdict of a job that ends with a parameter server.

        Args:
            end: How the server ended.
            step: As of `failure`.
        """
        # One that ended with 0 had not finished: servers are needed as long as workers run.
        own_code = end.exit_code or ExitCode.NODE_LOST
        reason = end.sentence() + (f"; {step.reason}" if step.reason else "")
        verdict = self.build(own_code if step.code is None else step.code, reason)
        return msgspec.structs.replace(verdict, hint=step.hint, root=end)

    def with_ends(self, verdict: Verdict, root: RankExit | None) -> Verdict:
        """Return `verdict` with the ends of all workers beside that of `root`."""
        every = (end for end, _ in self.generation.exits.values())
        ends = [end for end in every if root is None or end is not root]
        return msgspec.structs.replace(
            verdict,
            root=root,
            collateral=verdicts.group_exits(end for end in ends if not end.succeeded),
            # Named because a rank that leaves early can make its peers fail.  A rank that was
            # asked to stop and then exited with 0 did not finish.
            finished=RankSet.of(end.rank for end in ends if end.succeeded and not end.stopped),
        )

    def join_timeout(self, attendance: str, seconds: float) -> Verdict:
        """Return the verdict of a job whose nodes did not register within `seconds`.

        After a generation the verdict also says why that ended, and a job that only
        lost nodes ends with 120 (node lost) and not with 121 (nodes missing).
        """
        reason = f"{attendance}, after {seconds:g}s"
        if not self.generation.members:
            return self.build(ExitCode.JOIN_TIMEOUT, reason)
        root = self.generation.root()
        ended = f"the job cannot go on: {self.generation.sentence(root)}; {reason}"
        return self.build(ExitCode.JOIN_TIMEOUT if root else ExitCode.NODE_LOST, ended)
